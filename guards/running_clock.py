"""A clock for budgets and dwell times: seconds that the guards of this box have run in all, over restarts and reboots.

The wall clock may say 1970 and jump; the monotonic clock begins at 0 with every boot. This one goes on from where the
store last had it, so it stands while the box is off, and after a power cut it is late by `SAVE_SECONDS` of the store
at most: cool-downs become longer then, never shorter.
"""

from __future__ import annotations

import time
from collections.abc import Callable


class RunningClock:
    """Counts on from `start_seconds`.

    Args:
        start_seconds: what the store had.
        monotonic: seconds that never go back.
    """

    def __init__(self, start_seconds: float = 0.0, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._monotonic = monotonic
        self._offset_seconds = start_seconds - monotonic()

    def now_seconds(self) -> float:
        """Running seconds."""
        return self._monotonic() + self._offset_seconds
