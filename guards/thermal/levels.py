"""The ladder of limits that the latch climbs up and down. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

FULL_DUTY_PERCENT = 100.0


@dataclass(frozen=True)
class Level:
    """One rung.

    Attributes:
        sequences: batch limit of the stage.
        duty_percent: share of the time in which the stage computes.
    """

    sequences: int
    duty_percent: float


@lru_cache(maxsize=32)
def ladder(max_sequences: int, least_duty_percent: float, step_percent: float) -> tuple[Level, ...]:
    """All rungs, the full one first: batch limit and duty cycle fall together, the batch limit first.

    Each rung lowers the one that has kept the larger share, to `step_percent` of it. Why so, shown by
    `benchmarks/thermal.py`: on a box whose power hardly depends on the batch (most CPUs) a smaller batch costs much
    throughput and cools little, on others the duty cycle does. A guard that sees only temperatures can't tell which
    it has, and half of each is never far off. The steps are small, since of halves there is mostly none whose
    temperature lies between both thresholds, and the latch would climb up and down for ever.

    Args:
        max_sequences: batch limit without heat, at least 1.
        least_duty_percent: 1 to 100. step_percent: 1 to 99.

    Raises:
        ValueError: outside of these.
    """
    if max_sequences < 1 or not 1 <= least_duty_percent <= FULL_DUTY_PERCENT or not 1 <= step_percent <= 99:
        raise ValueError(
            f"no ladder of {max_sequences} sequences, {least_duty_percent} % and steps of {step_percent} %"
        )
    rungs = [Level(max_sequences, FULL_DUTY_PERCENT)]
    while True:
        batch, duty = rungs[-1].sequences, rungs[-1].duty_percent
        if batch > 1 and (duty <= least_duty_percent or FULL_DUTY_PERCENT * batch / max_sequences >= duty):
            rungs.append(Level(max(1, int(batch * step_percent / 100)), duty))
        elif duty > least_duty_percent:
            # in whole tenths, and by one at least: rounding alone may give the same number for ever
            lower = min(round(duty * step_percent / 100, 1), round(duty - 0.1, 1))
            rungs.append(Level(batch, max(least_duty_percent, lower)))
        else:
            return tuple(rungs)
