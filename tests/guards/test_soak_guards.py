"""The long list of the guards: simulated boxes that run hot, and simulated stages that leak or don't, with fresh seeds.

Each case's seed and figures are kept in build/soak/guards-figures.jsonl; the summary is over all cases of the commit.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Iterator
from typing import Any

import pytest

from benchmarks.leaks import GOAL_MB_PER_HOUR, GOAL_MINUTES, LEAK_HOURS, find, watch
from benchmarks.thermal import CONTROLLERS, HOURS, outcome, percentile
from benchmarks.thermal_plants import draw_plant, oracle_produced
from tests.figures import note
from tests.guards.memory.shapes import DAY, HOUR, LEAK, NO_LEAK, Shape, draw, trace
from tests.soak import append, commit, entries, now

pytestmark = pytest.mark.soak

PLANT_CASES, PLANTS_A_CASE = 20, 10
LEAK_CASES = 20
QUIET_CASES, QUIET_DAYS = 10, 2.0
"""Of each shape without a leak: 100 days and more together."""
ROOM, OURS = "guards-figures", "our latch"


def keep(node: str, seed: int, **figures: Any) -> None:
    """Write a case down before it is judged."""
    append(ROOM, {"case": node, "commit": commit(), "seed": seed, **figures, **now()})


def fresh_seed() -> int:
    """Another one in each run; it stands in the record."""
    return random.SystemRandom().randrange(2**31)


@pytest.fixture(scope="module", autouse=True)
def summary() -> Iterator[None]:
    """Shows at the end what became of all cases of this commit."""
    yield
    found = entries(ROOM, commit())
    kept = [value for entry in found for value in entry.get("kept_percent", ())]
    if kept:
        events = sum(sum(entry.get("throttle_events", ())) for entry in found)
        middle, p5 = statistics.median(kept), percentile(kept, 5)
        note(
            f"soak-guards, {len(kept)} plants × {HOURS:g} h: {events} throttle events, "
            f"median {middle:.1f} % of the oracle, p5 {p5:.1f} %, worst {min(kept):.1f} %"
        )
    for shape in LEAK:
        minutes = [entry["minutes"] for entry in found if entry.get("leak") == shape.name]
        if minutes:
            in_time = sum(each is not None and each <= GOAL_MINUTES for each in minutes)
            ever = sum(each is not None for each in minutes)
            note(f"soak-guards, leak {shape.name}: {ever} of {len(minutes)} found, {in_time} within an hour")
    quiet = [entry for entry in found if "false_alarms" in entry and "days" in entry]
    alarms, days = sum(entry["false_alarms"] for entry in quiet), sum(entry["days"] for entry in quiet)
    note(f"soak-guards, no leak: {alarms} false alarms in {days:g} simulated days")


@pytest.mark.parametrize("number", range(PLANT_CASES))
def test_no_box_throttles(number: int, request: pytest.FixtureRequest) -> None:
    seed = fresh_seed() if number % 2 else number
    dice = random.Random(seed)  # noqa: S311 - a simulation, no secret
    outcomes = []
    for _ in range(PLANTS_A_CASE):
        plant = draw_plant(dice.randrange(10**9), HOURS)
        outcomes.append(outcome(CONTROLLERS[OURS], plant, HOURS, oracle_produced(plant, HOURS)))
    events = [each.throttle_events for each in outcomes]
    kept = [round(each.kept_percent, 2) for each in outcomes]
    hot = [round(each.hot_minutes, 1) for each in outcomes]
    keep(request.node.nodeid, seed, throttle_events=events, kept_percent=kept, hot_minutes=hot)
    assert sum(events) == 0, f"seed {seed}: {events}"


@pytest.mark.parametrize("number", range(LEAK_CASES))
@pytest.mark.parametrize("shape", LEAK, ids=lambda shape: shape.name)
def test_a_leak_is_found_and_not_before_it_began(shape: Shape, number: int, request: pytest.FixtureRequest) -> None:
    seed = fresh_seed() if number % 2 else number
    dice = random.Random(f"{seed}/{shape.name}")  # noqa: S311
    onset = 0.0 if shape.from_start else draw(dice, "onset_hours") * HOUR
    seconds, early = find(trace(shape, dice, onset + LEAK_HOURS * HOUR, GOAL_MB_PER_HOUR, onset), onset)
    minutes = None if seconds is None else round(seconds / 60.0, 1)
    keep(request.node.nodeid, seed, leak=shape.name, minutes=minutes, early_alarms=early)
    assert minutes is not None, f"seed {seed}: not found within {LEAK_HOURS:g} h"
    assert early == 0, f"seed {seed}"


@pytest.mark.parametrize("number", range(QUIET_CASES))
@pytest.mark.parametrize("shape", NO_LEAK, ids=lambda shape: shape.name)
def test_no_leak_is_no_alarm(shape: Shape, number: int, request: pytest.FixtureRequest) -> None:
    seed = fresh_seed() if number % 2 else number
    dice = random.Random(f"{seed}/{shape.name}/quiet")  # noqa: S311
    alarms = sum(leak is not None for _, _, leak in watch(trace(shape, dice, QUIET_DAYS * DAY)))
    keep(request.node.nodeid, seed, quiet=shape.name, days=QUIET_DAYS, false_alarms=alarms)
    assert alarms == 0, f"seed {seed}"
