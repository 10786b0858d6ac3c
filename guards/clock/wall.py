"""Steps of the wall clock: it is read beside the clock of seconds since boot, which nobody sets."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

TRIES = 3  # the pair that was read in the shortest time is taken: being scheduled away in between spoils one


@dataclass(frozen=True)
class WallReading:
    """Two clocks at one instant.

    Attributes:
        unix_seconds: of the wall clock.
        boot_seconds: since boot, time asleep included. NTP slews both alike, so that their difference changes only
            when the wall clock is set (or a leap second is inserted).
        uncertainty_seconds: half of the time that reading them took.
    """

    unix_seconds: float
    boot_seconds: float
    uncertainty_seconds: float


def read_wall(
    wall: Callable[[], float] = time.time,
    boot: Callable[[], float] = lambda: time.clock_gettime(time.CLOCK_BOOTTIME),
) -> WallReading:
    """Read both."""

    def pair() -> WallReading:
        before, unix, after = boot(), wall(), boot()
        half = max(0.0, after - before) / 2
        return WallReading(unix, before + half, half)

    return min((pair() for _ in range(TRIES)), key=lambda reading: reading.uncertainty_seconds)


def step_seconds(before: WallReading, now: WallReading, least_seconds: float) -> float:
    """By how much the wall clock was set in between, positive: forwards. 0 if by no more than `least_seconds` and what
    the readings leave uncertain, or if the box was booted in between."""
    if now.boot_seconds < before.boot_seconds:
        return 0.0
    step = (now.unix_seconds - before.unix_seconds) - (now.boot_seconds - before.boot_seconds)
    return step if abs(step) > least_seconds + before.uncertainty_seconds + now.uncertainty_seconds else 0.0
