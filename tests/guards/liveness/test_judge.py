"""Who is restarted, killed, started, and who is left alone."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from guards.budgets import Ledger
from guards.findings import Action, Finding, Repair, State
from guards.liveness.guard import budgets
from guards.liveness.judge import judge_program
from guards.liveness.looks import Look
from guards.liveness.memory import LivenessMemory, ProgramMemory, from_json, to_json
from guards.settings import DAY_SECONDS, LivenessSettings

SETTINGS = LivenessSettings()
PERIOD = SETTINGS.period_seconds
OLD = 3600.0
READY: Mapping[str, Any] = {"state": "ready", "open_sequences": 0, "working_seconds": 0.0, "progress": 7}
SILENT: Mapping[str, Any] = {"error": "stage.sock: timed out"}


class Story:
    """Looks at one program, one after the other."""

    def __init__(self, settings: LivenessSettings = SETTINGS, now: float = 10_000.0) -> None:
        self.settings, self.now = settings, now
        self.memory = ProgramMemory()
        self.finding = Finding("none", State.INITIALISING)
        self.actions: list[Action] = []

    def see(self, look: Look, rounds: int = 1, apart: float = PERIOD) -> Action | None:
        action = None
        for _ in range(rounds):
            self.finding, action, self.memory = judge_program("stage", look, self.memory, self.settings, self.now)
            if action is not None:
                self.actions.append(action)
            self.now += apart
        return action


def running(
    answer: Mapping[str, Any] | None = None, pid: int = 100, age: float | None = OLD, kernel: str = "S"
) -> Look:
    return Look("RUNNING", pid, pid, "", kernel, age, READY if answer is None else answer)


def down(state: str, why: str = "") -> Look:
    return Look(state, 0, 0, why)


def test_a_program_that_answers_is_left_alone() -> None:
    story = Story()
    story.see(running(), 100)
    assert story.finding.state is State.HEALTHY and story.actions == []


def test_silent_three_times_is_hung() -> None:
    story = Story()
    assert story.see(running(SILENT), 2) is None
    assert story.finding.state is State.DEGRADED
    action = story.see(running(SILENT))
    assert action is not None
    assert (action.repair, action.target, action.budget) == (Repair.RESTART_PROGRAM, "stage", "restart-stage")
    assert action.arguments["needs_lease"] is False
    assert story.finding.state is State.UNHEALTHY and "timed out" in story.finding.reason


def test_one_answer_in_between_begins_the_count_anew() -> None:
    story = Story()
    for _ in range(20):
        story.see(running(SILENT), 2)
        story.see(running())
    assert story.actions == []


@pytest.mark.parametrize("age", [0.0, SETTINGS.grace_seconds - 1, None])
def test_a_young_program_may_be_silent(age: float | None) -> None:
    story = Story()
    story.see(running(SILENT, age=age), 50)
    assert story.finding.state is State.INITIALISING and story.actions == []


def test_loading_is_left_alone_until_it_never_ends() -> None:
    loading = {"state": "loading", "reason": "layers are being loaded", "working_seconds": 300.0, "open_sequences": 0}
    story = Story()
    story.see(running(loading, age=SETTINGS.loading_seconds - 1), 50)
    assert story.finding.state is State.INITIALISING and story.actions == []
    action = story.see(running(loading, age=SETTINGS.loading_seconds))
    assert action is not None and action.repair is Repair.RESTART_PROGRAM


def test_stopped_by_a_signal_is_killed_even_when_young() -> None:
    story = Story()
    assert story.see(running(SILENT, age=1.0, kernel="T")) is None
    action = story.see(running(SILENT, age=3.0, kernel="T"))
    assert action is not None
    assert (action.repair, action.budget) == (Repair.KILL_PROGRAM, "restart-stage")
    assert (action.arguments["pid"], action.arguments["needs_lease"]) == (100, False)


def test_a_debugger_is_no_stop_and_a_moment_neither() -> None:
    story = Story()
    story.see(running(kernel="t"), 10)
    for _ in range(10):
        story.see(running(kernel="T"))
        story.see(running())
    assert story.actions == []


@pytest.mark.parametrize(("answer", "lease"), [(SILENT, False), (None, True)])
def test_long_in_the_kernel(answer: Mapping[str, Any] | None, lease: bool) -> None:
    settings = LivenessSettings(silent_rounds=1e9)
    story = Story(settings)
    blocked = Look("RUNNING", 100, 100, "", "D", OLD, answer)
    story.see(blocked, 30)
    assert story.actions == []
    action = story.see(blocked)
    assert action is not None and action.repair is Repair.KILL_PROGRAM
    assert action.arguments["needs_lease"] is lease
    busy = Story()
    busy.see(running(kernel="D"), 100)  # it answers: a busy disk
    assert busy.actions == []


def working(progress: int | None, seconds: float, sequences: int = 1) -> Look:
    answer = {"state": "ready", "open_sequences": sequences, "working_seconds": seconds}
    return running(answer if progress is None else answer | {"progress": progress})


@pytest.mark.parametrize("progress", [7, None])
def test_work_without_progress_is_hung(progress: int | None) -> None:
    story = Story()
    seconds = 0.0
    while not story.actions and seconds < 100:
        seconds += PERIOD
        story.see(working(progress, seconds))
    assert story.actions[0].repair is Repair.RESTART_PROGRAM
    assert story.actions[0].arguments["needs_lease"] is False
    assert SETTINGS.hung_seconds <= seconds <= SETTINGS.hung_seconds + 2 * PERIOD


def test_busy_with_progress_is_well() -> None:
    story = Story()
    for step in range(200):
        story.see(working(step, 30.0))  # long calls one after the other, each finished
    assert story.finding.state is State.HEALTHY and story.actions == []
    for _ in range(200):
        story.see(working(None, 0.5))  # an older stage tells no progress, but its calls are short
    assert story.finding.state is State.HEALTHY and story.actions == []


def test_waiting_for_the_ring_is_told_but_not_restarted() -> None:
    story = Story()
    story.see(working(7, 0.0), 100)
    assert story.finding.state is State.DEGRADED and "nothing to compute" in story.finding.reason
    assert story.actions == []


def test_failed_is_told() -> None:
    story = Story()
    story.see(running({"state": "failed", "reason": "shard layer-003 is damaged"}), 10)
    assert story.finding.state is State.UNHEALTHY and "damaged" in story.finding.reason
    assert story.finding.repair is Repair.CHECK_PROGRAM and story.actions == []


def test_fatal_is_started_slowly_and_not_for_ever() -> None:
    story = Story()
    rounds = int(2 * DAY_SECONDS / 300)
    times = []
    for _ in range(rounds):
        before = story.now
        if story.see(down("FATAL", "can't find command"), apart=300.0) is not None:
            times.append(before)
    assert story.actions[0].repair is Repair.START_PROGRAM and story.actions[0].budget == "start-stage"
    assert story.actions[0].arguments["needs_lease"] is False
    assert min(b - a for a, b in itertools.pairwise(times)) >= SETTINGS.fatal_restart_apart_seconds
    for first in times:
        assert sum(first <= each < first + DAY_SECONDS for each in times) <= SETTINGS.fatal_restarts_per_day
    assert len(times) == 2 * SETTINGS.fatal_restarts_per_day


def test_when_starts_are_spent_a_person_is_called() -> None:
    story = Story()
    story.see(down("FATAL"), int(DAY_SECONDS * 0.9 / 300), apart=300.0)
    assert story.finding.state is State.UNHEALTHY and story.finding.repair is Repair.CHECK_PROGRAM
    assert "a person is needed" in story.finding.reason


def test_exited_is_started_and_stopped_by_somebody_is_not() -> None:
    story = Story()
    assert story.see(down("EXITED")) is None  # supervisord may be about to start it
    assert story.see(down("EXITED")) is not None
    stopped = Story()
    stopped.see(running())
    stopped.see(down("STOPPED"), int(SETTINGS.stopped_start_seconds / PERIOD))
    assert stopped.finding.state is State.DEGRADED and stopped.actions == []
    action = stopped.see(down("STOPPED"))
    assert action is not None and action.repair is Repair.START_PROGRAM
    never = Story(LivenessSettings(stopped_start_seconds=0.0))
    never.see(down("STOPPED"), 5000)
    assert never.actions == []


def test_a_restart_that_broke_half_way_is_mended() -> None:
    story = Story()
    story.see(running(SILENT), 3)
    assert story.see(down("STOPPING")) is None
    assert story.see(down("STOPPED")) is None
    action = story.see(down("STOPPED"))
    assert action is not None and (action.repair, action.budget) == (Repair.START_PROGRAM, "")
    # guards were restarted in between: the same
    again = Story()
    again.memory = from_json(to_json(LivenessMemory({"stage": story.memory}))).programs["stage"]
    again.now = story.now + SETTINGS.restart_apart_seconds
    again.see(down("STOPPED"), 2)
    assert len(again.actions) == 1


@pytest.mark.parametrize("state", ["STARTING", "BACKOFF", "STOPPING", "SOMETHING"])
def test_what_supervisord_works_on_is_left_to_it(state: str) -> None:
    story = Story()
    story.see(down(state, "exited too quickly"), int(SETTINGS.grace_seconds / PERIOD))
    assert story.finding.state in (State.INITIALISING, State.DEGRADED)
    story.see(down(state, "exited too quickly"))
    assert story.finding.state is State.UNHEALTHY and story.finding.repair is Repair.CHECK_PROGRAM
    assert "exited too quickly" in story.finding.reason and story.actions == []


def test_a_program_that_ends_at_once_over_and_over_is_told() -> None:
    story = Story()
    for pid in range(100, 120):
        story.see(Look("STARTING", pid, pid, "", "S", 1.0))
        story.see(down("BACKOFF", "Exited too quickly"))
    assert story.finding.state is State.DEGRADED
    story.see(down("BACKOFF", "Exited too quickly"), int(SETTINGS.grace_seconds / PERIOD))
    assert story.finding.state is State.UNHEALTHY and story.actions == []


def test_restarts_are_counted_and_given_up() -> None:
    settings = LivenessSettings(restarts_per_day=4)
    story = Story(settings)
    for pid in range(100, 110):
        story.see(running(SILENT, pid=pid), 5, apart=SETTINGS.restart_apart_seconds)
    assert len({action.arguments["pid"] for action in story.actions}) == 4
    assert story.finding.state is State.UNHEALTHY and "a person is needed" in story.finding.reason
    story.see(running(pid=109))
    assert story.finding.state is State.DEGRADED and "restarted 9 times" in story.finding.reason
    story.see(running(pid=109), apart=DAY_SECONDS)
    story.see(running(pid=109))
    assert story.finding.state is State.HEALTHY


def test_one_restart_is_given_time_to_help() -> None:
    story = Story()
    story.see(running(SILENT), 3)
    story.see(running(SILENT, pid=101, kernel="T"), int(SETTINGS.restart_apart_seconds / PERIOD))
    assert [action.repair for action in story.actions] == [Repair.RESTART_PROGRAM]
    assert "again in" in story.finding.reason
    assert story.see(running(SILENT, pid=101, kernel="T")) is not None


ANSWERS = st.sampled_from(
    [READY, SILENT, {"state": "loading"}, {"state": "ready", "working_seconds": 99.0, "open_sequences": 2}]
)
LOOKS = st.one_of(
    st.builds(running, ANSWERS, st.integers(1, 3), st.sampled_from([None, 1.0, OLD]), st.sampled_from("SRDTt")),
    st.builds(down, st.sampled_from(["FATAL", "EXITED", "STOPPED", "STARTING", "BACKOFF", "UNKNOWN"])),
)


@given(st.lists(st.tuples(LOOKS, st.sampled_from([2.0, 60.0, 3600.0]), st.booleans()), max_size=60))
def test_whatever_happens(steps: list[tuple[Look, float, bool]]) -> None:
    """No action on who answers and makes progress, or is young and not stopped; no budget overdrawn over crashes of the
    guards at any moment."""
    story, ledger = Story(), Ledger({})
    pays = budgets(SETTINGS, ["stage"])
    spent: dict[str, list[float]] = {name: [] for name in pays}
    for look, apart, crash in steps:
        now = story.now
        action = story.see(look, apart=apart)
        if crash:
            story.memory = from_json(to_json(LivenessMemory({"stage": story.memory}))).programs["stage"]
            ledger = Ledger.from_json(ledger.to_json())
        if action is None:
            continue
        if action.repair is not Repair.KILL_PROGRAM and look.state == "RUNNING":
            assert look.age_seconds == OLD and look.answer is not READY
        if look.answer is READY and look.kernel_state != "T":
            raise AssertionError("it was well")
        if action.budget and ledger.next_seconds(action.budget, pays[action.budget], now) <= 0:
            ledger = ledger.charged(action.budget, pays[action.budget], now)
            spent[action.budget].append(now)
    for name, times in spent.items():
        assert all(b - a >= pays[name].apart_seconds for a, b in itertools.pairwise(times))
        for first in times:
            assert sum(first <= each < first + pays[name].window_seconds for each in times) <= pays[name].most
