"""The one thread that computes; the event loop only moves bytes."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

import torch

from stage_runtime.server.work import WorkMeter

T = TypeVar("T")
# How often the age of the oldest call is looked at.
WATCH_SECONDS = 1.0
PR_SET_NAME = 15  # linux/prctl.h
FULL_DUTY_PERCENT = 100.0
LEAST_DUTY_PERCENT = 1.0
# Of one rest, however long the micro-batch before it was: whoever waits for a token notices.
MOST_REST_SECONDS = 2.0


class ComputeThread:
    """Runs calls one after another in a thread of its own.

    Args:
        threads: torch's intra-op threads; OpenMP keeps their number per calling thread, so it is set in there.

    Attributes:
        work: how micro-batches go.
        held_seconds: for how long the oldest call has not ended, as far as `watch` saw.
        duty_percent: share of the time in which micro-batches are computed at most, for a box that is too hot.
    """

    def __init__(self, threads: int) -> None:
        self.work = WorkMeter()
        self.held_seconds = 0.0
        self.duty_percent = FULL_DUTY_PERCENT
        self._rest_until = 0.0  # monotonic seconds; no micro-batch begins before
        self._busy_seconds = 0.0
        self._running_since: float | None = None
        self._calls: dict[Future[Any], float] = {}  # that have not ended -> when they were made; oldest first
        self._executor = ThreadPoolExecutor(1, "compute", _begin, (threads,))

    @property
    def busy_seconds(self) -> float:
        """Time spent computing so far, the running call included."""
        since = self._running_since
        return self._busy_seconds + (0.0 if since is None else time.monotonic() - since)

    @property
    def working_seconds(self) -> float:
        """Age of the oldest call, micro-batch or not; 0 when idle."""
        oldest = next(iter(self._calls.values()), None)
        return 0.0 if oldest is None else time.monotonic() - oldest

    async def run(self, function: Callable[..., T], *arguments: object) -> T:
        """Call in the thread and wait. If the caller is cancelled, a call that runs still ends before the next one
        starts; one that has not begun is dropped."""
        result, _ = await asyncio.wrap_future(self._submit(function, arguments))
        return result

    async def step(self, function: Callable[..., T], *arguments: object) -> T:
        """The same for a call that computes a micro-batch, or a part of one: it counts as progress, and waits for the
        rest that is due after the one before.

        The wait is the caller's and not the thread's, so orders and pages are served meanwhile, a stop ends it, and
        nobody takes it for work that hangs. It comes before a micro-batch and not behind one: results wait for
        nothing, and time without work is rest too.
        """
        if (left := self._rest_until - time.monotonic()) > 0:
            await asyncio.sleep(left)
        result, _ = await asyncio.wrap_future(self._submit(function, arguments, self._stepped))
        return result

    async def watch(self) -> None:
        """Look at `held_seconds` again after `WATCH_SECONDS`; time in which this loop did not run does not count."""
        oldest = next(iter(self._calls), None)
        await asyncio.sleep(WATCH_SECONDS)
        same = oldest is not None and next(iter(self._calls), None) is oldest
        self.held_seconds = self.held_seconds + WATCH_SECONDS if same else 0.0

    def close(self) -> None:
        """Take no more calls. The running one is not waited for: it may never end."""
        self._executor.shutdown(wait=False, cancel_futures=True)

    def _submit(
        self,
        function: Callable[..., T],
        arguments: tuple[object, ...],
        note: Callable[[float | None], None] = lambda seconds: None,
    ) -> Future[tuple[T, float]]:
        loop = asyncio.get_running_loop()

        def ended(call: Future[tuple[T, float]]) -> None:
            done = not call.cancelled() and call.exception() is None
            seconds = call.result()[1] if done else None
            with contextlib.suppress(RuntimeError):  # the loop is closed: the process ends
                loop.call_soon_threadsafe(self._end, call, note, seconds)

        call = self._executor.submit(self._timed, function, arguments)
        self._calls[call] = time.monotonic()
        # whoever waits may be cancelled; the thread is hung until the call has ended, and the pulse must say so
        call.add_done_callback(ended)
        return call

    def _end(self, call: Future[Any], note: Callable[[float | None], None], seconds: float | None) -> None:
        del self._calls[call]
        note(seconds)

    def _stepped(self, seconds: float | None) -> None:
        self.work.end(seconds)
        if seconds is not None and self.duty_percent < FULL_DUTY_PERCENT:
            rest = min(seconds * (FULL_DUTY_PERCENT / self.duty_percent - 1.0), MOST_REST_SECONDS)
            # two epochs that compute beside each other owe the sum of their rests
            self._rest_until = max(self._rest_until, time.monotonic()) + rest

    def _timed(self, function: Callable[..., T], arguments: tuple[object, ...]) -> tuple[T, float]:
        start = time.monotonic()
        self._running_since = start
        try:
            result = function(*arguments)
            return result, time.monotonic() - start
        finally:
            self._running_since = None
            self._busy_seconds += time.monotonic() - start


def _begin(threads: int) -> None:
    """Set up the thread; `top -H` and a look into /proc show it by its name."""
    ctypes.CDLL(None).prctl(PR_SET_NAME, b"compute", 0, 0, 0)
    torch.set_num_threads(threads)
