"""Bounded parallelism over boxes, a limited rate of connection starts, and one switch that ends all of it."""

from __future__ import annotations

import contextlib
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait

from fleet.errors import ExitCode, FleetError
from fleet.ssh.results import BoxError, HostResult, HostStatus, result_of

INTERRUPT_POLL_SECONDS = 0.2  # how often the main thread looks up from waiting, so that Ctrl-C is seen


class StartLimiter:
    """Lets at most `per_second` connections start in any second, evenly spaced: sshd drops bursts of logins
    (MaxStartups 10:30:100 by default) and jump hosts do so too."""

    def __init__(self, per_second: float) -> None:
        self._interval_seconds = 1.0 / per_second
        self._next = 0.0
        self._lock = threading.Lock()

    def reserve(self, now: float) -> float:
        """Seconds to wait from `now` (monotonic) until the caller's own start; books that start."""
        with self._lock:
            start = max(now, self._next)
            self._next = start + self._interval_seconds
            return start - now

    def wait(self, cancellation: Cancellation) -> None:
        """Block until the caller may start; returns early when the run is cancelled."""
        cancellation.sleep(self.reserve(time.monotonic()))


class Cancellation:
    """Ends a run from another thread: every open transport registers how to close it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._closers: dict[int, Callable[[], None]] = {}
        self._number = 0
        self._cancelled = threading.Event()

    @property
    def cancelled(self) -> bool:
        """True once `cancel` was called."""
        return self._cancelled.is_set()

    def sleep(self, seconds: float) -> None:
        """Sleep, or return at once when cancelled."""
        self._cancelled.wait(max(0.0, seconds))

    @contextlib.contextmanager
    def closing(self, close: Callable[[], None]) -> Iterator[None]:
        """While the block runs, `cancel` calls `close` (it must be safe to call from another thread, and twice)."""
        with self._lock:
            self._number += 1
            number = self._number
            self._closers[number] = close
        try:
            if self.cancelled:
                close()
            yield
        finally:
            with self._lock:
                self._closers.pop(number, None)

    def cancel(self) -> None:
        """Close everything that is open; what is started later is closed at once."""
        self._cancelled.set()
        with self._lock:
            closers = list(self._closers.values())
        for close in closers:
            close()


def run_on_boxes(
    boxes: Sequence[str],
    work: Callable[[str], HostResult],
    *,
    forks: int,
    cancellation: Cancellation,
) -> tuple[HostResult, ...]:
    """Run `work(box)` for every box, at most `forks` at once; one box's failure never stops the others.

    Returns:
        One result a box, in the order of `boxes`. A bug of ours becomes a failed result that names a file with the
        traceback.

    Raises:
        KeyboardInterrupt: after everything was closed and the threads have ended.
    """
    with ThreadPoolExecutor(max_workers=max(1, min(forks, len(boxes))), thread_name_prefix="box") as executor:
        futures = [executor.submit(_guarded, box, work, cancellation) for box in boxes]
        try:
            while wait(futures, timeout=INTERRUPT_POLL_SECONDS).not_done:
                pass  # a wait without an end would not let Ctrl-C through on every platform
        except KeyboardInterrupt:
            for future in futures:
                future.cancel()
            cancellation.cancel()
            raise
    return tuple(future.result() for future in futures)


def _guarded(box: str, work: Callable[[str], HostResult], cancellation: Cancellation) -> HostResult:
    if cancellation.cancelled:
        return HostResult(box, HostStatus.FAILED, f"{box}: not started: interrupted", code=ExitCode.INTERRUPTED)
    try:
        return work(box)
    except BoxError as error:
        return result_of(error)
    except FleetError as error:
        return HostResult(box, HostStatus.FAILED, f"{box}: {error.message}", error.hint, error.exit_code)
    except Exception as error:  # any bug of ours: the other boxes go on, the traceback is kept for us
        with tempfile.NamedTemporaryFile("w", prefix=f"fleet-bug-{box}-", suffix=".txt", delete=False) as file:
            traceback.print_exc(file=file)
        return HostResult(
            box,
            HostStatus.FAILED,
            f"{box}: a bug in fleet: {type(error).__name__}: {error}",
            f"send {file.name} to the maintainers with the command you typed",
            ExitCode.FAILED,
        )
