from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from guards.memory.windows import LEVELS, POINTS, Run, Sample, observe
from guards.settings import MemorySettings

SETTINGS = MemorySettings()
MB = 1_000_000
WINDOW = int(SETTINGS.window_seconds)


def sample(seconds: float, megabytes: float = 500.0, kv: float = 0.0, weights: float = 100.0, open_: int = 1) -> Sample:
    return Sample(seconds, int((megabytes + kv + weights) * MB), int(kv * MB), int(weights * MB), open_)


def watched(samples: list[Sample], run: Run | None = None) -> Run:
    for each in samples:
        run = observe(run, each, SETTINGS)
    assert run is not None
    return run


def steady(seconds: int, megabytes: float = 500.0, first: int = 0, open_: int = 1) -> list[Sample]:
    return [sample(float(second), megabytes, open_=open_) for second in range(first, first + seconds, 10)]


def test_weights_and_caches_are_no_growth() -> None:
    assert sample(0.0, 500.0, kv=70.0, weights=900.0).unexplained_bytes == 500 * MB


def test_the_warm_up_is_left_out() -> None:
    run = watched([*steady(int(SETTINGS.warm_up_seconds), 900.0), *steady(2 * WINDOW, 500.0, 300)])
    assert [point.floor_bytes for point in run.levels[0]] == [500 * MB]


def test_a_window_keeps_what_stays_not_peaks_nor_a_dip() -> None:
    samples = steady(WINDOW + 10, first=310)
    samples[3] = sample(samples[3].seconds, 900.0)
    samples[7] = sample(samples[7].seconds, 100.0)
    samples[9] = sample(samples[9].seconds, 700.0)
    run = watched([sample(0.0), *samples])
    assert [point.floor_bytes for point in run.levels[0]] == [500 * MB]
    assert run.levels[0][0].seconds == 310 + WINDOW / 2


def test_a_window_of_too_few_samples_is_left_out() -> None:
    run = watched([sample(0.0), sample(310.0), sample(320.0), *steady(WINDOW, first=600)])
    assert run.levels[0] == ()


def test_three_windows_make_one_of_the_next_level() -> None:
    heights = (500.0, 530.0, 510.0)
    samples = [each for at, height in enumerate(heights) for each in steady(WINDOW, height, 310 + at * WINDOW)]
    run = watched([sample(0.0), *samples, sample(310.0 + 3 * WINDOW)])
    (point,) = run.levels[1]
    assert (point.floor_bytes, point.peak_bytes) == (510 * MB, 530 * MB)
    assert point.seconds == run.levels[0][1].seconds
    assert run.changed == (0, 1)


def test_other_weights_begin_anew_and_a_few_bytes_more_do_not() -> None:
    run = watched(steady(1000))
    same = observe(run, sample(1000.0, weights=100.5), SETTINGS)
    other = observe(run, sample(1000.0, weights=180.0), SETTINGS)
    assert same.levels == run.levels
    assert other.levels[0] == ()
    assert other.settled_seconds == 1000.0 + SETTINGS.warm_up_seconds


def test_growth_with_a_record_of_sequences_is_the_allocators() -> None:
    quiet = steady(WINDOW, 500.0, 310)
    busy = steady(3 * WINDOW, 540.0, 310 + WINDOW, open_=8)
    run = watched([sample(0.0), *quiet, *busy])
    assert [point.floor_bytes for point in run.levels[0]] == [500 * MB] * 3
    again = watched(steady(3 * WINDOW, 580.0, 310 + 4 * WINDOW, open_=8), run)
    assert again.levels[0][-1].floor_bytes == 540 * MB


@pytest.mark.parametrize("seconds", [990.0, 500.0, -1.0])
def test_a_sample_that_is_not_newer_changes_nothing(seconds: float) -> None:
    run = watched(steady(1000))
    assert observe(run, sample(seconds, 9000.0), SETTINGS) == replace(run, changed=())


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 3000), st.floats(1.0, 200.0), st.integers(0, 2**40))
def test_memory_is_bounded_and_points_rise_in_time(samples: int, period: float, height: int) -> None:
    run = watched([Sample(index * period, height + index % 7, 0, 0, index % 3) for index in range(samples)])
    assert len(run.levels) == LEVELS
    assert len(run.window) <= SETTINGS.window_seconds / period + 1
    for points in run.levels:
        assert len(points) <= POINTS
        assert all(a.seconds < b.seconds for a, b in pairwise(points))
        assert all(point.floor_bytes <= point.peak_bytes for point in points)
