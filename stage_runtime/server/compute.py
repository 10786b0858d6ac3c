"""The one thread that computes; the event loop only moves bytes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

T = TypeVar("T")


class ComputeThread:
    """Runs calls one after another in a thread of its own.

    Args:
        threads: torch's intra-op threads; OpenMP keeps their number per calling thread, so it is set in there.

    Attributes:
        busy_seconds: time spent computing so far.
    """

    def __init__(self, threads: int) -> None:
        self.busy_seconds = 0.0
        self._executor = ThreadPoolExecutor(1, "compute", torch.set_num_threads, (threads,))

    async def run(self, function: Callable[..., T], *arguments: object) -> T:
        """Call in the thread and wait. If the caller is cancelled, the call still ends before the next one starts."""
        return await asyncio.get_running_loop().run_in_executor(self._executor, self._timed, function, arguments)

    def close(self) -> None:
        """Wait for the running call and end the thread."""
        self._executor.shutdown(wait=True, cancel_futures=True)

    def _timed(self, function: Callable[..., T], arguments: tuple[object, ...]) -> T:
        start = time.monotonic()
        try:
            return function(*arguments)
        finally:
            self.busy_seconds += time.monotonic() - start
