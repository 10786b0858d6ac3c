"""The first stage: forms the ring, probes it, schedules micro-batches, answers gateways."""

from __future__ import annotations

import asyncio
import logging
import secrets

from stage_runtime.engine.scheduler import Delivery, Limits, Scheduler
from stage_runtime.engine.stage import EngineError, StageEngine
from stage_runtime.link.backoff import Backoff
from stage_runtime.link.connection import Link, LinkError
from stage_runtime.link.control import Notice, decode_control
from stage_runtime.link.endpoints import BoxAddress, LinkSettings, dial
from stage_runtime.link.frames import FrameError, FrameType
from stage_runtime.link.messages import FinishedEvent, GenerateRequest, PipelineStatus
from stage_runtime.link.steps import TokenKind
from stage_runtime.link.tasks import until_first_ends, within
from stage_runtime.server.follower import RING_KEY, ring_hello
from stage_runtime.server.gateways import Gateways
from stage_runtime.server.pipe import Pipe
from stage_runtime.server.probe import ProbeError, probe_problem, run_probe
from stage_runtime.server.state import StageState

log = logging.getLogger(__name__)

STATUS_PERIOD_SECONDS = 1.0


class FirstStage:
    """Owns the scheduler and, while the ring holds, the pipe.

    Args:
        settings: this side of links.
        successor: the second stage; None in a pipeline of one.
        engine: what computes.
        state: what others see.
    """

    def __init__(
        self, settings: LinkSettings, successor: BoxAddress | None, engine: StageEngine, state: StageState
    ) -> None:
        config = state.config
        self._settings = settings
        self._successor_address = successor
        self._engine = engine
        self._state = state
        self._compute = state.compute
        self._stages = len(config.plan.stages)
        self.scheduler = Scheduler(
            Limits(
                config.plan.max_sequences,
                config.plan.max_tokens_per_sequence,
                config.max_batch_sequences,
                config.prefill_chunk_tokens,
                self._stages,
                engine.config.vocab_size,
            )
        )
        self._gateways = Gateways(config.epoch, self, self._status)
        self._wake = asyncio.Event()
        self._idle = asyncio.Event()  # no sequence is open or waits
        self._idle.set()
        self._not_admitting = ""  # why a ready ring admits nothing: a box drains
        self._ring = ""  # the forming of the ring that links must belong to
        self._predecessor: asyncio.Future[Link] | None = None

    async def run(self) -> None:
        """Form the ring again and again; runs until cancelled."""
        await until_first_ends(self._keep_ring(), self._tell_status())

    async def serve_gateway(self, link: Link) -> None:
        """A gateway has connected; returns when the link is over."""
        await self._gateways.serve(link)

    async def serve_stage(self, link: Link) -> None:
        """The last stage has connected; returns when the link is over."""
        if link.peer.extra.get(RING_KEY) != self._ring or self._predecessor is None or self._predecessor.done():
            link.close("it belongs to an older ring")
            return
        self._predecessor.set_result(link)
        await link.wait_closed()

    async def drain(self, seconds: float) -> None:
        """Admit nothing more and wait until the open sequences have ended."""
        self._stop_admitting(f"{self._settings.own.box} stops")
        try:
            await within(seconds, self._idle.wait())
        except asyncio.TimeoutError:
            log.warning("sequences are still open after %g s", seconds)

    def submit(self, request: GenerateRequest, gateway: Link) -> None:
        """A gateway wants a sequence."""
        fields = {"request_id": request.request_id, "sequence_id": request.sequence_id}
        status = self._status()
        if status.ready:
            refusal = self.scheduler.submit(request, gateway)
        else:
            refusal = FinishedEvent("unavailable", status.reason, len(request.prompt))
        if refusal is None:
            log.info("sequence is queued", extra=fields)
            self._idle.clear()
            self._wake.set()
        else:
            log.info("sequence is refused: %s %s", refusal.reason, refusal.message, extra=fields)
            self._gateways.deliver(Delivery(gateway, request.sequence_id, refusal))

    def cancel(self, sequence_id: int, gateway: Link) -> None:
        """A gateway wants no more of a sequence."""
        self._deliver(self.scheduler.cancel(sequence_id, gateway))
        self._wake.set()

    def forget(self, gateway: Link) -> None:
        """A gateway is gone."""
        self.scheduler.cancel_owner(gateway)
        self._note_idle()
        self._wake.set()

    async def _tell_status(self) -> None:
        while True:
            await asyncio.sleep(STATUS_PERIOD_SECONDS)
            self._gateways.broadcast_status()

    def _status(self) -> PipelineStatus:
        state = self._state
        reason = self._not_admitting if state.state == "ready" else state.reason
        return PipelineStatus(
            ready=state.state == "ready" and not reason,
            reason=reason,
            epoch=state.config.epoch,
            policy=state.config.plan.policy,
            largest_logit_difference=state.finite_logit_difference,
            active_sequences=self.scheduler.active_sequences,
            queued_sequences=self.scheduler.queued_sequences,
            tokens_per_second=state.tokens.per_second(),
        )

    def _stop_admitting(self, reason: str) -> None:
        self._not_admitting = reason
        self._gateways.broadcast_status()

    def _deliver(self, deliveries: list[Delivery]) -> None:
        for delivery in deliveries:
            if isinstance(delivery.event, FinishedEvent):
                log.info(
                    "sequence ends: %s %s",
                    delivery.event.reason,
                    delivery.event.message,
                    extra={"sequence_id": delivery.sequence_id, "tokens": delivery.event.completion_tokens},
                )
            self._gateways.deliver(delivery)
        self._note_idle()

    def _note_idle(self) -> None:
        if not self.scheduler.active_sequences + self.scheduler.queued_sequences:
            self._idle.set()

    async def _keep_ring(self) -> None:
        timing = self._settings.timing
        backoff = Backoff(timing.reconnect_seconds, timing.reconnect_max_seconds)
        while True:
            try:
                await self._session(backoff)
            except (LinkError, FrameError, EngineError) as error:
                log.warning("ring %s is broken: %s", self._ring, error)
            except ProbeError as error:
                self._state.enter("failed", str(error))
                self._gateways.broadcast_status()
                await asyncio.Event().wait()  # links stay down; a restart or another plan helps, a retry does not
            await asyncio.sleep(backoff.next_seconds())

    async def _session(self, backoff: Backoff) -> None:
        """One life of the ring, from dialling to its end."""
        self._ring = secrets.token_hex(8)
        self._predecessor = asyncio.get_running_loop().create_future()
        successor: Link | None = None
        reason = "the stage stops"
        try:
            if self._successor_address is None:
                await self._serve(self._make_pipe(None, None), backoff)
            else:
                self._state.enter("loaded", f"connecting to {self._successor_address}")
                successor = await dial(
                    self._settings, self._successor_address, ring_hello(self._settings.own, self._ring)
                )
                await until_first_ends(
                    self._hear_notices(successor), self._run_ring(successor, self._predecessor, backoff)
                )
        except (LinkError, FrameError, EngineError, ProbeError) as error:
            reason = str(error)
            raise
        except Exception as error:  # a bug: it ends the process, the gateways hear of it before
            reason = f"a bug of {self._settings.own.box}: {error!r}"
            raise
        finally:
            await self._end_session(successor, reason)

    async def _run_ring(self, successor: Link, closing: asyncio.Future[Link], backoff: Backoff) -> None:
        # shielded: a cancelled waiter must not cancel the future that owns the link
        pipe = self._make_pipe(successor, await asyncio.shield(closing))
        await until_first_ends(pipe.receive(), self._serve(pipe, backoff))

    def _make_pipe(self, successor: Link | None, predecessor: Link | None) -> Pipe:
        return Pipe(
            self._engine,
            self._compute,
            self._state.config.epoch,
            successor=successor,
            predecessor=predecessor,
            on_return=self._wake.set,
        )

    async def _end_session(self, successor: Link | None, reason: str) -> None:
        """Close both links, free everything, tell the owners of what was open."""
        if successor is not None:
            successor.close(reason)
        predecessor, self._predecessor = self._predecessor, None
        if predecessor is not None and predecessor.done() and not predecessor.cancelled():
            predecessor.result().close(reason)
            self._state.rings_lost += 1
        self._not_admitting = ""
        self._state.enter("loaded", f"the ring is broken: {reason}")
        self._gateways.broadcast_status()  # before the ends: who asks again at once must know
        self._deliver(self.scheduler.end_all(FinishedEvent("unavailable", f"the ring broke: {reason}")))
        await self._compute.run(self._engine.free_all)

    async def _hear_notices(self, successor: Link) -> None:
        while True:
            frame = await successor.receive()
            if frame.type is not FrameType.NOTICE:
                raise FrameError(f"{frame.type.name} from the successor")
            notice = decode_control(Notice, frame.body)
            log.warning("notice from %s: %s", notice.box, notice.text)
            if notice.kind == "draining":
                self._stop_admitting(notice.text)
            else:
                self._state.enter("loaded", notice.text)

    async def _serve(self, pipe: Pipe, backoff: Backoff) -> None:
        """Probe, then schedule until cancelled."""
        self._state.rings_formed += 1
        self._state.enter("loaded", "the ring's probe runs")
        difference = await run_probe(pipe, self._wake, self._engine.config.vocab_size, self._stages)
        self._state.largest_logit_difference = difference
        if problem := probe_problem(difference):
            raise ProbeError(problem)
        await pipe.announce_ready(difference)
        backoff.reset()
        self._state.enter("ready")
        log.info("ring %s is ready, largest logit difference %.2e", self._ring, difference)
        self._gateways.broadcast_status()
        while True:
            while await self._advance(pipe):
                pass
            await self._wake.wait()
            self._wake.clear()

    async def _advance(self, pipe: Pipe) -> bool:
        """Do the most urgent thing; False if there is none."""
        scheduler = self.scheduler
        if scheduler.freed:
            freed, scheduler.freed = tuple(scheduler.freed), []
            await pipe.free(freed)
            return True
        if pipe.has_returned:
            tokens = await pipe.collect()
            self._state.tokens.add(sum(result.kind is not TokenKind.NOTHING for result in tokens.results))
            self._deliver(scheduler.complete(tokens.results, tokens.batch_limit))
            return True
        batch = scheduler.next_micro_batch()
        if batch is None:
            return False
        for request in batch.opened:
            await pipe.open(request.sequence_id, request.request_id, request.sampling)
        self._state.micro_batches += 1
        self._state.rows += len(batch.token_ids)
        await pipe.submit(batch.entries, batch.token_ids, self._state.batch_limit)
        return True
