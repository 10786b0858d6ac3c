"""KV caches that outlive their ring wait for the gateway to submit their sequences again, but not for ever."""

from __future__ import annotations

import asyncio
import logging

from stage_runtime.engine.stage import StageEngine
from stage_runtime.link.tasks import within
from stage_runtime.server.compute import ComputeThread

log = logging.getLogger(__name__)

# Caches of a broken ring, and agreed caches of a new one, that nobody has claimed for so long are freed.
KEPT_SECONDS = 30.0


class KeptTimer:
    """Frees the kept caches of an engine unless `stop` comes in time.

    Args:
        compute: where engines are called.
        seconds: how long they are kept.
    """

    def __init__(self, compute: ComputeThread, seconds: float = KEPT_SECONDS) -> None:
        self._compute = compute
        self._seconds = seconds
        self._engine: StageEngine | None = None
        self._started = asyncio.Event()
        self._stopped = asyncio.Event()

    def start(self, engine: StageEngine) -> None:
        """Its ring is gone; the time runs from now on."""
        if engine.kept_sequences:
            self._stopped.set()  # an older wait ends
            self._stopped = asyncio.Event()
            self._engine = engine
            self._started.set()

    def stop(self) -> None:
        """A new ring has agreed on what is kept, and frees the rest itself."""
        self._engine = None
        self._started.clear()
        self._stopped.set()

    async def run(self) -> None:
        """Wait and free, until cancelled."""
        while True:
            await self._started.wait()
            self._started.clear()
            try:
                await within(self._seconds, self._stopped.wait())
            except asyncio.TimeoutError:
                await self._free()

    async def _free(self) -> None:
        engine, self._engine = self._engine, None
        if engine is not None:
            log.info("%d kept sequences are freed: nobody went on with them", engine.kept_sequences)
            await self._compute.run(engine.free_kept)
