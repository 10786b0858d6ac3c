"""A site around the real coordinator: scripted stages and gateways that speak the membership messages over real TLS."""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from fleet import __version__
from fleet.coordinator.config import CoordinatorConfig, parse_config
from fleet.coordinator.run import Coordinator
from fleet.inventory.model import Timing
from stage_runtime.link.connection import Link, LinkError, LinkTiming
from stage_runtime.link.control import PROTOCOL, decode_control, encode_control
from stage_runtime.link.endpoints import BoxAddress, LinkSettings, dial
from stage_runtime.link.frames import Frame, FrameType
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
from stage_runtime.link.tls import server_name
from tests.stage_runtime.pki import SiteCa

SITE = "demo"
DIGEST = "d" * 64
MIB = 2**20
LAYERS = 6
LAYER_BYTES = 100 * MIB
WAIT_SECONDS = 15.0
BOX_BYTES = 4096 * MIB
TIMING: dict[str, float] = {
    **{name: value for name, value in Timing().model_dump().items() if not name.startswith("ssh_")},
    "ring_reconnect_seconds": 0.05,
    "ring_reconnect_max_seconds": 0.4,
    "ring_ping_seconds": 0.1,
    "ring_silence_least_seconds": 0.6,
    "ring_silence_seconds": 1.5,
    "heartbeat_seconds": 0.1,
    "hung_seconds": 1.5,
    "ring_trouble_seconds": 0.3,
    "prepare_seconds": 3.0,
    "switch_drain_seconds": 2.0,
    "settle_seconds": 0.4,
    "hold_down_seconds": 0.8,
    "hold_down_max_seconds": 60.0,
    "hold_down_forget_seconds": 3600.0,
}
DECODERS: dict[FrameType, type[Any]] = {
    FrameType.PREPARE: Prepare,
    FrameType.COMMIT: Commit,
    FrameType.ABORT: Abort,
    FrameType.RETIRE: Retire,
    FrameType.STANDBY: Standby,
    FrameType.CHALLENGE: Challenge,
    FrameType.ROUTE: Route,
}


async def until(condition: Callable[[], Any], what: str = "") -> Any:
    """Wait until a condition holds, and return its value."""
    for _ in range(int(WAIT_SECONDS / 0.01)):
        if value := condition():
            return value
        await asyncio.sleep(0.01)
    raise AssertionError(f"never came true: {what or condition}")


def config_data(
    directory: Path, ca: SiteCa, boxes: tuple[str, ...] = ("box1", "box2", "box3"), **changes: Any
) -> dict[str, Any]:
    """coordinator.json of a site with one pipeline; `memory` and `timing` change single values."""
    tls = ca.issue("control")
    memory = {box: BOX_BYTES for box in boxes} | changes.pop("memory", {})
    weights = {"held": LAYER_BYTES, "read": LAYER_BYTES, "converting": 0}
    return {
        "schema": 1,
        "site": SITE,
        "box": "control",
        "listen": {"host": "127.0.0.1", "port": 0},
        "http": {"host": "127.0.0.1", "port": 0},
        "tls": {"ca": str(tls.ca), "certificate": str(tls.certificate), "key": str(tls.key)},
        "clock_synchronised_file": None,
        "state_directory": str(directory),
        "pipelines": {
            "main": {
                "model": "tiny",
                "model_digest": DIGEST,
                "policy": "exact",
                "max_sequences": 4,
                "max_tokens_per_sequence": 128,
                "boxes": list(boxes),
                "explicit": None,
                "cost": {
                    "layers": [weights] * LAYERS,
                    "head": {"held": 10 * MIB, "read": 10 * MIB, "converting": 0},
                    "tied": True,
                    "trial_bytes": 0,
                    "kv_bytes_per_token": 1024,
                    "hidden_size": 64,
                },
            }
        },
        "boxes": {
            box: {
                "host": "127.0.0.1",
                "ring_port": 7401,
                "bytes_per_second": 5.9e9,
                "memory_bytes": memory[box],
                "keep_free_bytes": 0,
                "link_bytes_per_second": 1.25e8,
            }
            for box in boxes
        },
        "gateways": ["control", *boxes],
        "timing": TIMING | changes.pop("timing", {}),
        **changes,
    }


class Dialler:
    """One side's link to the coordinator: everything that came in, kept by type."""

    def __init__(self, ca: SiteCa, box: str, role: str) -> None:
        self.box = box
        self.role = role
        self.timing = TIMING
        self.tls = ca.issue(box)
        self.link: Link | None = None
        self.inbox: list[Any] = []
        self.ended = ""
        self._task: asyncio.Task[None] | None = None

    async def connect(self, port: int) -> None:
        """Dial until the coordinator takes it."""
        timing = LinkTiming.from_config(self.timing)
        hello = Hello(PROTOCOL, self.role, self.box, SITE, DIGEST, "exact", 0, __version__)
        address = BoxAddress("control", "127.0.0.1", port)
        for _ in range(200):
            try:
                self.link = await dial(LinkSettings(hello, self.tls, timing), address)
                break
            except LinkError as error:
                if error.kind == "refused":
                    raise
                await asyncio.sleep(0.05)
        assert self.link is not None
        self.ended = ""
        await self.introduce()
        self._task = asyncio.ensure_future(self._read(self.link))

    async def introduce(self) -> None:
        """What is said first."""

    async def say(self, kind: FrameType, message: Any) -> None:
        """Send a message."""
        assert self.link is not None
        await self.link.send(Frame(kind, encode_control(message)))

    async def _read(self, link: Link) -> None:
        try:
            while True:
                frame = await link.receive()
                if frame.type is FrameType.REFUSED:
                    self.ended = json.loads(frame.body)["reason"]
                    return
                message = decode_control(DECODERS[frame.type], frame.body)
                self.inbox.append(message)
                await self.handle(message)
        except LinkError as error:
            self.ended = self.ended or str(error)

    async def handle(self, message: Any) -> None:
        """What a message is answered with."""

    def last(self, kind: type[Any]) -> Any:
        """The last message of a type, or None."""
        return next((each for each in reversed(self.inbox) if isinstance(each, kind)), None)

    def count(self, kind: type[Any]) -> int:
        """How many messages of a type came."""
        return sum(isinstance(each, kind) for each in self.inbox)

    async def close(self) -> None:
        """End the link, as a process that is killed does."""
        if self.link is not None:
            self.link.close("the test ends it")
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None


class ScriptedStage(Dialler):
    """A stage that answers as a stage does, without a model.

    Attributes:
        answer: the vote on a PREPARE; None: none comes. beats: sends heartbeats. deaf: COMMIT does not reach it.
        working_seconds, step_seconds: for heartbeats. clock_error_seconds: of its wall clock.
        prepared, committed, serving: epochs, as its log and its ring have them.
    """

    def __init__(self, ca: SiteCa, box: str) -> None:
        super().__init__(ca, box, "stage")
        self.pipeline = "main"
        self.process_id = secrets.token_hex(8)
        self.incarnation = 1
        self.layer_seconds: float | None = None
        self.memory_bytes = BOX_BYTES
        self.ring_port = 7401
        self.answer: Callable[[Prepare], Vote | None] = lambda prepare: Vote(prepare.epoch, True, "", 0, 0.01)
        self.deaf = False
        self.beats = True
        self.working_seconds = 0.0
        self.step_seconds: float | None = None
        self.clock_error_seconds = 0.0
        self.prepared = self.committed = self.serving = 0
        self.retired = 0
        self._pulse: asyncio.Task[None] | None = None

    def register(self) -> Register:
        """REGISTER as it is now."""
        return Register(
            self.pipeline,
            self.incarnation,
            self.process_id,
            self.ring_port,
            self.committed,
            self.prepared,
            self.serving,
            self.memory_bytes,
            self.layer_seconds,
            None,
        )

    async def introduce(self) -> None:
        await self.say(FrameType.REGISTER, self.register())
        self._pulse = asyncio.ensure_future(self._beat())

    def restart(self) -> None:
        """A new process: what was in memory is gone, the log is not."""
        self.process_id = secrets.token_hex(8)
        self.incarnation += 1
        self.serving = 0

    async def kill(self) -> None:
        """The process dies: its sockets close."""
        await self.close()
        self.restart()

    async def freeze(self) -> None:
        """Nothing is sent any more, and the connection stays: a power cut, or a stopped process."""
        assert self.link is not None
        self.link._keepalive.cancel()  # the real stage's event loop stands still
        for task in (self._pulse, self._task):
            if task is not None:
                task.cancel()

    async def close(self) -> None:
        if self._pulse is not None:
            self._pulse.cancel()
            await asyncio.gather(self._pulse, return_exceptions=True)
            self._pulse = None
        await super().close()

    async def report(self, box: str, kind: Any, epoch: int | None = None) -> None:
        """Say something of a ring neighbour."""
        report = LinkReport(box, self.serving if epoch is None else epoch, kind, "test", 0.0)
        await self.say(FrameType.LINK_REPORT, report)

    async def leave(self) -> None:
        """SIGTERM."""
        await self.say(FrameType.LEAVING, Leaving("SIGTERM"))

    async def beat_once(self) -> None:
        """One heartbeat."""
        state: Any = "ready" if self.serving else "loaded"
        wall = time.time() + self.clock_error_seconds
        working, step = self.working_seconds, self.step_seconds
        heartbeat = Heartbeat(self.serving, state, "", 0, 0, 0, 0.0, 0, 1, working, step, 0.01, 0, 0, None, "", wall)
        await self.say(FrameType.HEARTBEAT, heartbeat)

    async def _beat(self) -> None:
        try:
            while True:
                if self.beats:
                    await self.beat_once()
                await asyncio.sleep(self.timing["heartbeat_seconds"])
        except LinkError:
            pass  # the reader notes why

    async def handle(self, message: Any) -> None:
        if isinstance(message, Prepare):
            vote = self.answer(message)
            if vote is not None and vote.yes:
                self.prepared = message.epoch
                if not message.planned:
                    self.serving = 0
            if vote is not None:
                await self.say(FrameType.VOTE, vote)
        elif isinstance(message, Commit) and not self.deaf:
            if message.epoch in (self.prepared, self.committed):
                self.committed = self.serving = message.epoch
            await self.say(FrameType.COMMITTED, Committed(message.epoch))
            await self.beat_once()
        elif isinstance(message, Abort) and self.prepared == message.epoch:
            self.prepared = self.committed
        elif isinstance(message, Retire):
            self.retired = message.epoch
            if self.serving <= message.epoch:
                self.serving = 0
        elif isinstance(message, Challenge):
            await self.say(FrameType.ANSWER, ChallengeAnswer(message.nonce))


class ScriptedGateway(Dialler):
    """A gateway; `drains`: says DRAINED as soon as a planned switch asks for it."""

    def __init__(self, ca: SiteCa, box: str = "control") -> None:
        super().__init__(ca, box, "gateway")
        self.drains = True

    async def handle(self, message: Any) -> None:
        if isinstance(message, Route) and message.planned and self.drains:
            await self.drained(message.epoch - 1, message.pipeline)

    async def drained(self, epoch: int, pipeline: str = "main") -> None:
        """DRAINED."""
        await self.say(FrameType.DRAINED, Drained(pipeline, epoch))

    @property
    def route(self) -> Route:
        """The last ROUTE of pipeline main."""
        route = self.route_of("main")
        assert route is not None
        return route

    def route_of(self, pipeline: str) -> Route | None:
        """The last ROUTE of a pipeline."""
        routes = (each for each in reversed(self.inbox) if isinstance(each, Route))
        return next((each for each in routes if each.pipeline == pipeline), None)


@dataclass
class World:
    """Coordinator, stages and a gateway.

    Attributes:
        coordinator: the running one; None while it is stopped.
    """

    directory: Path
    ca: SiteCa
    data: dict[str, Any]
    coordinator: Coordinator | None = None
    stages: dict[str, ScriptedStage] = field(default_factory=dict)
    gateway: ScriptedGateway | None = None
    _task: asyncio.Task[None] | None = None

    @property
    def config(self) -> CoordinatorConfig:
        """The configuration as parsed."""
        return parse_config(self.data)

    @property
    def pipeline(self) -> Any:
        """The coordinator's only pipeline."""
        assert self.coordinator is not None
        return self.coordinator.pipelines["main"]

    @property
    def spans(self) -> dict[str, tuple[int, int]]:
        """The committed plan: box → range."""
        plan = self.pipeline.switching.plan
        return {stage.box: (stage.start, stage.end) for stage in plan.stages} if plan else {}

    @property
    def epoch(self) -> int:
        """The committed epoch."""
        return int(self.pipeline.switching.epoch)

    async def start(self) -> None:
        """Start the coordinator."""
        self.coordinator = await Coordinator(self.config).__aenter__()
        self._task = asyncio.ensure_future(self.coordinator.run())

    async def stop(self) -> None:
        """Stop the coordinator in order."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None
        if self.coordinator is not None:
            await self.coordinator.__aexit__()
            self.coordinator = None

    async def connect(self, *boxes: str) -> None:
        """Connect stages, those of `boxes` or all, and the gateway."""
        assert self.coordinator is not None
        for box in boxes or tuple(self.data["boxes"]):
            if box not in self.stages:
                self.stages[box] = ScriptedStage(self.ca, box)
                self.stages[box].memory_bytes = self.data["boxes"][box]["memory_bytes"]
            await self.stages[box].connect(self.coordinator.port)
        if self.gateway is None:
            self.gateway = ScriptedGateway(self.ca)
            await self.gateway.connect(self.coordinator.port)

    async def serving(self, epoch: int | None = None, boxes: set[str] | None = None) -> None:
        """Wait until a plan serves, at least of this epoch, on exactly these boxes."""

        def served() -> bool:
            right = self.epoch >= (epoch or 1) and (boxes is None or set(self.spans) == boxes)
            route = self.gateway.route_of("main") if self.gateway is not None else None
            told = route is not None and (route.state, route.epoch) == ("serving", self.epoch)
            taken = all(self.stages[box].serving == self.epoch for box in self.spans)
            return right and told and taken and not self.switching

        await until(served, f"epoch {epoch} on {boxes}")
        assert sorted(self.spans.values())[0][0] == 0
        assert max(end for _, end in self.spans.values()) == LAYERS

    @property
    def switching(self) -> bool:
        """Whether a switch is under way."""
        return self.pipeline.switching.switch is not None

    async def events(self, *kinds: str) -> list[dict[str, Any]]:
        """Events so far, of these kinds or all, through the API."""
        _, document = await self.ask("GET", "/v1/events?limit=1000")
        return [event for event in document["events"] if not kinds or event["kind"] in kinds]

    async def ask(self, method: str, path: str, who: str = "operator") -> tuple[int, Any]:
        """One request with a certificate of the site: status and JSON."""
        assert self.coordinator is not None
        url = f"https://127.0.0.1:{self.coordinator.http_port}{path}"
        context = self.ca.issue(who).client_context()
        async with (
            aiohttp.ClientSession() as session,
            session.request(method, url, ssl=context, server_hostname=server_name("control", SITE)) as response,
        ):
            return response.status, await response.json(content_type=None)

    async def close(self) -> None:
        """End everything."""
        for stage in self.stages.values():
            await stage.close()
        if self.gateway is not None:
            await self.gateway.close()
        await self.stop()


@asynccontextmanager
async def world(directory: Path, ca: SiteCa, **changes: Any) -> AsyncIterator[World]:
    """A site with a running coordinator and nobody connected yet."""
    made = World(directory, ca, config_data(directory, ca, **changes))
    await made.start()
    try:
        yield made
        assert made._task is None or not made._task.done(), "the coordinator's task has ended"
    finally:
        await made.close()
