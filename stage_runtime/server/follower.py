"""A stage that is not the first: takes micro-batches from its predecessor, hands them to its successor."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import replace

from stage_runtime.engine.stage import EngineError, StageEngine
from stage_runtime.link.backoff import Backoff
from stage_runtime.link.connection import Link, LinkError
from stage_runtime.link.control import Free, KvLengths, Notice, Open, Ready, decode_control, encode_control
from stage_runtime.link.endpoints import BoxAddress, LinkSettings
from stage_runtime.link.frames import Frame, FrameError, FrameType
from stage_runtime.link.steps import Output, Step, TokenKind, decode_step, encode_step, encode_tokens
from stage_runtime.link.tasks import until_first_ends, within
from stage_runtime.server.kept import KeptTimer
from stage_runtime.server.neighbours import RING_KEY, LinkWatch
from stage_runtime.server.probe import probe_problem
from stage_runtime.server.state import EpochState, StageState

log = logging.getLogger(__name__)

# Micro-batches in flight are as many as stages; more than this means a predecessor that ignores that.
FRAMES_QUEUED = 1024


class Follower:
    """Owns at most one pair of links: predecessor and successor live and die together.

    Args:
        settings: this side of links; its Hello carries the epoch.
        successor: the next box in the ring; the first one for the last stage.
        engine: what computes.
        epoch: what others see of the epoch. state: of the process.
        last: whether this is the last stage.
    """

    def __init__(
        self,
        settings: LinkSettings,
        successor: BoxAddress,
        engine: StageEngine,
        epoch: EpochState,
        state: StageState,
        *,
        last: bool,
    ) -> None:
        self._settings = settings
        self._successor_address = successor
        self._last = last
        self._engine = engine
        self._epoch = epoch
        self._state = state
        self._compute = state.compute
        self._watch = LinkWatch(epoch.number, state.on_link)
        self._kept = KeptTimer(state.compute)
        self._predecessor: Link | None = None
        self._session_lock = asyncio.Lock()
        self._whole = False  # the ring has closed and agreed on what it keeps
        self._idle = asyncio.Event()  # no sequence is open
        self._idle.set()
        self._handlers: dict[FrameType, Callable[[Frame, Link], Awaitable[None]]] = {
            FrameType.SURVEY: self._survey,
            FrameType.AGREED: self._agreed,
            FrameType.OPEN: self._open,
            FrameType.STEP: self._step,
            FrameType.FREE: self._free,
            FrameType.READY: self._ready,
        }

    async def run(self) -> None:
        """A predecessor's link starts everything; until cancelled."""
        self._epoch.enter("loaded", "no predecessor yet")
        self._kept.start(self._engine)
        await self._kept.run()

    async def fit(self) -> str:
        """Why the epoch can't be voted for; a follower is fit with its layers."""
        return ""

    def commit(self) -> None:
        """The epoch is committed."""
        self._show()

    async def end(self, reason: str, seconds: float) -> bool:
        """The epoch ends here: close the ring, keep the caches; whether those are put away within so many seconds."""
        if self._predecessor is not None:
            self._predecessor.close(reason)
        try:
            await within(seconds, self._session_lock.acquire())  # until the session has put everything away
        except asyncio.TimeoutError:
            return False
        self._session_lock.release()
        self._epoch.enter("loaded", reason)
        return True

    async def serve_stage(self, link: Link) -> None:
        """A predecessor has connected; returns when the link is over.

        A new link replaces the old one, whose peer restarted before its silence was noticed.
        """
        if self._predecessor is not None:
            self._predecessor.close("replaced by a new link")
        self._predecessor = link
        async with self._session_lock:
            if self._predecessor is link and not link.closed_reason:
                await self._session(link)

    async def serve_gateway(self, link: Link) -> None:
        """Gateways talk to the first stage only; their Hello is refused before this."""
        link.close("not the first stage")

    async def drain(self, seconds: float) -> None:
        """Tell the first stage to admit nothing more, and wait until no sequence is open."""
        if self._predecessor is None or self._predecessor.closed_reason:
            return
        notice = Notice(self._settings.own.box, "draining", f"{self._settings.own.box} stops")
        try:
            await self._predecessor.send(self._frame(FrameType.NOTICE, encode_control(notice)))
        except LinkError:
            return
        try:
            await within(seconds, self._idle.wait())
        except asyncio.TimeoutError:
            log.warning("sequences are still open after %g s", seconds)

    def _show(self) -> None:
        """State and reason follow from commit and ring."""
        if self._whole and self._epoch.committed:
            self._epoch.enter("ready")
        elif self._whole:
            self._epoch.enter("loaded", "the ring is closed, no commit yet")

    async def _session(self, predecessor: Link) -> None:
        ring = predecessor.peer.extra.get(RING_KEY, "")
        frames: asyncio.Queue[Frame] = asyncio.Queue(FRAMES_QUEUED)
        successor: asyncio.Future[Link] = asyncio.get_running_loop().create_future()
        reason = "the stage stops"
        log.info("ring %s: predecessor %s is connected", ring, predecessor.peer.box)
        self._watch.connected(predecessor)
        try:
            await until_first_ends(
                self._receive(predecessor, frames),
                self._connect(predecessor, ring, successor),
                self._work(frames, successor),
            )
        except (LinkError, FrameError, EngineError) as error:
            reason = str(error)
            log.warning("ring %s is broken: %s", ring, reason)
        except Exception as error:  # a bug: the listener logs it, the neighbours hear of it
            reason = f"a bug of {self._settings.own.box}: {error!r}"
            raise
        finally:
            await self._end_session(predecessor, successor, reason)

    async def _end_session(self, predecessor: Link, successor: asyncio.Future[Link], reason: str) -> None:
        """Close both links, report whom it was not our doing to lose, keep the caches."""
        self._whole = False
        self._watch.ended(predecessor)
        if successor.done() and not successor.cancelled():
            self._watch.ended(successor.result())
            successor.result().close(reason)
            self._state.rings_lost += 1
        predecessor.close(reason)
        self._epoch.enter("loaded", f"the ring is broken: {reason}")
        self._idle.set()
        await self._compute.run(self._engine.keep_all)
        self._kept.start(self._engine)

    async def _receive(self, predecessor: Link, frames: asyncio.Queue[Frame]) -> None:
        while True:
            frame = await predecessor.receive()
            if frame.type not in self._handlers:
                raise FrameError(f"{frame.type.name} from the predecessor")
            if frame.epoch != self._epoch.number:
                raise FrameError(f"{frame.type.name} of epoch {frame.epoch}, this is {self._epoch.number}")
            await frames.put(frame)

    async def _connect(self, predecessor: Link, ring: str, successor: asyncio.Future[Link]) -> None:
        """Dial the successor until it answers, then pass what it reports back towards the first stage."""
        timing = self._settings.timing
        backoff = Backoff(timing.reconnect_seconds, timing.reconnect_max_seconds, at_once=True)
        while not successor.done():
            try:
                successor.set_result(await self._watch.dial(self._settings, self._successor_address, ring))
            except LinkError as error:
                self._epoch.enter("loaded", str(error))
                notice = Notice(self._settings.own.box, "unreachable", f"{self._settings.own.box}: {error}")
                await predecessor.send(self._frame(FrameType.NOTICE, encode_control(notice)))
                await asyncio.sleep(backoff.next_seconds())
        self._state.rings_formed += 1
        self._epoch.enter("loaded", "waiting for the ring to agree")
        while True:
            frame = await successor.result().receive()
            if frame.type is not FrameType.NOTICE or self._last:
                raise FrameError(f"{frame.type.name} from the successor")
            await predecessor.send(frame)

    async def _work(self, frames: asyncio.Queue[Frame], successor: asyncio.Future[Link]) -> None:
        # shielded: a cancelled waiter must not cancel the future that owns the link
        link = await asyncio.shield(successor)
        while True:
            frame = await frames.get()
            await self._handlers[frame.type](frame, link)

    async def _survey(self, frame: Frame, successor: Link) -> None:
        lengths = decode_control(KvLengths, frame.body).sequences
        lowered = KvLengths(await self._compute.run(self._engine.survey, lengths))
        await successor.send(self._frame(FrameType.SURVEY, encode_control(lowered)))

    async def _agreed(self, frame: Frame, successor: Link) -> None:
        await self._compute.run(self._engine.agree, decode_control(KvLengths, frame.body).sequences)
        self._kept.stop()  # the first stage frees what nobody claims
        self._whole = True
        self._show()
        await self._pass_on(frame, successor)

    async def _open(self, frame: Frame, successor: Link) -> None:
        wanted = decode_control(Open, frame.body)
        self._idle.clear()
        await self._compute.run(self._engine.open, wanted.sequence_id, wanted.sampling, wanted.generated, wanted.kv_len)
        log.info("sequence opens", extra={"request_id": wanted.request_id, "sequence_id": wanted.sequence_id})
        await self._pass_on(frame, successor)

    async def _free(self, frame: Frame, successor: Link) -> None:
        message = decode_control(Free, frame.body)
        await self._compute.run(self._engine.free, message.sequence_ids)
        if not self._engine.open_sequences:
            self._idle.set()
        await self._pass_on(frame, successor)

    async def _ready(self, frame: Frame, successor: Link) -> None:
        self._epoch.largest_logit_difference = decode_control(Ready, frame.body).largest_logit_difference
        await self._pass_on(frame, successor)

    async def _pass_on(self, frame: Frame, successor: Link) -> None:
        if not self._last:
            await successor.send(frame)

    async def _step(self, frame: Frame, successor: Link) -> None:
        step = decode_step(frame.body, self._engine.config.hidden_size)
        self._state.micro_batches += 1
        self._state.rows += sum(entry.rows for entry in step.entries)
        self._state.tokens.add(sum(entry.output is Output.LAST for entry in step.entries))
        step = replace(step, batch_limit=min(step.batch_limit, self._state.ring_limit))
        if not self._last:
            result = await self._compute.step(self._engine.forward, step)
            answer = self._frame(FrameType.STEP, encode_step(result), frame.micro_batch)
        elif not self._epoch.stage.head:
            result = await self._compute.step(self._forward_to_outputs, step)
            answer = self._frame(FrameType.OUTPUT, encode_step(result), frame.micro_batch)
        else:
            tokens = await self._compute.step(lambda: self._engine.head(self._forward_to_outputs(step)))
            for token in tokens.results:
                if token.kind is TokenKind.PROBE:
                    self._judge_probe(token.value)
            answer = self._frame(FrameType.TOKENS, encode_tokens(tokens), frame.micro_batch)
        await successor.send(answer)

    def _forward_to_outputs(self, step: Step) -> Step:
        return self._engine.outputs(self._engine.forward(step))

    def _judge_probe(self, difference: float) -> None:
        self._epoch.largest_logit_difference = difference
        if problem := probe_problem(difference):
            self._epoch.enter("failed", problem)

    def _frame(self, kind: FrameType, body: bytes, micro_batch: int = 0) -> Frame:
        return Frame(kind, body, self._epoch.number, micro_batch)
