"""Closes a connection from outside when a deadline passes: the library's own waits can last an hour, and a zombie sshd
still answers keepalives while nothing runs."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable


class Watchdog:
    """One thread that calls `close` once if the armed deadline passes; `expired` then says which one did.

    Args:
        close: ends the connection; called from the watchdog's thread, must not block.
    """

    def __init__(self, close: Callable[[], None]) -> None:
        self._close = close
        self._condition = threading.Condition()
        self._deadlines: dict[str, tuple[float, float]] = {}  # name → (monotonic end, length in seconds)
        self._stopped = False
        self.expired = ""
        self.expired_seconds = 0.0
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)
        self._thread.start()

    def arm(self, name: str, seconds: float) -> None:
        """Start (or start again) a named deadline."""
        with self._condition:
            self._deadlines[name] = (time.monotonic() + seconds, seconds)
            self._condition.notify()

    def disarm(self, name: str) -> None:
        """The thing arrived in time."""
        with self._condition:
            self._deadlines.pop(name, None)

    def stop(self) -> None:
        """End the thread; nothing is closed any more."""
        with self._condition:
            self._stopped = True
            self._condition.notify()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _run(self) -> None:
        with self._condition:
            while not self._stopped:
                name, (end, seconds) = min(
                    self._deadlines.items(), key=lambda item: item[1][0], default=("", (float("inf"), 0.0))
                )
                wait = end - time.monotonic()
                if wait > 0:
                    self._condition.wait(wait if name else None)
                    continue
                self.expired, self.expired_seconds = name, seconds
                break
        if self.expired:
            self._close()
