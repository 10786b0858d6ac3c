"""Days of a process's memory in a few hundred numbers: windows of windows. Pure.

What is looked at is *unexplained* memory: retained bytes minus the weights and KV caches that the stage declares. Of
each window of `window_seconds` its lower quartile is kept, the *floor*: a leak lifts what stays when a micro-batch is
over, while activations, copies and prefill buffers only make peaks, so maxima would show load, not leaks. It is not the
minimum, because declared KV blocks that no token has touched yet, and a reading taken between a release and its report,
make single dips. Three windows make one of the next level (median of their floors, maximum of their peaks), each level
holds the last thirty, so that six levels reach from one hour to ten days.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass, replace
from typing import NamedTuple

from guards.settings import MemorySettings

MEGABYTE = 1e6
LEVELS = 6
POINTS = 30
"""Held on each level: 1 h, 3 h, 9 h, 27 h, 81 h, 10 days at windows of two minutes."""
MERGED = 3
"""Windows of a level that make one of the next."""
LEAST_SAMPLES = 3
"""In a window that counts: of fewer a quartile means nothing."""
RECORD_WINDOWS = 2
"""Growth in the window of a new record of open sequences, and in the next, is the allocator's answer to it."""


@dataclass(frozen=True)
class Sample:
    """One look at a process.

    Attributes:
        seconds: of the running clock.
        retained_bytes: resident anonymous memory and what of it is swapped out.
        kv_bytes, weight_bytes: as the stage declares them.
        open_sequences: that it computes.
    """

    seconds: float
    retained_bytes: int
    kv_bytes: int
    weight_bytes: int
    open_sequences: int

    @property
    def unexplained_bytes(self) -> int:
        """What neither weights nor KV caches account for; may be negative where declared pages are untouched."""
        return self.retained_bytes - self.kv_bytes - self.weight_bytes


class Point(NamedTuple):
    """A window: its middle, its floor, the highest floor of those it was made from, its mean of open sequences."""

    seconds: float
    floor_bytes: float
    peak_bytes: float
    sequences: float


@dataclass(frozen=True)
class Run:
    """What is kept of a process since it started, or since its layers changed.

    Attributes:
        weight_bytes: declared when this run began; more or fewer later begin a new one.
        settled_seconds: of the running clock; samples before it are warm-up and left out.
        last_seconds: of the newest sample.
        most_sequences: the highest number of open sequences so far.
        record_windows: how many more windows belong to a new record of it.
        load_bytes: growth in such windows so far, which is taken off all later floors.
        window_seconds: start of the open window. window: its unexplained bytes. opened: open sequences, added up.
        levels: points of each level, oldest first.
        merged: points of each level since the last one that became part of the next level.
        changed: levels that got a point by the newest sample.
    """

    weight_bytes: int
    settled_seconds: float
    last_seconds: float
    most_sequences: int
    record_windows: int = 0
    load_bytes: float = 0.0
    window_seconds: float = 0.0
    window: tuple[int, ...] = ()
    opened: int = 0
    levels: tuple[tuple[Point, ...], ...] = ((),) * LEVELS
    merged: tuple[int, ...] = (0,) * LEVELS
    changed: tuple[int, ...] = ()


def first_run(sample: Sample, settings: MemorySettings) -> Run:
    """A process was just found, or its layers have changed: the warm-up begins."""
    return Run(sample.weight_bytes, sample.seconds + settings.warm_up_seconds, sample.seconds, sample.open_sequences)


def observe(run: Run | None, sample: Sample, settings: MemorySettings) -> Run:
    """The run with one more sample. A sample that is no newer than the last one changes nothing."""
    if run is None or abs(sample.weight_bytes - run.weight_bytes) > settings.level_shift_mb * MEGABYTE:
        return first_run(sample, settings)
    if sample.seconds <= run.last_seconds:
        return replace(run, changed=())
    record = sample.open_sequences > run.most_sequences
    run = replace(
        run,
        last_seconds=sample.seconds,
        most_sequences=max(run.most_sequences, sample.open_sequences),
        record_windows=RECORD_WINDOWS if record else run.record_windows,
        changed=(),
    )
    if sample.seconds < run.settled_seconds:
        return run
    if run.window and sample.seconds >= run.window_seconds + settings.window_seconds:
        run = _close_window(run, settings)
    if not run.window:
        first = (sample.unexplained_bytes,)
        return replace(run, window_seconds=sample.seconds, window=first, opened=sample.open_sequences)
    return replace(run, window=(*run.window, sample.unexplained_bytes), opened=run.opened + sample.open_sequences)


def _close_window(run: Run, settings: MemorySettings) -> Run:
    """Turn the open window into a point of the first level, and further up where three are together."""
    if len(run.window) < LEAST_SAMPLES:
        return replace(run, window=())
    floor = statistics.quantiles(run.window, n=4, method="inclusive")[0] - run.load_bytes
    load_bytes = run.load_bytes
    if run.record_windows and run.levels[0]:
        rise = max(0.0, floor - run.levels[0][-1].floor_bytes)
        floor, load_bytes = floor - rise, load_bytes + rise
    levels, merged, changed = list(run.levels), list(run.merged), []
    point = Point(run.window_seconds + settings.window_seconds / 2.0, floor, floor, run.opened / len(run.window))
    for level in range(LEVELS):
        levels[level] = (*levels[level], point)[-POINTS:]
        changed.append(level)
        merged[level] += 1
        if merged[level] < MERGED:
            break
        merged[level] = 0
        parts = levels[level][-MERGED:]
        point = Point(
            statistics.fmean(each.seconds for each in parts),
            statistics.median(each.floor_bytes for each in parts),
            max(each.peak_bytes for each in parts),
            statistics.fmean(each.sequences for each in parts),
        )
    return replace(
        run,
        window=(),
        record_windows=max(0, run.record_windows - 1),
        load_bytes=load_bytes,
        levels=tuple(levels),
        merged=tuple(merged),
        changed=tuple(changed),
    )
