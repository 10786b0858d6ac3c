from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from guards.findings import Action, Decision, Finding, Repair, State
from guards.guard import ActionFailed
from guards.memory.guard import (
    LEAK_RESTART,
    ROLLING_RESTART,
    Declared,
    MemoryGuard,
    MemoryOfMemory,
    MemoryReading,
    budgets,
)
from guards.memory.headroom import Headroom, Room
from guards.memory.process import ProcessMemory
from guards.roots import Roots
from guards.settings import DAY_SECONDS, HOUR_SECONDS, MemorySettings
from tests.guards.memory.trees import lay_out

SETTINGS = MemorySettings()
HEALTH = {"kv_bytes": 64_000_000, "weight_bytes": 300_000_000, "open_sequences": 2, "rss_bytes": 1}
ROOMY = Headroom(8_000_000, Room("", 16_000_000, 8_000_000), 0.0, 0.0)
FULL = Headroom(800_000, Room("", 16_000_000, 800_000), 0.0, 0.0)


@dataclass
class Stage:
    """A stage that does what it is told, and remembers it."""

    process: int | None = None
    document: Mapping[str, Any] | None = field(default_factory=lambda: dict(HEALTH))
    told: list[object] = field(default_factory=list)

    def pid(self) -> int | None:
        return self.process

    def health(self) -> Mapping[str, Any] | None:
        return self.document

    def trim(self) -> int:
        self.told.append("trim")
        return 12_345_678

    def shed_sequences(self, shedding: bool) -> None:
        self.told.append(shedding)


@pytest.fixture
def stage() -> Stage:
    return Stage()


@pytest.fixture
def guard(stage: Stage, tmp_path: Path) -> MemoryGuard:
    return MemoryGuard(SETTINGS, lay_out("v2-limited", tmp_path), stage)


def reading(
    retained: float = 500e6,
    identity: str = "boot/7/1",
    headroom: Headroom = ROOMY,
    **declared: Any,
) -> MemoryReading:
    given_ = {"kv_bytes": 0, "weight_bytes": 100_000_000, "open_sequences": 1, "shedding": False, **declared}
    return MemoryReading(headroom, (), ProcessMemory(identity, int(retained)), Declared(**given_))


def part(decision: Decision[MemoryOfMemory], name: str) -> Finding:
    return next(finding for finding in decision.findings if finding.part == name)


def leaking(guard: MemoryGuard, hours: float, mb_per_hour: float = 40.0) -> tuple[MemoryOfMemory, list[Action], float]:
    """After two quiet hours and some with a leak: what is remembered, what was asked for, and the time."""
    memory, asked, now = guard.first_memory(), [], 0.0
    while now < (2.0 + hours) * HOUR_SECONDS:
        leaked = max(0.0, now / HOUR_SECONDS - 2.0) * mb_per_hour * 1e6
        decision = guard.decide(reading(500e6 + leaked), memory, now)
        memory = decision.memory
        asked += decision.actions
        now += 30.0
    return memory, asked, now


def test_a_stage_that_is_seen_whole(stage: Stage) -> None:
    stage.process = os.getpid()
    seen = MemoryGuard(SETTINGS, Roots(), stage).sense()
    assert seen.process is not None
    assert seen.process.retained_bytes > 1_000_000
    assert seen.declared == Declared(64_000_000, 300_000_000, 2)
    assert seen.headroom.available_bytes is not None


def test_no_stage(guard: MemoryGuard) -> None:
    seen = guard.sense()
    assert (seen.process, seen.declared, seen.stage_reason) == (None, None, "the stage does not run")
    finding = part(guard.decide(seen, guard.first_memory(), 0.0), "stage")
    assert finding.state == State.INITIALISING
    assert finding.evidence["retained_bytes"] is None


def test_a_stage_that_is_gone_meanwhile(guard: MemoryGuard, stage: Stage) -> None:
    stage.process = 4242
    assert guard.sense().stage_reason == "no process 4242"


@pytest.mark.parametrize(
    "document",
    [
        None,
        {},
        {**HEALTH, "kv_bytes": None},
        {**HEALTH, "kv_bytes": -1},
        {**HEALTH, "weight_bytes": "many"},
        {**HEALTH, "open_sequences": True},
        {**HEALTH, "kv_bytes": 1.5},
    ],
)
def test_a_stage_that_does_not_say_what_it_holds(stage: Stage, document: Mapping[str, Any] | None) -> None:
    stage.process, stage.document = os.getpid(), document
    guard = MemoryGuard(SETTINGS, Roots(), stage)
    seen = guard.sense()
    assert seen.declared is None
    decision = guard.decide(seen, guard.first_memory(), 0.0)
    assert part(decision, "stage").reason == "the stage does not say what it holds"
    assert decision.actions == ()


def test_caches_count_by_what_of_them_is_touched_where_the_stage_tells() -> None:
    assert Declared.of({**HEALTH, "kv_used_bytes": 40_000_000, "shedding": True}) == Declared(
        40_000_000, 300_000_000, 2, True
    )


def test_a_leak_is_restarted_from_its_budget_and_asked_for_again(guard: MemoryGuard) -> None:
    memory, asked, now = leaking(guard, 2.0)
    restarts = [action for action in asked if action.repair == Repair.RESTART_PROGRAM]
    assert restarts[0].target == "stage"
    assert restarts[0].because.startswith("leaks ")
    assert {action.budget for action in restarts} == {LEAK_RESTART}
    assert 2 <= len(restarts) <= 2.0 * HOUR_SECONDS / SETTINGS.ask_again_seconds
    finding = part(guard.decide(reading(600e6), memory, now), "stage")
    assert (finding.state, finding.repair) == (State.UNHEALTHY, Repair.RESTART_PROGRAM)
    assert finding.reason.endswith("the bound is 10 MB/h")
    slope = finding.evidence["slope_mb_per_hour"]
    assert isinstance(slope, float)
    assert slope == pytest.approx(40.0, abs=4.0)


def test_another_process_begins_anew(guard: MemoryGuard) -> None:
    memory, _, now = leaking(guard, 2.0)
    decision = guard.decide(reading(600e6, identity="boot/8/2"), memory, now)
    assert part(decision, "stage").state == State.INITIALISING
    assert [action.repair for action in decision.actions] == []
    assert decision.memory.since_seconds == now


def test_a_stage_without_a_leak_is_healthy_and_its_resolution_is_told(guard: MemoryGuard) -> None:
    memory, asked, now = leaking(guard, 4.0, mb_per_hour=0.0)
    finding = part(guard.decide(reading(500e6), memory, now), "stage")
    assert finding.state == State.HEALTHY
    assert "can't see below" in finding.reason
    assert isinstance(finding.evidence["resolution_mb_per_day"], float)
    assert asked == []


def test_silence_for_a_while_does_not_forget_what_was_seen(guard: MemoryGuard) -> None:
    memory, _, now = leaking(guard, 0.2)
    silent = MemoryReading(ROOMY, stage_reason="the stage does not run")
    assert guard.decide(silent, memory, now).memory == memory


def test_an_idle_stage_is_trimmed_now_and_then(guard: MemoryGuard) -> None:
    memory, times = guard.first_memory(), []
    for now in range(0, 3600, 10):
        idle = not 1200 <= now < 2400
        decision = guard.decide(reading(open_sequences=0 if idle else 3), memory, float(now))
        memory = decision.memory
        times += [now for action in decision.actions if action.repair == Repair.TRIM_MEMORY]
    assert times == [0, 600, 2400, 3000]


def test_a_stage_without_layers_is_not_trimmed(guard: MemoryGuard) -> None:
    decision = guard.decide(reading(open_sequences=0, weight_bytes=0), guard.first_memory(), 0.0)
    assert decision.actions == ()


def test_a_full_box_sheds_and_takes_sequences_again(guard: MemoryGuard) -> None:
    told, memory = [], guard.first_memory()
    for now, room in enumerate((ROOMY, FULL, FULL, ROOMY, ROOMY)):
        said = memory.shedding
        decision = guard.decide(reading(headroom=room, shedding=said), memory, 10.0 * now)
        memory = decision.memory
        told += [(now, action.arguments["shedding"]) for action in decision.actions]
    assert told == [(1, True), (3, False)]


def test_a_stage_that_does_not_listen_is_told_again_but_not_every_round(guard: MemoryGuard) -> None:
    times, memory = [], guard.first_memory()
    for now in range(0, 1000, 10):
        decision = guard.decide(reading(headroom=FULL), memory, float(now))
        memory = decision.memory
        times += [now for action in decision.actions if action.repair == Repair.SHED_SEQUENCES]
    assert times == [0, 300, 600, 900]


@pytest.mark.parametrize("says", [True, None])
def test_a_stage_that_starts_while_memory_is_short_is_told_once(guard: MemoryGuard, says: bool | None) -> None:
    gone = MemoryReading(FULL, stage_reason="the stage does not run")
    memory = guard.decide(gone, guard.first_memory(), 0.0).memory
    first = guard.decide(reading(headroom=FULL, shedding=None if says is None else False), memory, 10.0)
    second = guard.decide(reading(headroom=FULL, shedding=says), first.memory, 20.0)
    assert [action.arguments for action in first.actions] == [{"shedding": True}]
    assert second.actions == ()


def test_rolling_restarts_come_only_where_they_are_wanted(stage: Stage) -> None:
    rolling = MemoryGuard(replace(SETTINGS, rolling_restart_hours=24.0), Roots(), stage)
    never = MemoryGuard(SETTINGS, Roots(), stage)
    for guard, expected in ((rolling, [ROLLING_RESTART]), (never, [])):
        memory = guard.decide(reading(), guard.first_memory(), 0.0).memory
        kept = guard.memory_from_json(json.loads(json.dumps(guard.memory_to_json(memory))))
        assert guard.decide(reading(), kept, DAY_SECONDS - 1.0).actions == ()
        assert [action.budget for action in guard.decide(reading(), kept, DAY_SECONDS).actions] == expected


def test_budgets_are_those_of_the_settings() -> None:
    with_rolling = budgets(replace(SETTINGS, rolling_restart_hours=8.0))
    assert with_rolling[LEAK_RESTART].most == 4
    assert with_rolling[LEAK_RESTART].apart_seconds == HOUR_SECONDS
    assert with_rolling[ROLLING_RESTART].most == 3
    assert budgets(SETTINGS)[ROLLING_RESTART].most == 0


def test_what_is_done(guard: MemoryGuard, stage: Stage) -> None:
    assert guard.act(Action(Repair.TRIM_MEMORY, "stage", "idle")) == "the stage gave back 12.3 MB"
    assert guard.act(Action(Repair.SHED_SEQUENCES, "stage", "", {"shedding": True})) == "new sequences wait"
    assert guard.act(Action(Repair.SHED_SEQUENCES, "stage", "", {"shedding": False})) == "new sequences are taken again"
    assert stage.told == ["trim", True, False]
    with pytest.raises(ActionFailed):
        guard.act(Action(Repair.CORRECT_CLOCK, "clock", ""))


def test_what_outlives_a_reboot(guard: MemoryGuard) -> None:
    memory = MemoryOfMemory("boot/7/1", 99.0, shedding=True, asked_seconds=5.0)
    kept = guard.memory_from_json(json.loads(json.dumps(guard.memory_to_json(memory))))
    assert kept == MemoryOfMemory("boot/7/1", 99.0, shedding=True)


@pytest.mark.parametrize(
    "data", [{}, {"identity": "", "since_seconds": "x", "shedding": False}, {"since_seconds": float("inf")}]
)
def test_a_memory_that_is_none_is_refused(guard: MemoryGuard, data: Mapping[str, Any]) -> None:
    with pytest.raises((KeyError, ValueError, TypeError)):
        guard.memory_from_json(data)


LOOKS = st.tuples(
    st.sampled_from([ROOMY, FULL, Headroom(reasons=("unreadable",))]),
    st.integers(0, 10**10),
    st.sampled_from(["a", "b"]),
    st.integers(0, 2),
    st.sampled_from([None, True, False]),
    st.floats(0.0, 1000.0),
)


@settings(max_examples=50, deadline=None)
@given(st.lists(LOOKS, max_size=40))
def test_whatever_is_seen_nothing_is_asked_too_often(looks: list[tuple[Any, ...]]) -> None:
    guard = MemoryGuard(SETTINGS, Roots(), Stage())
    memory, now, last_trim = guard.first_memory(), 0.0, float("-inf")
    for headroom, retained, identity, open_, shedding, pause in looks:
        now += pause
        look = reading(retained, identity, headroom, open_sequences=open_, shedding=shedding)
        decision = guard.decide(look, memory, now)
        assert decision == guard.decide(look, memory, now)
        memory = decision.memory
        assert len(decision.findings) == 2
        assert len(decision.actions) <= 3
        if any(action.repair == Repair.TRIM_MEMORY for action in decision.actions):
            assert now - last_trim >= SETTINGS.trim_period_seconds
            last_trim = now
