"""What the guard makes of readings."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from guards.findings import Action, Decision, Finding, Repair, State
from guards.settings import ThermalSettings
from guards.thermal.judge import decide
from guards.thermal.latch import Latch
from guards.thermal.levels import ladder
from guards.thermal.memory import ThermalMemory, memory_from_json, memory_to_json
from guards.thermal.readings import Kind, ThermalReading, Throttle, Zone
from guards.thermal.stage import StageReading

SETTINGS = ThermalSettings()
STAGE = StageReading(8, 8, 100.0, 20.0, 4)
RUNGS = ladder(8, SETTINGS.least_duty_percent, SETTINGS.step_percent)


def reading(
    celsius: float | None, stage: StageReading | None = STAGE, throttles: tuple[Throttle, ...] = ()
) -> ThermalReading:
    zone = Zone("thermal_zone0/cpu-thermal", Kind.CPU, celsius, "" if celsius is not None else "EAGAIN")
    return ThermalReading((zone,), (), throttles, stage)


def finding(decision: Decision[ThermalMemory], part: str) -> Finding:
    return next(each for each in decision.findings if each.part == part)


def limited(level: int) -> StageReading:
    return replace(STAGE, batch_limit_sequences=RUNGS[level].sequences, duty_limit_percent=RUNGS[level].duty_percent)


def test_a_cool_box_is_left_alone() -> None:
    decision = decide(reading(55.0), ThermalMemory(), 100.0, SETTINGS)
    assert decision.actions == ()
    assert {each.part: each.state for each in decision.findings} == {
        "temperature": State.HEALTHY,
        "limit": State.HEALTHY,
        "throttling": State.UNSUPPORTED,
        "sensors": State.HEALTHY,
    }


def test_heat_lowers_the_batch_limit_at_once_then_the_duty_cycle() -> None:
    first = decide(reading(86.0), ThermalMemory(), 100.0, SETTINGS)
    assert [(each.repair, dict(each.arguments)) for each in first.actions] == [(Repair.LIMIT_BATCH, {"sequences": 7})]
    assert finding(first, "temperature").state is State.DEGRADED
    second = decide(reading(86.0, limited(1)), first.memory, 102.0, SETTINGS)
    assert [(each.repair, dict(each.arguments)) for each in second.actions] == [
        (Repair.LIMIT_DUTY, {"duty_percent": 90.0})
    ]
    assert finding(second, "limit").reason == "batch limit 7 of 8, duty cycle 90 %"


def test_gentle_actions_cost_no_budget() -> None:
    actions = decide(reading(86.0), ThermalMemory(), 100.0, SETTINGS).actions
    assert [each.budget for each in actions] == [""]


def test_a_stage_that_was_restarted_gets_its_limits_again() -> None:
    memory = ThermalMemory(Latch(5, 100.0, 81.0), max_sequences=8)
    decision = decide(reading(75.0), memory, 104.0, SETTINGS)
    assert [dict(each.arguments) for each in decision.actions] == [
        {"sequences": RUNGS[5].sequences},
        {"duty_percent": RUNGS[5].duty_percent},
    ]
    assert decide(reading(75.0, limited(5)), decision.memory, 106.0, SETTINGS).actions == ()


def test_a_guard_without_memory_takes_the_limits_over_that_it_finds() -> None:
    decision = decide(reading(75.0, limited(5)), ThermalMemory(), 100.0, SETTINGS)
    assert decision.memory.latch.level == 5
    assert decision.actions == ()
    between = replace(STAGE, batch_limit_sequences=2, duty_limit_percent=100.0)
    decision = decide(reading(75.0, between), ThermalMemory(), 100.0, SETTINGS)
    assert RUNGS[decision.memory.latch.level].sequences == 2


def test_a_stage_that_knows_no_duty_cycle_is_not_ordered_one() -> None:
    stage = replace(STAGE, duty_limit_percent=None)
    decision = decide(reading(86.0, stage), ThermalMemory(Latch(9), max_sequences=8), 100.0, SETTINGS)
    assert [each.repair for each in decision.actions] == [Repair.LIMIT_BATCH]


def test_a_stage_that_does_not_answer_is_ordered_nothing() -> None:
    memory = ThermalMemory(Latch(5), max_sequences=8)
    decision = decide(reading(86.0, None), memory, 100.0, SETTINGS)
    assert decision.actions == ()
    assert decision.memory.latch.level == 6
    unknown = decide(reading(86.0, None), ThermalMemory(), 100.0, SETTINGS)
    assert finding(unknown, "limit").state is State.UNSUPPORTED
    assert finding(unknown, "temperature").state is State.DEGRADED


def test_the_least_limits_that_do_not_help_call_for_a_person() -> None:
    memory = ThermalMemory(Latch(len(RUNGS) - 1), max_sequences=8)
    limit = finding(decide(reading(88.0), memory, 100.0, SETTINGS), "limit")
    assert (limit.state, limit.repair) == (State.UNHEALTHY, Repair.CHECK_COOLING)


def test_a_critical_temperature_is_unhealthy() -> None:
    found = finding(decide(reading(95.0), ThermalMemory(), 0.0, SETTINGS), "temperature")
    assert (found.state, found.repair) == (State.UNHEALTHY, Repair.CHECK_COOLING)


def test_an_unknown_temperature_holds_and_is_told_after_a_while() -> None:
    memory = decide(reading(65.0, limited(3)), ThermalMemory(Latch(3, 0.0), max_sequences=8), 10.0, SETTINGS).memory
    soon = decide(reading(None, limited(3)), memory, 12.0, SETTINGS)
    assert finding(soon, "temperature").state is State.INITIALISING
    late = decide(reading(None, limited(3)), soon.memory, 10_000.0, SETTINGS)
    assert late.memory.latch.level == 3
    assert late.actions == ()
    found = finding(late, "temperature")
    assert (found.state, found.repair) == (State.DEGRADED, Repair.CHECK_SENSOR)
    assert found.evidence["celsius"] is None
    assert finding(late, "sensors").state is State.DEGRADED


def test_a_box_that_never_had_a_sensor_is_unsupported() -> None:
    bare = ThermalReading((), (), (), STAGE)
    first = decide(bare, ThermalMemory(), 100.0, SETTINGS)
    assert finding(first, "temperature").state is State.INITIALISING
    later = decide(bare, first.memory, 100.0 + SETTINGS.unknown_seconds, SETTINGS)
    assert finding(later, "temperature").state is State.UNSUPPORTED
    assert finding(later, "sensors").state is State.UNSUPPORTED


def test_one_silent_zone_among_good_ones_is_told_and_harms_nothing() -> None:
    silent = Zone("thermal_zone2/cv0-thermal", Kind.ACCELERATOR, None, "EAGAIN")
    seen = replace(reading(60.0), zones=(*reading(60.0).zones, silent))
    found = finding(decide(seen, ThermalMemory(), 0.0, SETTINGS), "sensors")
    assert (found.state, found.reason) == (State.HEALTHY, "thermal_zone2/cv0-thermal: EAGAIN")


@pytest.mark.parametrize(("celsius", "state"), [(105.0, State.HEALTHY), (115.0, State.UNHEALTHY)])
def test_a_power_chip_is_judged_by_its_own_limit_and_moves_no_latch(celsius: float, state: State) -> None:
    power = Zone("thermal_zone4/pmic", Kind.PMIC, celsius)
    seen = replace(reading(60.0), zones=(*reading(60.0).zones, power))
    decision = decide(seen, ThermalMemory(), 0.0, SETTINGS)
    assert finding(decision, "pmic/thermal_zone4/pmic").state is state
    assert decision.actions == ()


def test_another_model_has_another_ladder() -> None:
    memory = ThermalMemory(Latch(15), max_sequences=32)
    decision = decide(reading(75.0, StageReading(1, 1, 100.0, None, 0)), memory, 100.0, SETTINGS)
    rungs = ladder(1, SETTINGS.least_duty_percent, SETTINGS.step_percent)
    assert decision.memory.latch.level == len(rungs) - 1
    assert decision.actions == (
        Action(Repair.LIMIT_DUTY, "stage", "75.0 °C: duty cycle 100 → 25 %", {"duty_percent": 25.0}),
    )


@given(
    st.builds(Latch, st.integers(0, 30), st.none() | st.floats(0, 1e9), st.none() | st.floats(-40, 130)),
    st.none() | st.integers(1, 512),
)
def test_latch_and_dwell_outlive_a_reboot(latch: Latch, most: int | None) -> None:
    restored = memory_from_json(memory_to_json(ThermalMemory(latch, max_sequences=most, first_seconds=1.0)))
    assert restored.max_sequences == most
    assert (restored.latch.level, restored.latch.switched_seconds) == (latch.level, latch.switched_seconds)
    assert restored.latch.switched_celsius == latch.switched_celsius


@pytest.mark.parametrize(
    "change",
    [
        {"level": -1},
        {"level": "x"},
        {"max_sequences": 0},
        {"switched_seconds": float("nan")},
        {"cool_megahertz": {"a": []}},
    ],
)
def test_what_it_did_not_write_is_refused(change: dict[str, object]) -> None:
    with pytest.raises((ValueError, TypeError)):
        memory_from_json({**memory_to_json(ThermalMemory()), **change})
    with pytest.raises(KeyError):
        memory_from_json({})


@given(
    st.lists(st.tuples(st.none() | st.floats(-39, 129), st.booleans(), st.integers(0, 3)), max_size=60),
)
def test_orders_always_lead_to_the_latchs_level(rounds: list[tuple[float | None, bool, int]]) -> None:
    """A stage that obeys, restarts at times and does not answer at others."""
    memory, stage = ThermalMemory(), STAGE
    for index, (celsius, throttled, event) in enumerate(rounds):
        if event == 0:
            stage = STAGE
        decision = decide(
            reading(celsius, None if event == 1 else stage, (Throttle("raspberry-pi", throttled),)),
            memory,
            index * SETTINGS.period_seconds,
            SETTINGS,
        )
        memory = decision.memory
        for action in decision.actions:
            assert event != 1
            if action.repair is Repair.LIMIT_BATCH:
                stage = replace(stage, batch_limit_sequences=int(action.arguments["sequences"] or 0))
            else:
                stage = replace(stage, duty_limit_percent=float(action.arguments["duty_percent"] or 0))
        if event != 1:
            assert stage == replace(limited(memory.latch.level))
        assert len({each.part for each in decision.findings}) == len(decision.findings)


def test_what_a_drill_has_limited_does_not_outlive_it_where_no_sensor_says_that_it_is_cool() -> None:
    hot = ThermalReading((Zone("drill/thermal_zone0/cpu-thermal", Kind.CPU, 86.0),), (), (), STAGE)
    during = decide(hot, ThermalMemory(), 100.0, SETTINGS)
    assert during.memory.latch.level == 1
    kept = memory_from_json(memory_to_json(during.memory))  # a reboot in the middle of it
    after = decide(ThermalReading((), (), (), limited(1)), kept, 102.0, SETTINGS)
    assert after.memory.latch.level == 0
    assert finding(after, "limit").state is State.HEALTHY
    assert [action.arguments for action in after.actions] == [{"sequences": 8}]
    sensed = decide(reading(75.0, limited(1)), kept, 102.0, SETTINGS)
    assert sensed.memory.latch.level == 1, "a sensor of its own says when to step up"
