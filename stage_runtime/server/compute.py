"""The one thread that computes; the event loop only moves bytes."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

import torch

from stage_runtime.server.work import WorkMeter

T = TypeVar("T")


class ComputeThread:
    """Runs calls one after another in a thread of its own.

    Args:
        threads: torch's intra-op threads; OpenMP keeps their number per calling thread, so it is set in there.

    Attributes:
        work: how micro-batches go.
    """

    def __init__(self, threads: int) -> None:
        self.work = WorkMeter()
        self._busy_seconds = 0.0
        self._running_since: float | None = None
        self._executor = ThreadPoolExecutor(1, "compute", torch.set_num_threads, (threads,))

    @property
    def busy_seconds(self) -> float:
        """Time spent computing so far, the running call included."""
        since = self._running_since
        return self._busy_seconds + (0.0 if since is None else time.monotonic() - since)

    async def run(self, function: Callable[..., T], *arguments: object) -> T:
        """Call in the thread and wait. If the caller is cancelled, the call still ends before the next one starts."""
        result, _ = await asyncio.get_running_loop().run_in_executor(self._executor, self._timed, function, arguments)
        return result

    async def step(self, function: Callable[..., T], *arguments: object) -> T:
        """The same for a call that computes a micro-batch, or a part of one: it counts as progress."""
        loop, token = asyncio.get_running_loop(), self.work.begin()
        call = self._executor.submit(self._timed, function, arguments)

        def ended(call: Future[tuple[T, float]]) -> None:
            done = not call.cancelled() and call.exception() is None
            seconds = call.result()[1] if done else None
            with contextlib.suppress(RuntimeError):  # the loop is closed: the process ends
                loop.call_soon_threadsafe(self.work.end, token, seconds)

        # whoever waits may be cancelled; the thread is hung until the call has ended, and the pulse must say so
        call.add_done_callback(ended)
        result, _ = await asyncio.wrap_future(call)
        return result

    def close(self) -> None:
        """Wait for the running call and end the thread."""
        self._executor.shutdown(wait=True, cancel_futures=True)

    def _timed(self, function: Callable[..., T], arguments: tuple[object, ...]) -> tuple[T, float]:
        start = time.monotonic()
        self._running_since = start
        try:
            result = function(*arguments)
            return result, time.monotonic() - start
        finally:
            self._running_since = None
            self._busy_seconds += time.monotonic() - start
