"""The stage's end of the control channel: dials the coordinator for ever, says how things stand, obeys."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from typing import Any

from stage_runtime.link.backoff import Backoff
from stage_runtime.link.connection import Link, LinkError
from stage_runtime.link.control import decode_control, encode_control
from stage_runtime.link.endpoints import LinkSettings, dial
from stage_runtime.link.frames import Frame, FrameError, FrameType
from stage_runtime.link.membership import (
    TAKES_KEY,
    TAKES_WALL_CLOCK,
    Abort,
    Challenge,
    ChallengeAnswer,
    Commit,
    Committed,
    Leaving,
    LinkReport,
    Prepare,
    Retire,
    Standby,
    Vote,
)
from stage_runtime.link.tasks import until_first_ends, within
from stage_runtime.server.changes import Changes
from stage_runtime.server.epochs import Epochs
from stage_runtime.server.plan_log import PlanLogError
from stage_runtime.server.pulse import Pulse
from stage_runtime.server.state import StageState

log = logging.getLogger(__name__)

# A coordinator that lets so many messages pile up does not read.
MESSAGES_QUEUED = 1024
# Orders that wait while one is carried out; more come in as they are taken.
ORDERS_QUEUED = 64


class Control:
    """Owns the link to the coordinator. Losing it changes nothing but what others are told.

    Args:
        settings: this side, epoch 0.
        state: what heartbeats say.
        epochs: what orders are for.
        pulse: makes REGISTER and HEARTBEAT.
    """

    def __init__(self, settings: LinkSettings, state: StageState, epochs: Epochs, pulse: Pulse) -> None:
        self._settings = settings
        self._state = state
        self._epochs = epochs
        self._pulse = pulse
        self._news = asyncio.Event()
        self._outgoing: asyncio.Queue[Frame] | None = None  # while connected
        self._link: Link | None = None
        self._reports: dict[tuple[int, str], LinkReport] = {}  # the latest of every neighbour in every live ring
        self._leaving = ""
        self.changes = Changes()
        self._orders: dict[FrameType, Callable[[bytes], Awaitable[None]]] = {
            FrameType.PREPARE: self._prepare,
            FrameType.COMMIT: self._commit,
            FrameType.ABORT: self._abort,
            FrameType.RETIRE: self._retire,
            FrameType.STANDBY: self._standby,
        }
        epochs.on_vote = self._vote
        state.on_change = self._news.set
        state.on_link = self._report

    @property
    def connected(self) -> bool:
        """Whether the coordinator is there."""
        return self._outgoing is not None

    def leave(self, reason: str) -> None:
        """The stage was told to stop: say so, now and whenever the coordinator comes back."""
        self._leaving = reason
        self._send(FrameType.LEAVING, Leaving(reason))

    async def run(self) -> None:
        """Dial, obey, dial again; until cancelled."""
        timing = self._settings.timing
        backoff = Backoff(timing.reconnect_seconds, timing.reconnect_max_seconds, at_once=True)
        while True:
            try:
                await self._session(backoff)
            except (LinkError, FrameError) as error:
                self._lost(str(error))
            await asyncio.sleep(backoff.next_seconds())

    async def _session(self, backoff: Backoff) -> None:
        config = self._state.config
        link = await dial(self._settings, config.coordinator)
        reason = "the stage stops"
        try:
            if link.peer.role != "coordinator":
                raise LinkError(f"{config.coordinator} is a {link.peer.role}, expected the coordinator", "refused")
            backoff.reset()
            await self._talk(link)
        except (LinkError, FrameError) as error:
            reason = str(error)
            raise
        except Exception as error:
            # whatever a coordinator says must not end the ring: that is logged as the bug it is, and dialled again
            reason = f"a bug: {error!r}"
            log.exception("an order of the coordinator failed")
            raise LinkError(reason) from None
        finally:
            self._lost(reason)
            link.close(reason)

    async def _talk(self, link: Link) -> None:
        outgoing: asyncio.Queue[Frame] = asyncio.Queue(MESSAGES_QUEUED)
        self._outgoing, self._link = outgoing, link
        self._state.coordinator_reason = ""
        log.info("the coordinator %s is connected", link.peer.box)
        self.changes.notify()
        self._send(FrameType.REGISTER, self._pulse.register(self._epochs))
        for report in self._live_reports().values():
            self._send(FrameType.LINK_REPORT, report)
        if self._leaving:
            self._send(FrameType.LEAVING, Leaving(self._leaving))
        orders: asyncio.Queue[Frame] = asyncio.Queue(ORDERS_QUEUED)
        await until_first_ends(
            self._receive(link, orders),
            self._obey(orders),
            self._write(link, outgoing),
            self._beat(wall_clock=TAKES_WALL_CLOCK in link.peer.extra.get(TAKES_KEY, "").split()),
        )

    def _lost(self, reason: str) -> None:
        if self._state.coordinator_reason != reason:
            log.warning("no coordinator: %s", reason)
        self._state.coordinator_reason = reason
        self._outgoing = self._link = None
        self.changes.notify()

    async def _receive(self, link: Link, orders: asyncio.Queue[Frame]) -> None:
        while True:
            frame = await link.receive()
            if frame.type is FrameType.CHALLENGE:  # at once, whatever is going on
                nonce = decode_control(Challenge, frame.body).nonce
                self._send(FrameType.ANSWER, ChallengeAnswer(nonce))
            elif frame.type in self._orders:
                await orders.put(frame)
            else:
                raise FrameError(f"{frame.type.name} from the coordinator")

    async def _obey(self, orders: asyncio.Queue[Frame]) -> None:
        while True:
            order = asyncio.ensure_future(self._carry_out(await orders.get()))
            try:
                await asyncio.shield(order)
            except asyncio.CancelledError:
                # the link is lost, but an order that is carried out by halves would leave a ring that nobody owns
                await asyncio.gather(order, return_exceptions=True)
                raise

    async def _carry_out(self, frame: Frame) -> None:
        try:
            await self._orders[frame.type](frame.body)
        except PlanLogError as error:  # nothing was promised; the order comes again
            log.error("%s can't be carried out: %s", frame.type.name, error)

    @staticmethod
    async def _write(link: Link, outgoing: asyncio.Queue[Frame]) -> None:
        while True:
            await link.send(await outgoing.get())

    async def _beat(self, *, wall_clock: bool) -> None:
        while True:
            self._news.clear()
            self._send(FrameType.HEARTBEAT, self._pulse.heartbeat(wall_clock=wall_clock))
            with contextlib.suppress(asyncio.TimeoutError):
                await within(self._state.config.heartbeat_seconds, self._news.wait())

    def _send(self, kind: FrameType, message: Any) -> None:
        if self._outgoing is None or self._link is None:
            return  # on connection the coordinator hears how things stand, and gives again what is still to be done
        try:
            self._outgoing.put_nowait(Frame(kind, encode_control(message)))
        except asyncio.QueueFull:
            self._link.close(f"{MESSAGES_QUEUED} messages wait, the coordinator does not read")

    def _vote(self, vote: Vote) -> None:
        log.info("vote for epoch %d: %s %s", vote.epoch, "yes" if vote.yes else "no", vote.reason)
        self._send(FrameType.VOTE, vote)

    def _report(self, report: LinkReport) -> None:
        self._reports = self._live_reports() | {(report.epoch, report.box): report}
        self._send(FrameType.LINK_REPORT, report)

    def _live_reports(self) -> dict[tuple[int, str], LinkReport]:
        return {key: report for key, report in self._reports.items() if report.epoch in self._epochs.live}

    async def _prepare(self, body: bytes) -> None:
        prepare = decode_control(Prepare, body)
        try:
            await self._epochs.prepare(prepare)
        except PlanLogError as error:
            self._vote(Vote(prepare.epoch, False, str(error), 0, 0.0))

    async def _commit(self, body: bytes) -> None:
        commit = decode_control(Commit, body)
        if await self._epochs.commit(commit):
            self._send(FrameType.COMMITTED, Committed(commit.epoch))
        else:
            self._vote(Vote(commit.epoch, False, f"nothing is promised under epoch {commit.epoch} here", 0, 0.0))

    async def _abort(self, body: bytes) -> None:
        await self._epochs.abort(decode_control(Abort, body))

    async def _retire(self, body: bytes) -> None:
        await self._epochs.retire(decode_control(Retire, body))

    async def _standby(self, body: bytes) -> None:
        try:
            self._epochs.standby(decode_control(Standby, body))
        except ValueError as error:
            raise FrameError(str(error)) from None
