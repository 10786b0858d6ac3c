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
from stage_runtime.link.endpoints import BoxAddress, LinkSettings
from stage_runtime.link.frames import FrameError, FrameType
from stage_runtime.link.messages import FinishedEvent, GenerateRequest, PipelineStatus
from stage_runtime.link.tasks import until_first_ends, within
from stage_runtime.server.driver import RingDriver
from stage_runtime.server.gateways import FLUSH_SECONDS, Gateways
from stage_runtime.server.kept import KEPT_SECONDS, KeptTimer
from stage_runtime.server.neighbours import RING_KEY, LinkWatch
from stage_runtime.server.pipe import Pipe
from stage_runtime.server.probe import ProbeError
from stage_runtime.server.state import EpochState, StageState

log = logging.getLogger(__name__)

STATUS_PERIOD_SECONDS = 1.0


class FirstStage:
    """Owns the scheduler and, while the ring holds, the pipe.

    Args:
        settings: this side of links; its Hello carries the epoch.
        successor: the second stage; None in a pipeline of one.
        engine: what computes.
        epoch: what others see of the epoch. state: of the process.
    """

    def __init__(
        self,
        settings: LinkSettings,
        successor: BoxAddress | None,
        engine: StageEngine,
        epoch: EpochState,
        state: StageState,
    ) -> None:
        config, plan = state.config, epoch.prepare.plan
        self._settings = settings
        self._successor_address = successor
        self._engine = engine
        self._epoch = epoch
        self._state = state
        self._compute = state.compute
        self._watch = LinkWatch(epoch.number, state.on_link)
        self._kept = KeptTimer(state.compute)
        self._scheduler = Scheduler(
            Limits(
                plan.max_sequences,
                plan.max_tokens_per_sequence,
                config.max_batch_sequences,
                config.prefill_chunk_tokens,
                len(plan.stages),
                engine.config.vocab_size,
            )
        )
        self._gateways = Gateways(epoch.number, self, self._status)
        self._wake = asyncio.Event()
        self._idle = asyncio.Event()  # no sequence is open or waits
        self._idle.set()
        self._not_admitting = ""  # why a ready ring admits nothing: a box drains
        self._ending = ""  # why the epoch ends here
        self._committed = asyncio.Event()
        self._fit: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._agreed: dict[int, int] = {}  # kept sequences that nobody has claimed yet -> tokens that all stages hold
        self._ring = ""  # the forming of the ring that links must belong to
        self._predecessor: asyncio.Future[Link] | None = None

    async def run(self) -> None:
        """Form the ring again and again; runs until cancelled."""
        self._kept.start(self._engine)
        await until_first_ends(self._keep_ring(), self._tell_status(), self._kept.run())

    async def fit(self) -> str:
        """Wait until the ring has closed and has been tried; why the epoch can't be voted for, or nothing."""
        return await asyncio.shield(self._fit)

    def commit(self) -> None:
        """The epoch is committed: a ring that has formed serves from now on."""
        self._committed.set()
        self._gateways.broadcast_status()

    async def end(self, reason: str, seconds: float) -> bool:
        """Called when `run` has ended for good: gateways hear what is left to hear, then their links close."""
        self._epoch.enter("loaded", reason)
        await self._gateways.end(reason, min(seconds, FLUSH_SECONDS))
        return True

    def announce_end(self, reason: str) -> None:
        """The epoch is about to end: the reason that gateways will hear, instead of a broken ring."""
        self._ending = reason

    async def serve_gateway(self, link: Link) -> None:
        """A gateway has connected; returns when the link is over."""
        if self._ending:
            link.close(self._ending)
            return
        await self._gateways.serve(link)

    async def serve_stage(self, link: Link) -> None:
        """The last stage has connected; returns when the link is over."""
        if link.peer.extra.get(RING_KEY) != self._ring or self._predecessor is None or self._predecessor.done():
            link.close("it belongs to an older ring")
            return
        self._watch.connected(link)
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
        """A gateway wants a sequence, or wants one to go on."""
        fields = {"request_id": request.request_id, "sequence_id": request.sequence_id}
        status = self._status()
        if status.ready:
            kept = self._agreed.get(request.sequence_id, 0)
            refusal = self._scheduler.submit(request, gateway, kept)
        else:
            refusal = FinishedEvent("unavailable", status.reason, len(request.prompt), len(request.generated))
        if refusal is None:
            kept = self._agreed.pop(request.sequence_id, 0)
            log.info("sequence is queued, %d tokens of it are kept", kept, extra=fields)
            self._idle.clear()
            self._wake.set()
        else:
            log.info("sequence is refused: %s %s", refusal.reason, refusal.message, extra=fields)
            self._gateways.deliver(Delivery(gateway, request.sequence_id, refusal))

    def cancel(self, sequence_id: int, gateway: Link) -> None:
        """A gateway wants no more of a sequence."""
        self._deliver(self._scheduler.cancel(sequence_id, gateway))
        self._wake.set()

    def forget(self, gateway: Link) -> None:
        """A gateway is gone."""
        self._scheduler.cancel_owner(gateway)
        self._note_idle()
        self._wake.set()

    async def _tell_status(self) -> None:
        while True:
            await asyncio.sleep(STATUS_PERIOD_SECONDS)
            self._gateways.broadcast_status()

    def _status(self) -> PipelineStatus:
        epoch, scheduler = self._epoch, self._scheduler
        reason = (self._ending or self._not_admitting) if epoch.state == "ready" else epoch.reason
        return PipelineStatus(
            ready=epoch.state == "ready" and not reason,
            reason=reason,
            epoch=epoch.number,
            policy=epoch.prepare.plan.policy,
            largest_logit_difference=epoch.finite_logit_difference,
            active_sequences=scheduler.active_sequences,
            queued_sequences=scheduler.queued_sequences,
            tokens_per_second=self._state.tokens.per_second(),
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
        if not self._scheduler.active_sequences + self._scheduler.queued_sequences:
            self._idle.set()

    async def _keep_ring(self) -> None:
        timing = self._settings.timing
        backoff = Backoff(timing.reconnect_seconds, timing.reconnect_max_seconds, at_once=True)
        while True:
            try:
                await self._session(backoff)
            except (LinkError, FrameError, EngineError) as error:
                log.warning("ring %s is broken: %s", self._ring, error)
            except ProbeError as error:
                self._epoch.enter("failed", str(error))
                self._gateways.broadcast_status()
                if not self._fit.done():
                    self._fit.set_result(str(error))
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
                self._epoch.enter("loaded", f"connecting to {self._successor_address}")
                successor = await self._watch.dial(self._settings, self._successor_address, self._ring)
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
            await self._end_session(successor, self._ending or f"the ring broke: {reason}")

    async def _run_ring(self, successor: Link, closing: asyncio.Future[Link], backoff: Backoff) -> None:
        # shielded: a cancelled waiter must not cancel the future that owns the link
        pipe = self._make_pipe(successor, await asyncio.shield(closing))
        await until_first_ends(pipe.receive(), self._serve(pipe, backoff))

    def _make_pipe(self, successor: Link | None, predecessor: Link | None) -> Pipe:
        return Pipe(
            self._engine,
            self._compute,
            self._epoch.number,
            successor=successor,
            predecessor=predecessor,
            on_return=self._wake.set,
        )

    async def _end_session(self, successor: Link | None, reason: str) -> None:
        """Close both links, keep the caches, tell the owners of what was open."""
        predecessor, self._predecessor = self._predecessor, None
        if successor is not None:
            self._watch.ended(successor)
            successor.close(reason)
        if predecessor is not None and predecessor.done() and not predecessor.cancelled():
            self._watch.ended(predecessor.result())
            predecessor.result().close(reason)
            self._state.rings_lost += 1
        self._not_admitting = ""
        self._agreed = {}
        self._epoch.enter("loaded", reason)
        self._gateways.broadcast_status()  # before the ends: who asks again at once must know
        self._deliver(self._scheduler.end_all(FinishedEvent("unavailable", reason)))
        await self._compute.run(self._engine.keep_all)
        self._kept.start(self._engine)

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
                self._epoch.enter("loaded", notice.text)

    async def _serve(self, pipe: Pipe, backoff: Backoff) -> None:
        """Agree on what is kept, probe, wait for the commit, then schedule until cancelled."""
        self._state.rings_formed += 1
        self._epoch.enter("loaded", "the ring agrees on what it has kept")
        self._agreed = await pipe.agree()
        self._kept.stop()
        driver = RingDriver(
            pipe,
            scheduler=self._scheduler,
            state=self._state,
            wake=self._wake,
            deliver=self._deliver,
            on_probed=self._probed,
            vocab_size=self._engine.config.vocab_size,
        )
        if self._epoch.prepare.planned and not self._epoch.committed:
            self._epoch.enter("loaded", "the ring is tried")
            await driver.try_ring()
        if not self._fit.done():
            self._fit.set_result("")
        self._epoch.enter("loaded", "the ring is closed, no commit yet")
        await self._committed.wait()
        backoff.reset()
        self._epoch.enter("ready")
        log.info("ring %s serves epoch %d, %d sequences are kept", self._ring, self._epoch.number, len(self._agreed))
        self._gateways.broadcast_status()
        await until_first_ends(driver.serve(), self._forget_unclaimed())

    def _probed(self, difference: float) -> None:
        self._epoch.largest_logit_difference = difference
        self._gateways.broadcast_status()

    async def _forget_unclaimed(self) -> None:
        """Kept sequences that nobody wants to go on with are freed on all stages."""
        await asyncio.sleep(KEPT_SECONDS)
        self._scheduler.freed += self._agreed
        self._agreed = {}
        self._wake.set()
        await asyncio.Event().wait()
