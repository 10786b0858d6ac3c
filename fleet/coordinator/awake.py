"""Time that this process was awake: a stopped or starved coordinator must not hold its own pause against anyone."""

from __future__ import annotations

from collections.abc import Callable


class AwakeClock:
    """Monotonic seconds, of which a pause between two ticks counts only up to `longest_step`.

    Args:
        time: the monotonic clock, e.g. `loop.time`.
        tick_seconds: `tick` is called so often.
    """

    def __init__(self, time: Callable[[], float], tick_seconds: float) -> None:
        self._time = time
        self._longest_step = 2 * tick_seconds + 0.05  # a busy machine's usual lateness is no pause
        self._ticked_at = time()
        self._base = 0.0

    def now(self) -> float:
        """The time, in seconds since the start."""
        return self._base + min(self._time() - self._ticked_at, self._longest_step)

    def tick(self) -> None:
        """The process runs."""
        self._base = self.now()
        self._ticked_at = self._time()
