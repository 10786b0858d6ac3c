"""Throttling that happens all the same, and what it costs."""

from __future__ import annotations

import pytest

from guards.findings import Finding, Repair, State
from guards.settings import ThermalSettings
from guards.thermal.readings import Clock, Kind, ThermalReading, Throttle, Zone
from guards.thermal.stage import StageReading
from guards.thermal.throttling import WINDOW_ROUNDS, ThrottlingMemory, judge_throttling

SETTINGS = ThermalSettings()


def reading(
    celsius: float | None,
    *,
    megahertz: float = 1800.0,
    heat: bool | None = False,
    tokens_per_second: float | None = 20.0,
    open_sequences: int = 4,
) -> ThermalReading:
    return ThermalReading(
        (Zone("thermal_zone0/cpu-thermal", Kind.CPU, celsius),),
        (Clock("cpu/policy0", megahertz, 1800.0),),
        (Throttle("raspberry-pi", heat, heat_since_boot=heat),),
        StageReading(8, 8, 100.0, tokens_per_second, open_sequences),
    )


def rounds(
    seen: ThermalReading, memory: ThrottlingMemory, *, begin: float = 0.0, count: int = WINDOW_ROUNDS
) -> tuple[Finding, ThrottlingMemory]:
    assert count > 0
    for index in range(count):
        found, memory = judge_throttling(seen, memory, begin + index * SETTINGS.period_seconds, SETTINGS)
    return found, memory


def test_the_hardwares_word_is_a_finding_with_its_cost() -> None:
    found, memory = rounds(reading(65.0), ThrottlingMemory(), count=60)
    assert found.state is State.HEALTHY
    hot = reading(83.0, megahertz=1000.0, heat=True, tokens_per_second=9.0)
    found, _ = rounds(hot, memory, begin=120.0, count=WINDOW_ROUNDS + 1)
    assert (found.state, found.repair) == (State.DEGRADED, Repair.CHECK_COOLING)
    assert found.reason == (
        "the hardware throttles for heat (raspberry-pi) for 30 s: 44 % of the clock lost, 9.0 tokens/s after 20.0"
    )
    assert found.evidence["clock_lost_percent"] == 44.4
    assert found.evidence["tokens_per_second"] == 9.0
    assert found.evidence["tokens_per_second_before"] == 20.0
    assert found.evidence["throttled_since_boot"] is True
    assert found.evidence["cpu/policy0_megahertz"] == 1000


def test_a_clock_below_that_of_a_cool_box_is_one_too() -> None:
    _, memory = rounds(reading(65.0), ThrottlingMemory())
    found, _ = rounds(reading(83.0, megahertz=1500.0), memory, begin=30.0)
    assert found.state is State.DEGRADED
    assert found.reason.startswith("the clock is lower than on a cool box for 0 s: 17 % of the clock lost")


def test_a_power_mode_that_caps_the_clock_is_none() -> None:
    capped = reading(65.0, megahertz=1200.0)
    _, memory = rounds(capped, ThrottlingMemory())
    found, _ = rounds(reading(83.0, megahertz=1200.0), memory)
    assert found.state is State.HEALTHY


@pytest.mark.parametrize("seen", [reading(83.0, megahertz=600.0, open_sequences=0), reading(60.0, megahertz=600.0)])
def test_an_idle_or_a_cool_box_may_lower_its_clock(seen: ThermalReading) -> None:
    _, memory = rounds(reading(65.0), ThrottlingMemory())
    found, _ = rounds(seen, memory)
    assert found.state is State.HEALTHY


def test_a_stage_that_waits_for_its_neighbours_now_and_then_is_none() -> None:
    _, memory = rounds(reading(65.0), ThrottlingMemory())
    for index in range(40):
        megahertz = 1800.0 if index % 5 == 0 else 600.0
        found, memory = judge_throttling(reading(83.0, megahertz=megahertz), memory, index * 2.0, SETTINGS)
        assert found.state is State.HEALTHY


def test_a_box_that_was_never_seen_cool_is_held_against_what_is_allowed() -> None:
    found, _ = rounds(reading(84.0, megahertz=500.0), ThrottlingMemory())
    assert found.state is State.DEGRADED
    assert found.evidence["clock_lost_percent"] == 72.2


def test_it_ends_when_the_hardware_says_so() -> None:
    _, memory = rounds(reading(83.0, heat=True), ThrottlingMemory(), count=3)
    assert memory.since_seconds == 0.0
    found, memory = judge_throttling(reading(78.0, heat=False), memory, 100.0, SETTINGS)
    assert found.state is State.HEALTHY
    assert memory.since_seconds is None


def test_what_cannot_be_measured_is_not_made_up() -> None:
    found, _ = rounds(reading(83.0, heat=True, tokens_per_second=None), ThrottlingMemory(), count=1)
    assert found.evidence["tokens_per_second"] is None
    assert found.evidence["tokens_per_second_before"] is None
    assert "tokens/s" not in found.reason
    bare = ThermalReading((), (), (Throttle("gpu0", None, reason="Not Supported"),), None)
    found, _ = judge_throttling(bare, ThrottlingMemory(), 0.0, SETTINGS)
    assert (found.state, found.reason) == (State.UNSUPPORTED, "gpu0: Not Supported")
    assert found.evidence["throttled_since_boot"] is None
    assert found.evidence["clock_lost_percent"] is None
