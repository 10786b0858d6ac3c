"""The 80/70 latch."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from guards.settings import ThermalSettings
from guards.thermal.latch import Latch, step

SETTINGS = ThermalSettings()
PERIOD = SETTINGS.period_seconds
BOTTOM = 12
AT_THE_TOP = Latch()

TEMPERATURES = st.one_of(st.none(), st.floats(-40, 130), st.floats(68, 84))
TRACES = st.lists(st.tuples(TEMPERATURES, st.booleans()), max_size=400)


def levels(
    trace: list[tuple[float | None, bool]], latch: Latch = AT_THE_TOP, period: float = PERIOD
) -> tuple[list[int], Latch]:
    """Of a latch that goes through a trace, with the level before it."""
    seen = [latch.level]
    for index, (celsius, throttled) in enumerate(trace):
        now = index * period
        latch = step(latch, celsius, throttled=throttled, bottom=BOTTOM, now_seconds=now, settings=SETTINGS)
        seen.append(latch.level)
    return seen, latch


def switches(seen: list[int]) -> int:
    return sum(before != after for before, after in pairwise(seen))


@given(TRACES, st.integers(0, BOTTOM), st.floats(0.5, 60))
def test_switches_are_bounded_for_any_trace(trace: list[tuple[float | None, bool]], level: int, period: float) -> None:
    seen, _ = levels(trace, Latch(level), period)
    seconds = len(trace) * period
    assert switches(seen) <= BOTTOM + 2 * (seconds / SETTINGS.up_dwell_seconds + 1)
    assert all(abs(after - before) <= 1 for before, after in pairwise(seen))
    assert all(0 <= each <= BOTTOM for each in seen)


@given(st.floats(SETTINGS.low_celsius, SETTINGS.high_celsius), st.integers(0, BOTTOM), st.integers(1, 400))
def test_a_steady_temperature_in_between_switches_nothing(celsius: float, level: int, rounds: int) -> None:
    seen, _ = levels([(celsius, False)] * rounds, Latch(level))
    assert switches(seen) == 0


@given(TRACES, st.integers(1, 300))
def test_an_unknown_temperature_never_raises_a_limit(trace: list[tuple[float | None, bool]], rounds: int) -> None:
    _, latch = levels(trace)
    now = len(trace) * PERIOD
    for index in range(rounds):
        after = step(
            latch,
            None,
            throttled=False,
            bottom=BOTTOM,
            now_seconds=now + index * PERIOD,
            settings=SETTINGS,
        )
        assert after.level == latch.level
        latch = after


@given(TRACES)
def test_steps_up_keep_their_dwell(trace: list[tuple[float | None, bool]]) -> None:
    seen, _ = levels(trace, Latch(BOTTOM))
    changed = [index for index in range(1, len(seen)) if seen[index] != seen[index - 1]]
    for before, after in pairwise(changed):
        if seen[after] < seen[after - 1]:
            assert (after - before) * PERIOD >= SETTINGS.up_dwell_seconds


def test_heat_lowers_within_one_period_and_goes_on_to_the_bottom() -> None:
    seen, _ = levels([(50.0, False)] * 5 + [(86.0, False)] * (BOTTOM + 3))
    assert seen[5:8] == [0, 1, 2]
    assert seen[-1] == BOTTOM


def test_after_cooling_everything_comes_back_a_step_a_dwell() -> None:
    dwell = int(SETTINGS.up_dwell_seconds / PERIOD)
    seen, _ = levels([(50.0, False)] * (dwell * BOTTOM + 1), Latch(BOTTOM))
    assert seen[1] == BOTTOM - 1
    assert seen[-1] == 0


def test_one_degree_too_much_costs_one_step_until_patience_ends() -> None:
    patience = int(SETTINGS.patience_seconds / PERIOD)
    seen, _ = levels([(80.5, False)] * patience)
    assert seen[-1] == 1
    seen, _ = levels([(80.5, False)] * (patience + 1))
    assert seen[-1] == 2


def test_a_falling_temperature_is_left_to_fall() -> None:
    falling = Latch(3, followed_celsius=83.2, trend=-0.6, seen_seconds=-PERIOD)
    seen, _ = levels([(82.0 - 1.2 * index, False) for index in range(9)], falling)  # down to 72 °C
    assert set(seen) == {3}
    steady = Latch(3, followed_celsius=82.0, trend=0.0, seen_seconds=-PERIOD)
    assert levels([(82.0, False)], steady)[0] == [3, 4]


def test_a_quick_rise_is_met_before_the_threshold() -> None:
    trace = [(60.0 + 1.5 * index, False) for index in range(14)]  # up to 79.5 °C
    seen, _ = levels(trace)
    assert seen[-1] >= 1
    assert seen[7] == 0  # but never below the lower threshold


@pytest.mark.parametrize("celsius", [None, 75.0])
def test_the_hardwares_word_lowers_without_a_temperature_and_inside_the_band(celsius: float | None) -> None:
    seen, _ = levels([(celsius, True)])
    assert seen == [0, 1]


def test_a_throttle_on_a_cool_box_lowers_nothing_and_keeps_limits_from_rising() -> None:
    # the soft limit of a Raspberry Pi 3 B+ is 60 °C
    seen, _ = levels([(65.0, True)] * 200, Latch(3))
    assert set(seen) == {3}
    seen, _ = levels([(65.0, False)], Latch(3))
    assert seen == [3, 2]


def test_a_shorter_ladder_takes_the_latch_to_its_bottom() -> None:
    latch = step(Latch(9), 75.0, throttled=False, bottom=4, now_seconds=0.0, settings=SETTINGS)
    assert latch.level == 4


def test_a_gap_in_time_says_nothing_about_a_trend() -> None:
    latch = step(Latch(), 40.0, throttled=False, bottom=BOTTOM, now_seconds=0.0, settings=SETTINGS)
    latch = step(latch, 79.0, throttled=False, bottom=BOTTOM, now_seconds=600.0, settings=SETTINGS)
    assert (latch.level, latch.trend) == (0, 0.0)
