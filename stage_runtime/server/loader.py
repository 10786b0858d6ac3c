"""Getting weights into memory without disturbing what serves, in threads of their own, as far as memory allows."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from collections.abc import Callable, Collection, Iterable
from concurrent.futures import ThreadPoolExecutor

import torch

from stage_runtime.model.store import Piece, WeightStore
from stage_runtime.server.memory import (
    LOADING_THRESHOLD_BYTES,
    SERVING_THRESHOLD_BYTES,
    box_memory,
    map_blocks_from,
    return_freed_memory,
)

log = logging.getLogger(__name__)

# Threads inherit it; what serves has 0. A step up can't be taken back without privileges, hence two threads.
BACKGROUND_NICENESS = 10


class NoMemory(Exception):
    """Loading would take more memory than may be taken.

    Attributes:
        missing_bytes: what the box lacks.
    """

    def __init__(self, needed: int, usable: int) -> None:
        super().__init__(f"{needed} bytes of weights are needed, {usable} may be taken")
        self.missing_bytes = needed - usable


class Loader:
    """Loads pieces into the store, one at a time, whoever asks.

    Args:
        store: all weights of the process.
        threads: of the compute thread; the same number here, because parts of torch keep one for the whole process.
        keep_free_bytes: of the box's memory, never taken.
        on_loaded: called when what is in memory has changed.
    """

    def __init__(
        self, store: WeightStore, threads: int, keep_free_bytes: int, on_loaded: Callable[[], None] = lambda: None
    ) -> None:
        self.store = store
        self._keep_free_bytes = keep_free_bytes
        self._on_loaded = on_loaded
        self._turn = asyncio.Lock()
        self._urgent = ThreadPoolExecutor(1, "loader", torch.set_num_threads, (threads,))
        self._background = ThreadPoolExecutor(1, "standby", _be_nice, (threads,))

    @property
    def usable_bytes(self) -> int:
        """Memory that may be taken now."""
        return box_memory().available - self._keep_free_bytes

    def check(self, pieces: Iterable[Piece], *, quickly: bool = False) -> None:
        """Whether the missing ones of these fit.

        Raises:
            NoMemory: they do not.
        """
        needed, usable = self.store.needed_bytes(pieces, quickly=quickly), self.usable_bytes
        if needed > usable:
            raise NoMemory(needed, usable)

    async def load(self, pieces: Iterable[Piece], *, background: bool, quickly: bool = False) -> None:
        """Load what is missing; when this returns, all are in memory.

        Args:
            background: something serves meanwhile and goes first.
            quickly: in the form that is ready soonest, for `repack` to replace.

        Raises:
            NoMemory: memory ran out on the way; what was loaded stays.
            FleetError: a shard is missing or damaged.
        """
        wanted = tuple(pieces)
        for piece in wanted:
            async with self._turn:
                if missing := self.store.missing((piece,)):
                    self.check(missing, quickly=quickly)
                    threshold = SERVING_THRESHOLD_BYTES if background else LOADING_THRESHOLD_BYTES
                    await self._in_thread(self._load, piece, threshold, quickly, background=background)
                    self._on_loaded()
        if not background:
            await self._in_thread(_settle, background=False)

    async def repack(self) -> None:
        """Give pieces that were loaded quickly their lasting form, one after another, in the background.

        Raises:
            FleetError: a shard is damaged by now.
        """
        for piece in self.store.provisional:
            async with self._turn:
                await self._in_thread(self.store.repack, piece, background=True)
                self._on_loaded()

    async def keep(self, pieces: Collection[Piece]) -> None:
        """Drop everything else, and give its memory back to the system."""
        async with self._turn:
            await self._in_thread(self.store.keep, pieces, background=True)
            await self._in_thread(return_freed_memory, background=True)
        self._on_loaded()

    def close(self) -> None:
        """Wait for the running load and end the threads."""
        self._urgent.shutdown(wait=True, cancel_futures=True)
        self._background.shutdown(wait=True, cancel_futures=True)

    async def _in_thread(self, function: Callable[..., None], *arguments: object, background: bool) -> None:
        executor = self._background if background else self._urgent
        future = asyncio.get_running_loop().run_in_executor(executor, function, *arguments)
        try:
            await asyncio.shield(future)
        except asyncio.CancelledError:
            # the turn ends with the thread's work, not before it: two loads at once would need memory for both
            await asyncio.gather(future, return_exceptions=True)
            raise

    def _load(self, piece: Piece, threshold_bytes: int, quickly: bool) -> None:
        map_blocks_from(threshold_bytes)
        self.store.load(piece, quickly=quickly)


def _settle() -> None:
    return_freed_memory()
    map_blocks_from(SERVING_THRESHOLD_BYTES)


def _be_nice(threads: int) -> None:
    """Set up the background thread; its torch threads inherit its niceness."""
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), BACKGROUND_NICENESS)  # Linux: of the thread alone
    torch.set_num_threads(threads)
