from __future__ import annotations

import math
import random
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from guards.memory.slope import coupling, sen_slope

Z = 3.29
VALUES = st.lists(st.floats(-1e9, 1e9), min_size=4, max_size=30)


def test_a_line_is_found_with_nothing_in_doubt() -> None:
    slope = sen_slope([0, 60, 120, 180, 300, 360, 420, 480], [5, 11, 17, 23, 35, 41, 47, 53], Z)
    assert slope.middle == pytest.approx(0.1)
    assert (slope.low, slope.noise, slope.widening) == (pytest.approx(0.1), pytest.approx(0.0), 1.0)


def test_every_fourth_point_may_be_anything() -> None:
    times = [float(minute) for minute in range(30)]
    values = [2.0 * time if minute % 4 else 1e6 * (minute + 1) for minute, time in enumerate(times)]
    assert sen_slope(times, values, Z).middle == pytest.approx(2.0)


@given(VALUES, st.floats(-1e3, 1e3), st.floats(-1e9, 1e9))
def test_a_trend_added_is_a_slope_added(values: list[float], trend: float, offset: float) -> None:
    times = [10.0 * index for index in range(len(values))]
    tilted = [value + offset + trend * time for time, value in zip(times, values, strict=True)]
    before, after = sen_slope(times, values, Z), sen_slope(times, tilted, Z)
    assert after.middle == pytest.approx(before.middle + trend, rel=1e-6, abs=1e-3)


@given(VALUES)
def test_the_estimate_lies_within_its_interval(values: list[float]) -> None:
    slope = sen_slope([float(index) for index in range(len(values))], values, Z)
    assert slope.low <= slope.middle <= slope.high
    assert slope.widening >= 1.0


def test_few_points_say_nothing() -> None:
    slope = sen_slope([0, 1, 2, 3], [0, 1, 2, 3], Z)
    assert (slope.low, slope.high) == (-math.inf, math.inf)


@pytest.mark.parametrize(
    ("times", "values"), [([0, 1, 2], [0, 1, 2]), ([0, 1, 2, 3], [0, 1, 2]), ([0, 1, 1, 2], [0, 1, 2, 3])]
)
def test_what_has_no_slope_is_refused(times: list[float], values: list[float]) -> None:
    with pytest.raises(ValueError, match=r"slope|rise"):
        sen_slope(times, values, Z)


@pytest.mark.parametrize("memory", [0.0, 0.6])
def test_the_interval_holds_the_truth_for_noise_with_and_without_memory(memory: float) -> None:
    rng = random.Random(5)  # noqa: S311
    held = 0
    for _ in range(200):
        noise, values = 0.0, []
        for index in range(30):
            noise = memory * noise + rng.gauss(0.0, 1.0)
            values.append(0.3 * index + noise)
        slope = sen_slope([float(index) for index in range(30)], values, Z)
        held += slope.low <= 0.3 <= slope.high
    assert held >= 194


def test_the_standard_error_is_that_of_the_estimates() -> None:
    rng = random.Random(6)  # noqa: S311
    estimates, errors = [], []
    for _ in range(300):
        slope = sen_slope([float(index) for index in range(30)], [rng.gauss(0.0, 1.0) for _ in range(30)], Z)
        estimates.append(slope.middle)
        errors.append(slope.error(30, 29.0))
    assert statistics.median(errors) == pytest.approx(statistics.stdev(estimates), rel=0.3)


def test_an_effect_of_load_is_told_from_a_trend() -> None:
    rng = random.Random(7)  # noqa: S311
    loads = [float(rng.randint(0, 8)) for _ in range(30)]
    values = [40.0 * index - 3.0 * load for index, load in enumerate(loads)]
    assert coupling(values, loads) == pytest.approx(-3.0)


@pytest.mark.parametrize("loads", [[], [1.0], [2.0] * 10, [float(index) for index in range(10)]])
def test_a_load_that_does_not_vary_has_no_effect(loads: list[float]) -> None:
    assert coupling([7.0 * index for index, _ in enumerate(loads)], loads) == 0.0
