"""A robust slope with an honest confidence interval. Pure arithmetic on a few dozen points.

Theil–Sen: the median of the slopes of all pairs of points; up to 29 % of the points may be anything (Sen, "Estimates of
the regression coefficient based on Kendall's tau", JASA 63, 1968). Its interval comes from the variance of Kendall's S
(Gilbert, "Statistical Methods for Environmental Pollution Monitoring", 1987, §16.4.2), widened for noise that remembers
itself, as an allocator's does (Bayley and Hammersley 1946; Yue and Wang, Water Resources Management 18, 2004).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

NORMAL_FROM_MAD = 1.4826
"""Standard deviation of normal noise from its median absolute deviation."""
MOST_CORRELATION = 0.95
"""Of neighbouring residuals; above it the interval says nothing anyhow."""
LEAST_MOVE_SHARE = 0.2
"""Of the widest change of load; pairs that differ by less than that say more about noise than about its effect."""
LEAST_POINTS = 4
"""Fewer have no slope worth the name."""


@dataclass(frozen=True)
class Slope:
    """How fast values grow, per second.

    Attributes:
        middle: the estimate.
        low, high: ends of its interval; infinite where so few points say nothing.
        noise: standard deviation of the points around the line, from their median absolute deviation.
        widening: by which memory in the noise multiplies the variance of the slope; 1: none.
    """

    middle: float
    low: float
    high: float
    noise: float
    widening: float

    def error(self, points: int, span_seconds: float) -> float:
        """Standard error of a slope over so many evenly spaced points of the same noise (least squares' formula)."""
        return self.noise * math.sqrt(12.0 / points * self.widening) / span_seconds


def sen_slope(times: Sequence[float], values: Sequence[float], z: float) -> Slope:
    """Theil–Sen's slope.

    Args:
        times: seconds, rising. values: as many.
        z: standard deviations to the ends of the interval, e.g. 2.58 for 99 %.

    Raises:
        ValueError: fewer than four points, or times that don't rise.
    """
    count = len(times)
    if count < LEAST_POINTS or count != len(values):
        raise ValueError(f"{count} times and {len(values)} values have no slope")
    if any(later <= earlier for earlier, later in pairwise(times)):
        raise ValueError("times must rise")
    slopes = sorted(
        (values[later] - values[earlier]) / (times[later] - times[earlier])
        for earlier in range(count)
        for later in range(earlier + 1, count)
    )
    middle = statistics.median(slopes)
    residuals = _residuals(times, values, middle)
    noise = NORMAL_FROM_MAD * statistics.median(abs(each) for each in residuals)
    widening = _widening(residuals)
    # half the number of ranks between the ends of the interval
    reach = z * math.sqrt(count * (count - 1) * (2 * count + 5) / 18.0 * widening) / 2.0
    below, above = math.floor(len(slopes) / 2.0 - reach), math.ceil(len(slopes) / 2.0 + reach)
    low = slopes[below] if below >= 0 else -math.inf
    high = slopes[above] if above < len(slopes) else math.inf
    return Slope(middle, low, high, noise, widening)


def coupling(values: Sequence[float], loads: Sequence[float]) -> float:
    """How much a value moves with a load, per unit: Theil–Sen over the changes from each point to the next.

    Changes, because a trend of the values adds the same to all of them and drops out; so a leak that happens to run
    while the load rises is not taken for its effect. 0 where the load does not vary enough to tell.
    """
    moves = [b - a for a, b in pairwise(loads)]
    answers = [b - a for a, b in pairwise(values)]
    if not moves or (least := LEAST_MOVE_SHARE * (max(moves) - min(moves))) <= 0.0:
        return 0.0
    ratios = [
        (answers[later] - answers[earlier]) / (moves[later] - moves[earlier])
        for earlier in range(len(moves))
        for later in range(earlier + 1, len(moves))
        if abs(moves[later] - moves[earlier]) >= least
    ]
    return statistics.median(ratios) if len(ratios) >= LEAST_POINTS else 0.0


def _residuals(times: Sequence[float], values: Sequence[float], slope: float) -> list[float]:
    """What the line leaves, around its own median."""
    flat = [value - slope * (time - times[0]) for time, value in zip(times, values, strict=True)]
    centre = statistics.median(flat)
    return [each - centre for each in flat]


def _widening(residuals: Sequence[float]) -> float:
    """Variance of a sum of correlated values over that of independent ones, for a first-order memory."""
    count = len(residuals)
    mean = sum(residuals) / count
    power = sum((each - mean) ** 2 for each in residuals)
    if power <= 0.0:
        return 1.0
    neighbours = sum((a - mean) * (b - mean) for a, b in pairwise(residuals))
    correlation = min(MOST_CORRELATION, neighbours / power)
    if correlation <= 0.0:
        return 1.0  # noise that swings back only narrows the interval; that is not relied upon
    return 1.0 + 2.0 * sum((1.0 - lag / count) * correlation**lag for lag in range(1, count))
