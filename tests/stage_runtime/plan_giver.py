"""The coordinator's end of the control channel for tests: real links and certificates; the test decides what is said.

It runs in a thread of its own, because stages outlive the event loop of a single test. By itself it makes the site's
plan serve: PREPARE as soon as every member has registered, COMMIT after their votes, ROUTE to gateways, COMMIT again to
a member that comes back. A test may do every step of a switch on its own instead.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, TypeVar

from fleet.planning.plan import PipelinePlan
from stage_runtime.link.connection import Link, LinkError, LinkTiming
from stage_runtime.link.control import PROTOCOL, decode_control, encode_control
from stage_runtime.link.endpoints import LinkServer, LinkSettings
from stage_runtime.link.frames import Frame, FrameError, FrameType
from stage_runtime.link.membership import (
    Abort,
    Challenge,
    ChallengeAnswer,
    Commit,
    Committed,
    Drained,
    Heartbeat,
    Leaving,
    LinkReport,
    Prepare,
    Register,
    Retire,
    Route,
    Standby,
    Vote,
)
from stage_runtime.link.messages import Hello
from stage_runtime.link.tls import TlsIdentity

T = TypeVar("T")
BOX = "control"
PATIENCE_SECONDS = 60.0
LOOK_SECONDS = 0.01


@dataclass
class Heard:
    """What one stage has said, over all its connections.

    Attributes:
        link: while it is connected.
        heartbeats: the latest ones.
    """

    link: Link | None = None
    registers: list[Register] = field(default_factory=list)
    heartbeats: list[Heartbeat] = field(default_factory=list)
    reports: list[LinkReport] = field(default_factory=list)
    votes: list[Vote] = field(default_factory=list)
    committed: list[int] = field(default_factory=list)
    leaving: list[str] = field(default_factory=list)
    answers: list[str] = field(default_factory=list)

    def vote(self, epoch: int) -> Vote | None:
        """Its latest vote for an epoch."""
        return next((vote for vote in reversed(self.votes) if vote.epoch == epoch), None)


class PlanGiver:
    """Gives plans to stages and routes to gateways. All methods may be called from any thread.

    Args:
        tls: of the box "control".
        site: its name. pipeline: the only one.
        timing: of links.
        port: to listen on; 0 takes a free one.
        plan: served under `epoch` without being asked to; None waits for orders.

    Attributes:
        stages: what was heard, by box.
        drained: what gateways have said.
        obedient: whether members that come back are given what is committed.
        on_leaving: called in the giver's thread with the box that was told to stop.
    """

    def __init__(
        self,
        tls: TlsIdentity,
        site: str,
        *,
        pipeline: str = "main",
        timing: LinkTiming | None = None,
        port: int = 0,
        plan: PipelinePlan | None = None,
        epoch: int = 1,
    ) -> None:
        self.stages: dict[str, Heard] = defaultdict(Heard)
        self.drained: list[Drained] = []
        self.obedient = True
        self.port = port
        self.plans: dict[int, Prepare] = {}
        self.committed_epoch = 0
        self.on_leaving: Callable[[str], None] = lambda box: None
        self._first_plan = plan
        self._first_epoch = epoch
        self._pipeline = pipeline
        self._gateways: set[Link] = set()
        self._route: Route | None = None
        hello = Hello(PROTOCOL, "coordinator", BOX, site, "", "", 0, "test")
        self._settings = LinkSettings(hello, tls, timing or LinkTiming())
        self._server: LinkServer | None = None
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="plan-giver", daemon=True)
        self._thread.start()
        self.call(self._listen())

    # --- being there ---------------------------------------------------------------------------------------------

    def call(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run something in the giver's loop and wait for it."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(PATIENCE_SECONDS)

    def go(self) -> None:
        """Vanish: every connection ends, nobody listens."""
        self.call(self._close())

    def come_back(self) -> None:
        """Listen again, at the same port."""
        self.call(self._listen())

    def close(self) -> None:
        """The end."""
        self.go()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    # --- orders --------------------------------------------------------------------------------------------------

    def addresses(self, plan: PipelinePlan) -> dict[str, str]:
        """Ring addresses of a plan's members, as they registered."""
        return {stage.box: f"127.0.0.1:{self.stages[stage.box].registers[-1].ring_port}" for stage in plan.stages}

    def prepare(
        self,
        epoch: int,
        plan: PipelinePlan,
        *,
        planned: bool = False,
        only: str | None = None,
        addresses: dict[str, str] | None = None,
    ) -> None:
        """PREPARE to the members of a plan, or to one of them; without addresses, to where they registered."""
        self.plans[epoch] = Prepare(self._pipeline, epoch, plan, addresses or self.addresses(plan), planned)
        for stage in plan.stages:
            if only in (None, stage.box):
                self.say(stage.box, FrameType.PREPARE, self.plans[epoch])

    def _members(self, epoch: int) -> list[str]:
        return [stage.box for stage in self.plans[epoch].plan.stages if self.stages[stage.box].link is not None]

    def votes(self, epoch: int) -> dict[str, Vote]:
        """Wait until every member of an epoch that is connected has voted."""
        boxes = self._members(epoch)
        self.wait(lambda: all(self.stages[box].vote(epoch) for box in boxes), lambda: f"votes for epoch {epoch}")
        return {box: vote for box in boxes if (vote := self.stages[box].vote(epoch)) is not None}

    def commit(self, epoch: int, *, wait: bool = True) -> None:
        """COMMIT to the members, and the route to gateways."""
        self.committed_epoch = epoch
        boxes = self._members(epoch)
        for box in boxes:
            self.say(box, FrameType.COMMIT, Commit(epoch))
        if wait:
            self.wait(lambda: all(epoch in self.stages[box].committed for box in boxes), lambda: f"commit of {epoch}")
        self.route(epoch)

    def retire(self, epoch: int, *boxes: str, reason: str = "the test says so") -> None:
        """RETIRE to boxes, or to all that are connected."""
        for box in boxes or tuple(self.stages):
            self.say(box, FrameType.RETIRE, Retire(epoch, reason))

    def abort(self, epoch: int, reason: str = "the test says so") -> None:
        """ABORT to the members."""
        for stage in self.plans[epoch].plan.stages:
            self.say(stage.box, FrameType.ABORT, Abort(epoch, reason))

    def standby(self, box: str, standby: Standby) -> None:
        """STANDBY to a box."""
        self.say(box, FrameType.STANDBY, standby)

    def challenge(self, box: str, nonce: str) -> None:
        """CHALLENGE to a box."""
        self.say(box, FrameType.CHALLENGE, Challenge(nonce))

    def switch(self, plan: PipelinePlan, *, planned: bool = False) -> int:
        """A whole switch: prepare, votes, commit. The epoch."""
        epoch = max(self.plans, default=0) + 1
        self.prepare(epoch, plan, planned=planned)
        votes = self.votes(epoch)
        assert all(vote.yes for vote in votes.values()), votes
        self.commit(epoch)
        return epoch

    def route(self, epoch: int, **changes: Any) -> None:
        """ROUTE to all gateways, now and when they connect."""
        self.call(self._set_route(epoch, **changes))

    async def _set_route(self, epoch: int, **changes: Any) -> None:
        prepare = self.plans[epoch]
        first = prepare.plan.stages[0].box
        host, _, port = prepare.addresses[first].rpartition(":")
        fields: dict[str, Any] = {
            "pipeline": self._pipeline,
            "epoch": epoch,
            "state": "serving",
            "reason": "",
            "first_stage": first,
            "host": host,
            "port": int(port),
            "max_sequences": prepare.plan.max_sequences,
            "max_tokens_per_sequence": prepare.plan.max_tokens_per_sequence,
            "retry_after_seconds": 1.0,
            "missing_mebibytes": {},
            "degraded": "",
            "planned": prepare.planned,
        }
        self._route = Route(**fields | changes)
        await self._tell_gateways()

    def say(self, box: str, kind: FrameType, message: Any) -> None:
        """Any message to a stage; lost when it is not connected."""
        self.send(box, Frame(kind, encode_control(message)))

    def send(self, box: str, frame: Frame) -> None:
        """Any frame to a stage; lost when it is not connected."""
        self.call(self._send(self.stages[box].link, frame))

    # --- waiting -------------------------------------------------------------------------------------------------

    def wait(self, condition: Callable[[], object], describe: Callable[[], object] = str) -> None:
        """Until a condition holds; blocks the calling thread."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not condition():
            if time.monotonic() > deadline:
                raise AssertionError(f"it did not happen: {describe()}; heard: {dict(self.stages)}")
            time.sleep(LOOK_SECONDS)

    def wait_registered(self, *boxes: str, starts: int = 1) -> None:
        """Until boxes have registered so often."""
        self.wait(
            lambda: all(len(self.stages[box].registers) >= starts and self.stages[box].link for box in boxes),
            lambda: f"{boxes} registered {starts} times",
        )

    # --- the other side ------------------------------------------------------------------------------------------

    async def _listen(self) -> None:
        self._server = LinkServer(self._settings, self._check, self._serve, lambda address, reason: None)
        self._server.start("127.0.0.1", self.port)
        self.port = self._server.port

    async def _close(self) -> None:
        server, self._server = self._server, None
        if server is not None:
            await server.close()

    @staticmethod
    def _check(peer: Hello) -> str:
        return "" if peer.role in ("stage", "gateway") else f"role {peer.role!r}"

    async def _serve(self, link: Link) -> None:
        try:
            if link.peer.role == "gateway":
                await self._serve_gateway(link)
            else:
                await self._serve_stage(link)
        except (LinkError, FrameError):
            return
        finally:
            self._gateways.discard(link)
            if self.stages[link.peer.box].link is link:
                self.stages[link.peer.box].link = None

    async def _serve_gateway(self, link: Link) -> None:
        self._gateways.add(link)
        if self._route is not None:
            await self._send(link, Frame(FrameType.ROUTE, encode_control(self._route)))
        while True:
            frame = await link.receive()
            if frame.type is not FrameType.DRAINED:
                raise FrameError(f"{frame.type.name} from a gateway")
            self.drained.append(decode_control(Drained, frame.body))

    async def _serve_stage(self, link: Link) -> None:
        heard = self.stages[link.peer.box]
        heard.link = link
        while True:
            frame = await link.receive()
            await self._hear(link, heard, frame)

    async def _hear(self, link: Link, heard: Heard, frame: Frame) -> None:
        box = link.peer.box
        if frame.type is FrameType.REGISTER:
            heard.registers.append(decode_control(Register, frame.body))
            await self._registered(box)
        elif frame.type is FrameType.HEARTBEAT:
            heard.heartbeats = [*heard.heartbeats[-200:], decode_control(Heartbeat, frame.body)]
        elif frame.type is FrameType.LINK_REPORT:
            heard.reports.append(decode_control(LinkReport, frame.body))
        elif frame.type is FrameType.VOTE:
            heard.votes.append(decode_control(Vote, frame.body))
            if heard.votes[-1].epoch == self._first_epoch:
                await self._voted()
        elif frame.type is FrameType.COMMITTED:
            heard.committed.append(decode_control(Committed, frame.body).epoch)
        elif frame.type is FrameType.LEAVING:
            heard.leaving.append(decode_control(Leaving, frame.body).reason)
            self.on_leaving(box)
        elif frame.type is FrameType.ANSWER:
            heard.answers.append(decode_control(ChallengeAnswer, frame.body).nonce)
        else:
            raise FrameError(f"{frame.type.name} from a stage")

    async def _registered(self, box: str) -> None:
        plan, epoch = self._first_plan, self._first_epoch
        committed = self.plans.get(self.committed_epoch)
        if not self.obedient:
            return
        if committed is not None and committed.plan.stage_of(box) is not None:
            register = self.stages[box].registers[-1]
            knows = self.committed_epoch in (register.committed_epoch, register.prepared_epoch)
            frame = Frame(FrameType.PREPARE, encode_control(committed))
            if knows:
                frame = Frame(FrameType.COMMIT, encode_control(Commit(self.committed_epoch)))
            await self._send(self.stages[box].link, frame)
        elif plan is not None and committed is None:
            boxes = [stage.box for stage in plan.stages]
            if all(self.stages[each].link is not None and self.stages[each].registers for each in boxes):
                self.plans[epoch] = Prepare(self._pipeline, epoch, plan, self.addresses(plan), planned=False)
                body = encode_control(self.plans[epoch])
                for each in boxes:
                    await self._send(self.stages[each].link, Frame(FrameType.PREPARE, body))

    async def _voted(self) -> None:
        """Commit the first plan once all have voted yes; a member that comes back without it gets it again."""
        epoch = self._first_epoch
        if self._first_plan is None or not self.obedient or epoch not in self.plans:
            return
        if self.committed_epoch not in (0, epoch):
            return
        boxes = [stage.box for stage in self.plans[epoch].plan.stages]
        if all((vote := self.stages[box].vote(epoch)) is not None and vote.yes for box in boxes):
            self.committed_epoch = epoch
            for box in boxes:
                await self._send(self.stages[box].link, Frame(FrameType.COMMIT, encode_control(Commit(epoch))))
            if self._route is None:
                await self._set_route(epoch)

    async def _tell_gateways(self) -> None:
        if self._route is not None:
            for link in list(self._gateways):
                await self._send(link, Frame(FrameType.ROUTE, encode_control(self._route)))

    @staticmethod
    async def _send(link: Link | None, frame: Frame) -> None:
        if link is not None:
            try:
                await link.send(frame)
            except LinkError:
                return
