from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from guards.memory.leak import SETTLING, Leak, LeakState, found_leak, resolution
from guards.memory.windows import Run, Sample, observe
from guards.settings import MemorySettings
from tests.guards.memory.shapes import DAY, HOUR, LEAK, NO_LEAK, Shape, trace

SETTINGS = MemorySettings()
MB = 1e6
Curve = Callable[[float], float]


def samples(curve: Curve, seconds: float, noise_mb: float = 0.2, seed: int = 1, period: float = 20.0) -> list[Sample]:
    """A process whose memory follows a curve of megabytes by hours."""
    rng = random.Random(seed)  # noqa: S311
    times = [index * period for index in range(int(seconds / period))]
    heights = [500.0 + curve(each / HOUR) + rng.gauss(0.0, noise_mb) for each in times]
    return [Sample(time, int(height * MB), 0, 0, 1) for time, height in zip(times, heights, strict=True)]


def watch(trace_: list[Sample] | Iterator[Sample]) -> tuple[Run, Leak | None, float | None]:
    """The run at its end, or when a leak is found; the leak; when, in hours."""
    run = None
    for sample in trace_:
        run = observe(run, sample, SETTINGS)
        leak = found_leak(run, SETTINGS)
        if leak is not None:
            return run, leak, sample.seconds / HOUR
    assert run is not None
    return run, None, None


def rising(rate: float, onset_hours: float) -> Curve:
    return lambda hours: rate * max(0.0, hours - onset_hours)


def test_a_leak_of_20_mb_an_hour_is_found_within_the_hour() -> None:
    _, leak, hours = watch(samples(rising(20.0, 2.0), 4 * HOUR))
    assert leak is not None
    assert hours is not None
    assert 2.0 < hours < 3.0
    assert leak.state == LeakState.LEAK
    assert leak.low_mb_per_hour is not None
    assert leak.low_mb_per_hour > SETTINGS.leak_mb_per_hour
    assert leak.text.startswith("leaks ")


def test_a_leak_without_an_upper_end_is_told_as_one() -> None:
    leak = Leak(LeakState.LEAK, 60.0, 14.0, None, None, 1800.0)
    assert leak.text == "leaks 60.0 MB/h (14.0 to more) over 0.5 h"


def test_a_leak_below_the_bound_is_none_but_its_rate_is_told() -> None:
    run, leak, _ = watch(samples(rising(5.0, 0.0), 20 * HOUR))
    assert leak is None
    said = resolution(run, SETTINGS)
    assert said.state == LeakState.NONE
    assert said.mb_per_hour == pytest.approx(5.0, abs=0.2)
    assert said.resolution_mb_per_day is not None
    assert said.resolution_mb_per_day >= 5.0 * 24


@pytest.mark.parametrize(
    "curve",
    [
        pytest.param(lambda hours: 0.0, id="flat"),
        pytest.param(lambda hours: 60.0 * (hours > 2.0), id="one step"),
        pytest.param(lambda hours: 30.0 * (hours > 2.0) + 30.0 * (hours > 2.5), id="two steps"),
        pytest.param(lambda hours: 100.0 * min(1.0, hours / 0.05), id="a quick warm-up"),
        pytest.param(lambda hours: 60.0 * (1.0 - 2.718 ** (-hours)), id="a plateau after hours"),
        pytest.param(lambda hours: 15.0 * ((hours * 3.0) % 1.0), id="saw-tooth"),
        pytest.param(lambda hours: -20.0 * hours, id="shrinks"),
        pytest.param(lambda hours: 80.0 * abs((hours / 4.0) % 2.0 - 1.0) - 80.0, id="comes and goes with the day"),
    ],
)
def test_what_is_no_leak(curve: Curve) -> None:
    _, leak, _ = watch(samples(curve, 12 * HOUR))
    assert leak is None


def test_memory_given_back_has_to_be_outgrown() -> None:
    """What comes back to where it was before a trim is no leak; what goes on from there is."""

    def curve(hours: float) -> float:
        return 40.0 if hours < 2.0 else 20.0 * (hours - 2.0)

    _, leak, hours = watch(samples(curve, 8 * HOUR))
    assert leak is not None
    assert hours is not None
    assert 4.0 < hours < 5.5


def test_growth_from_the_start_may_be_pools_until_it_is_more_than_they_take() -> None:
    _, leak, hours = watch(samples(rising(60.0, 0.0), 3 * HOUR))
    assert leak is not None
    assert hours is not None
    assert SETTINGS.settling_mb / 60.0 < hours < 2.5


def test_layers_taken_over_are_explained_by_what_the_stage_declares() -> None:
    flat = samples(lambda hours: 0.0, 6 * HOUR)
    merged = [
        replace(each, retained_bytes=each.retained_bytes + 300_000_000, weight_bytes=285_000_000)
        if each.seconds > 3 * HOUR
        else each
        for each in flat
    ]
    run, leak, _ = watch(merged)
    assert leak is None
    assert resolution(run, SETTINGS).stretch_seconds < 3 * HOUR


def test_a_leak_hidden_under_growing_caches_is_found() -> None:
    leaking = samples(rising(20.0, 2.0), 4 * HOUR)
    growing = [int(each.seconds * 40_000) for each in leaking]
    hidden = [
        replace(each, retained_bytes=each.retained_bytes + kv, kv_bytes=kv)
        for each, kv in zip(leaking, growing, strict=True)
    ]
    assert watch(hidden)[1] is not None


def test_before_there_are_enough_points_nothing_is_said() -> None:
    run, leak, _ = watch(samples(rising(500.0, 0.0), SETTINGS.warm_up_seconds + SETTINGS.least_window_seconds / 2))
    assert leak is None
    assert resolution(run, SETTINGS) == SETTLING
    assert "not watched long enough" in SETTLING.text


def test_an_hour_can_not_rule_out_a_leak_in_blocks() -> None:
    run, _, _ = watch(samples(lambda hours: 0.0, HOUR, noise_mb=0.0))
    said = resolution(run, SETTINGS)
    assert said.state == LeakState.BELOW_RESOLUTION
    assert said.text.startswith("can't see below ")


def test_the_resolution_gets_better_with_time() -> None:
    said = [resolution(watch(samples(lambda hours: 0.0, hours * HOUR))[0], SETTINGS) for hours in (2, 8, 30)]
    figures = [each.resolution_mb_per_day for each in said]
    assert all(figure is not None for figure in figures)
    assert figures == sorted(figures, reverse=True)
    assert said[-1].text.startswith("no leak above the bound; can't see below ")


def test_noise_that_drowns_a_slope_says_so() -> None:
    run, _, _ = watch(samples(lambda hours: 50.0 * ((hours * 7.0) % 1.0 > 0.5), HOUR, noise_mb=30.0))
    said = resolution(run, SETTINGS)
    assert said.state == LeakState.BELOW_RESOLUTION


@settings(max_examples=10, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    noise_mb=st.floats(0.0, 5.0),
    blocks_mb=st.floats(0.0, 12.0),
    hours=st.floats(1.0, 50.0),
)
def test_12_mb_a_day_are_never_called_clean(seed: int, noise_mb: float, blocks_mb: float, hours: float) -> None:
    """Smooth, or in blocks of up to 12 MB: found, or below the resolution that is stated."""
    rate = 12.0 / 24.0

    def curve(at: float) -> float:
        return rate * at if blocks_mb < 0.01 else (rate * at // blocks_mb) * blocks_mb

    run, leak, _ = watch(samples(curve, hours * HOUR, noise_mb, seed, period=40.0))
    said = leak or resolution(run, SETTINGS)
    clean = said.state == LeakState.NONE and (said.resolution_mb_per_day or 0.0) < 12.0
    assert not clean


@pytest.mark.parametrize("shape", NO_LEAK, ids=lambda shape: shape.name)
def test_simulated_stages_without_a_leak_raise_no_alarm(shape: Shape) -> None:
    _, leak, _ = watch(trace(shape, random.Random(f"fixed/{shape.name}"), DAY))  # noqa: S311
    assert leak is None


@pytest.mark.parametrize("shape", LEAK, ids=lambda shape: shape.name)
def test_simulated_leaks_are_found(shape: Shape) -> None:
    onset = 0.0 if shape.from_start else 2.0 * HOUR
    _, leak, _ = watch(trace(shape, random.Random(f"fixed/{shape.name}"), 14 * HOUR, 40.0, onset))  # noqa: S311
    assert leak is not None


# What a drill sets short, so that 20 MB/min are found within three minutes of a stage's start.
DRILL = replace(
    SETTINGS,
    period_seconds=1.0,
    warm_up_seconds=10.0,
    window_seconds=5.0,
    least_window_seconds=60.0,
    plateau_seconds=20.0,
    settling_mb=10.0,
)


@pytest.mark.parametrize(
    ("settings", "mb_per_hour", "onset_seconds", "within_seconds"),
    [
        (DRILL, 1200.0, 0.0, 90.0),
        (DRILL, 1200.0, 300.0, 90.0),
        (SETTINGS, 2000.0, 0.0, 2400.0),  # before any plateau
        (SETTINGS, 2000.0, 7200.0, 1800.0),  # after one
    ],
)
def test_how_soon_a_drill_finds_a_fast_leak(
    settings: MemorySettings, mb_per_hour: float, onset_seconds: float, within_seconds: float
) -> None:
    curve, run = rising(mb_per_hour, onset_seconds / HOUR), None
    for sample in samples(curve, onset_seconds + within_seconds, period=settings.period_seconds):
        run = observe(run, sample, settings)
        if found_leak(run, settings) is not None:
            assert sample.seconds > onset_seconds
            return
    raise AssertionError(f"not within {within_seconds:g} s")
