"""Does a process leak? Pure: points of memory in, a verdict with its resolution out.

A stretch of points is a leak when all of this holds (each line is a thing that has fooled leak detectors):

- *trend*: the lower end of the slope's 99 % interval is above the bound; what grew for less than an hour must have
  grown faster, in inverse proportion to the root of its time;
- *new ground*: only what is above the highest floor ever seen before the stretch counts, so memory that comes and goes
  with the load of the day, and is given back when the stage is trimmed, is no growth;
- *not a few steps*: the two largest steps are taken off, and of six parts most grow faster than the bound from one to
  the next; an arena that grows once or twice does not;
- *after a plateau*: `plateau_seconds` in which memory grew at less than half the bound lie behind the process; or it
  has grown by `settling_mb` since its warm-up, or steadily for `steady_seconds`, more than pools until they are full;
- *not settling*: with 99 % confidence the second half grows at least `settled_percent` as fast as the first; a pool
  that reaches its plateau after hours slows down, a leak does not.

Stretches of each level of `guards/memory/windows.py` are judged when they get a point: short ones find fast leaks, long
ones find slow, stepwise and noisy ones.

What is *not* a leak gets a resolution: the smallest slope that would have been seen. It is the upper end of the longest
judged stretch's interval; not below that of any shorter stretch that does grow; and not below a block of
`unseen_block_mb` in the time looked at, since a leak in blocks may simply not have struck yet.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import pairwise

from guards.memory.slope import NORMAL_FROM_MAD, Slope, coupling, sen_slope
from guards.memory.windows import MEGABYTE, MERGED, POINTS, Point, Run
from guards.settings import DAY_SECONDS, HOUR_SECONDS, MemorySettings

TREND_Z = 2.58
"""Of a two-sided 99 % interval, which has to lie above the bound; one condition of several."""
RESOLUTION_Z = 3.29
"""Of 99.9 %: a box states its resolution thousands of times a year."""
SETTLED_Z = 2.33
"""One-sided 99 %."""
PARTS = 6
"""Of a stretch, compared with each other one after the other."""
STEPS = 2
"""An arena that grows, or a larger batch than ever, makes a step. A leak in steps makes more than two."""
STEP_SIDE = 3
"""Points on each side, whose medians are compared: a peak is no step."""
STEP_NOISE = 4.0
"""A step stands out of the noise of such comparisons by so many standard deviations."""
LESS_POINTS = 5
"""From a stretch that is looked at to the next shorter one; all end now."""


class LeakState(str, Enum):
    """What can be said of a process."""

    SETTLING = "settling"  # not watched long enough since it started, or its layers changed
    LEAK = "leak"
    NONE = "none"  # none above the bound; a smaller one than `resolution_mb_per_day` can't be seen
    BELOW_RESOLUTION = "below-resolution"  # even a leak above the bound could not be told from what is seen


@dataclass(frozen=True)
class Leak:
    """The verdict.

    Attributes:
        state: in short.
        mb_per_hour, low_mb_per_hour, high_mb_per_hour: slope of unexplained memory with its interval, 99 % of a
            leak's and 99.9 % of others', in 10^6 bytes; None where the points are too few, or say nothing.
        resolution_mb_per_day: a leak below it can't be seen; None: nothing can.
        stretch_seconds: that these figures were taken over.
    """

    state: LeakState
    mb_per_hour: float | None = None
    low_mb_per_hour: float | None = None
    high_mb_per_hour: float | None = None
    resolution_mb_per_day: float | None = None
    stretch_seconds: float = 0.0

    @property
    def text(self) -> str:
        """One line for people."""
        if self.state == LeakState.SETTLING:
            return "not watched long enough yet for a slope"
        hours = self.stretch_seconds / HOUR_SECONDS
        if self.state == LeakState.LEAK:
            most = "more" if self.high_mb_per_hour is None else f"{self.high_mb_per_hour:.1f}"
            return f"leaks {self.mb_per_hour:.1f} MB/h ({self.low_mb_per_hour:.1f} to {most}) over {hours:.1f} h"
        if self.resolution_mb_per_day is None:
            return f"what {hours:.1f} h show is too uneven for a slope: no leak can be seen"
        seen = f"can't see below {self.resolution_mb_per_day:.0f} MB/day over {hours:.1f} h"
        return f"no leak above the bound; {seen}" if self.state == LeakState.NONE else seen


SETTLING = Leak(LeakState.SETTLING)


def found_leak(run: Run, settings: MemorySettings) -> Leak | None:
    """A leak in one of the stretches that got a point just now; of several, the one in the longest."""
    least = least_points(settings)
    for level in reversed(run.changed):
        points = run.levels[level]
        for count in range(len(points), least - 1, -LESS_POINTS):
            stretch = points[-count:]
            slope = _leaking(stretch, points, _highest_before(run, level, stretch), settings)
            if slope is not None and _has_settled(run, stretch, settings):
                return _verdict(LeakState.LEAK, slope, stretch, _per_day(slope.high))
    return None


def resolution(run: Run, settings: MemorySettings) -> Leak:
    """What can be said while no leak was found."""
    least = least_points(settings)
    stretches = [points for points in run.levels if len(points) >= least]
    if not stretches:
        return SETTLING
    longest = stretches[-1]
    slopes = [_slope(_without_load(points), RESOLUTION_Z) for points in stretches]
    span_seconds = longest[-1].seconds - longest[0].seconds
    block = settings.unseen_block_mb * MEGABYTE / span_seconds
    # a shorter stretch that surely grows is not overruled by a long, flat one before it
    smallest = max([slopes[-1].high, block, *(slope.high for slope in slopes if slope.low > 0.0)])
    if math.isinf(smallest):
        return Leak(LeakState.BELOW_RESOLUTION, stretch_seconds=span_seconds)
    per_day = _per_day(smallest)
    seen = per_day <= settings.leak_mb_per_hour * DAY_SECONDS / HOUR_SECONDS
    return _verdict(LeakState.NONE if seen else LeakState.BELOW_RESOLUTION, slopes[-1], longest, per_day)


def least_points(settings: MemorySettings) -> int:
    """Points of a stretch, so that the shortest one spans `least_window_seconds`; eight have a useful interval."""
    return min(POINTS, max(8, math.ceil(settings.least_window_seconds / settings.window_seconds)))


def _leaking(
    stretch: Sequence[Point], points: Sequence[Point], before_bytes: float, settings: MemorySettings
) -> Slope | None:
    """The slope of a stretch, the last of a level's points, if it is a leak."""
    hour_share = min(1.0, (stretch[-1].seconds - stretch[0].seconds) / HOUR_SECONDS)
    bound = settings.leak_mb_per_hour * MEGABYTE / HOUR_SECONDS / math.sqrt(hour_share)
    stretch = _without_steps(_without_load(stretch), settings.step_mb * MEGABYTE)
    new_ground = [each._replace(floor_bytes=max(each.floor_bytes, before_bytes)) for each in stretch]
    if not _grows_in_most_parts(new_ground, bound):  # cheap, and nearly always the end of it
        return None
    slope = _slope(new_ground)
    longest = _without_steps(_without_load(points), settings.step_mb * MEGABYTE)
    if slope.low <= bound or _settling(longest, slope, settings.settled_percent / 100.0):
        return None
    return slope


def _without_load(stretch: Sequence[Point]) -> list[Point]:
    """A stretch without what moves with the number of open sequences: declared blocks not yet touched, activations."""
    each_bytes = coupling([each.floor_bytes for each in stretch], [each.sequences for each in stretch])
    usual = statistics.median(each.sequences for each in stretch)
    return [each._replace(floor_bytes=each.floor_bytes - each_bytes * (each.sequences - usual)) for each in stretch]


def _without_steps(stretch: Sequence[Point], least_bytes: float) -> list[Point]:
    """A stretch without the largest steps that stand out of its trend and noise, two at most; see `STEPS`."""
    floors = [each.floor_bytes for each in stretch]
    places = range(STEP_SIDE, len(floors) - STEP_SIDE + 1)
    for _ in range(STEPS):
        rises = [
            statistics.median(floors[at : at + STEP_SIDE]) - statistics.median(floors[at - STEP_SIDE : at])
            for at in places
        ]
        usual = statistics.median(rises)
        noise = NORMAL_FROM_MAD * statistics.median(abs(each - usual) for each in rises)
        rise, at = max(zip(rises, places, strict=True))
        if rise - usual <= max(least_bytes, STEP_NOISE * noise):
            break
        floors[at:] = [each - (rise - usual) for each in floors[at:]]
    return [each._replace(floor_bytes=floor) for each, floor in zip(stretch, floors, strict=True)]


def _grows_in_most_parts(stretch: Sequence[Point], bound: float) -> bool:
    """Whether the median rise from a part of it to the next is above the bound: one or two steps are two rises."""
    edges = [round(part * len(stretch) / PARTS) for part in range(PARTS + 1)]
    parts = [stretch[begin:end] for begin, end in pairwise(edges)]
    levels = [statistics.median(each.floor_bytes for each in part) for part in parts]
    times = [statistics.fmean(each.seconds for each in part) for part in parts]
    rates = [(levels[at] - levels[at - 1]) / (times[at] - times[at - 1]) for at in range(1, PARTS)]
    return statistics.median(rates) > bound


def _settling(stretch: Sequence[Point], slope: Slope, share: float) -> bool:
    """Whether its second half may be growing slower than a share of its first half's slope."""
    half = len(stretch) // 2
    first, second = stretch[:half], stretch[-half:]
    error = slope.error(half, second[-1].seconds - second[0].seconds) * math.hypot(1.0, share)
    return _slope(second).middle - share * _slope(first).middle < SETTLED_Z * error


def _has_settled(run: Run, stretch: Sequence[Point], settings: MemorySettings) -> bool:
    """Whether a plateau was there before, or growth is more, or has been steady for longer, than a pool's can be."""
    middle_seconds = stretch[len(stretch) // 2].seconds  # one that comes later may be the end of the growth
    first = min((points[0] for points in run.levels if points), key=lambda point: point.seconds)
    if run.levels[0][-1].floor_bytes - first.floor_bytes > settings.settling_mb * MEGABYTE:
        return True
    if stretch[-1].seconds - stretch[0].seconds >= settings.steady_seconds:
        return True
    flat = settings.leak_mb_per_hour * MEGABYTE / HOUR_SECONDS / 2.0
    return any(
        later.floor_bytes - earlier.floor_bytes <= flat * (later.seconds - earlier.seconds)
        for points in run.levels[1:]
        for at, later in enumerate(points)
        for earlier in points[:at]
        if later.seconds <= middle_seconds and later.seconds - earlier.seconds >= settings.plateau_seconds
    )


def _highest_before(run: Run, level: int, stretch: Sequence[Point]) -> float:
    """The highest floor of any window before a stretch that this run remembers."""
    reach = 0.5 * (stretch[1].seconds - stretch[0].seconds)
    end = stretch[0].seconds - reach
    peaks = []
    for above in range(level, len(run.levels)):
        half = reach * MERGED ** (above - level)
        peaks += [each.peak_bytes for each in run.levels[above] if each.seconds + half <= end + 1.0]
    return max(peaks, default=-math.inf)


def _slope(points: Sequence[Point], z: float = TREND_Z) -> Slope:
    return sen_slope([each.seconds for each in points], [each.floor_bytes for each in points], z)


def _per_day(bytes_per_second: float) -> float:
    return bytes_per_second * DAY_SECONDS / MEGABYTE


def _verdict(state: LeakState, slope: Slope, stretch: Sequence[Point], resolution_mb_per_day: float) -> Leak:
    hourly = HOUR_SECONDS / MEGABYTE
    return Leak(
        state,
        slope.middle * hourly,
        None if math.isinf(slope.low) else slope.low * hourly,
        None if math.isinf(slope.high) else slope.high * hourly,
        None if math.isinf(resolution_mb_per_day) else resolution_mb_per_day,
        stretch[-1].seconds - stretch[0].seconds,
    )
