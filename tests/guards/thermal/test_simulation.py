"""The latch on simulated boxes: the fixed seeds of `benchmarks.thermal`, fewer and for less time."""

from __future__ import annotations

import pytest

from benchmarks.thermal import OURS, latch_guard, no_guard, our_ladder, restart_loop
from benchmarks.thermal_plants import HOT_CELSIUS, THROTTLE_CELSIUS, Running, draw_plant, oracle_produced

HOURS = 3.0
SEEDS = range(24)
HOUR_SECONDS = 3600.0


@pytest.mark.parametrize("seed", SEEDS)
def test_no_plant_throttles_and_switches_are_few(seed: int) -> None:
    plant = draw_plant(seed, HOURS)
    rungs = our_ladder(plant)
    box, switches = latch_guard(plant, HOURS, OURS, rungs)
    assert box.throttle_events == 0
    assert switches <= len(rungs) + 2 * (HOURS * HOUR_SECONDS / OURS.up_dwell_seconds + 1)


def test_the_plants_are_hot_enough_to_need_a_guard() -> None:
    throttled = sum(no_guard(draw_plant(seed, HOURS), HOURS)[0].throttle_events > 0 for seed in SEEDS)
    assert throttled >= len(SEEDS) // 4


@pytest.mark.parametrize("seed", range(6))
def test_a_box_held_at_the_oracles_bound_never_yields_more(seed: int) -> None:
    plant = draw_plant(seed, HOURS)
    bound = oracle_produced(plant, HOURS, THROTTLE_CELSIUS)
    assert latch_guard(plant, HOURS, OURS, our_ladder(plant))[0].produced <= bound
    assert oracle_produced(plant, HOURS, HOT_CELSIUS) <= bound


def test_the_loop_as_written_never_lets_the_service_come_up() -> None:
    box, restarts = restart_loop(draw_plant(0, HOURS), HOURS, as_written=True)
    assert box.produced == 0
    assert restarts > 0


def test_a_plant_settles_where_its_power_says() -> None:
    plant = draw_plant(3, HOURS)
    box = Running(plant)
    for _ in range(600):
        box.advance(10.0, 0.2)
    assert box.celsius == pytest.approx(plant.ambient[0][1] + plant.idle_rise_celsius + 10.0, abs=0.2)
    assert box.produced == pytest.approx(600 * 2.0 * 0.2)
