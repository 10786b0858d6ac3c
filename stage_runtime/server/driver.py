"""What keeps a whole ring busy: the scheduler's micro-batches first, the ring's probe in the slots that they leave."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from stage_runtime.engine.scheduler import Delivery, Scheduler
from stage_runtime.link.control import Open
from stage_runtime.link.steps import TokenKind
from stage_runtime.server.pipe import Pipe
from stage_runtime.server.probe import ProbeError, RingProbe, probe_problem
from stage_runtime.server.state import StageState

# After a switch the streams that wait come in within moments; the probe's prefill is not put before theirs.
PROBE_AFTER_SECONDS = 1.0
# Before a planned switch the whole pass and so many single tokens show that the ring computes, and warm it up, while
# another epoch's answers go on; the rest is as many steps as an answer of 57 tokens, and comes behind.
FIRST_STEPS = 8


class RingDriver:
    """Owns nothing but the order of things during one life of the ring.

    Args:
        pipe: the ring.
        scheduler: what gateways want.
        state: counts what is done.
        wake: set whenever there may be something to do.
        deliver: takes events for gateways.
        on_probed: told the largest logit difference once the probe has run.
        vocab_size: of the model.
    """

    def __init__(
        self,
        pipe: Pipe,
        *,
        scheduler: Scheduler,
        state: StageState,
        wake: asyncio.Event,
        deliver: Callable[[list[Delivery]], None],
        on_probed: Callable[[float], None],
        vocab_size: int,
    ) -> None:
        self._on_probed = on_probed
        self._pipe = pipe
        self._scheduler = scheduler
        self._state = state
        self._wake = wake
        self._deliver = deliver
        self._probe = RingProbe(pipe, vocab_size)
        self._probe_at = 0.0

    async def try_ring(self) -> None:
        """Run the probe's first steps, one at a time: another epoch's answers go on beside it.

        Raises:
            ProbeError: it did not pass. LinkError, FrameError, EngineError: the ring broke.
        """
        later = self._probe.waiting - FIRST_STEPS - 1
        while self._probe.waiting > later or self._probe.in_flight:
            if self._pipe.has_returned:
                self._probe.take((await self._pipe.collect()).results)
            elif not self._probe.in_flight:
                await self._probe.send_next()
            else:
                await self._wake.wait()
                self._wake.clear()
        if problem := probe_problem(self._probe.largest):
            raise ProbeError(problem)

    async def serve(self) -> None:
        """Schedule until cancelled; the probe runs behind, if it has not run yet.

        Raises:
            ProbeError: it did not pass. LinkError, FrameError, EngineError: the ring broke.
        """
        loop = asyncio.get_running_loop()
        self._probe_at = loop.time() + PROBE_AFTER_SECONDS
        timer = loop.call_at(self._probe_at, self._wake.set)
        try:
            while True:
                while await self._advance():
                    pass
                await self._wake.wait()
                self._wake.clear()
        finally:
            timer.cancel()

    async def _advance(self) -> bool:
        """Do the most urgent thing; False if there is none."""
        scheduler, pipe = self._scheduler, self._pipe
        if scheduler.freed:
            freed, scheduler.freed = tuple(scheduler.freed), []
            await pipe.free(freed)
            return True
        if pipe.has_returned:
            await self._collect()
            return True
        batch = scheduler.next_micro_batch()
        if batch is None:
            return await self._advance_probe()
        for opening in batch.opened:
            request = opening.request
            await pipe.open(
                Open(request.sequence_id, request.request_id, request.sampling, request.generated, opening.kv_len)
            )
        self._state.micro_batches += 1
        self._state.rows += len(batch.token_ids)
        await pipe.submit(batch.entries, batch.token_ids, self._state.ring_limit)
        return True

    async def _collect(self) -> None:
        tokens = await self._pipe.collect()
        if self._probe.take(tokens.results):
            if self._probe.done:
                await self._end_probe()
            return
        self._state.tokens.add(sum(result.kind is not TokenKind.NOTHING for result in tokens.results))
        self._deliver(self._scheduler.complete(tokens.results, tokens.batch_limit))

    async def _advance_probe(self) -> bool:
        """Send a step of the probe, if there is a slot that nobody else wants; beside streams one at a time."""
        if not self._probe.waiting or asyncio.get_running_loop().time() < self._probe_at:
            return False
        stages = self._scheduler.limits.stages
        most = 1 if self._scheduler.active_sequences else stages
        if self._probe.in_flight >= most or self._pipe.in_flight >= stages:
            return False
        await self._probe.send_next()
        return True

    async def _end_probe(self) -> None:
        self._on_probed(self._probe.largest)
        await self._probe.finish()
        await self._pipe.announce_ready(self._probe.largest)
