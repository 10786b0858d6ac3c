"""A guard that crashes or hangs costs no other one anything; it is begun anew and counted."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest

from guards.board import Board
from guards.budgets import Budget
from guards.findings import Action, Decision, Finding, Repair, State
from guards.guard import ActionFailed, Guard
from guards.keeper import Keeper
from guards.metrics import BoardCollector, render
from guards.performer import Performer
from guards.post import CRASHES_UNTIL_FORGOTTEN, MOST_HUNG_THREADS, OWN_PART, Post
from guards.runner import Runner

WAIT_SECONDS = 20.0


@dataclass
class Counting:
    """A guard that counts its rounds; `trouble` runs inside `sense`."""

    name: str = "counting"
    period_seconds: float = 0.01
    deadline_seconds: float = 0.2
    trouble: Callable[[], None] = lambda: None
    actions: tuple[Action, ...] = ()
    acted: list[str] = field(default_factory=list)

    def sense(self) -> int:
        self.trouble()
        return 1

    def decide(self, reading: int, memory: int, now_seconds: float) -> Decision[int]:
        state = State.HEALTHY if now_seconds >= 0 else State.UNHEALTHY
        return Decision((Finding("rounds", state, "", {"rounds_number": memory}),), self.actions, memory + reading)

    def act(self, action: Action) -> str:
        self.acted.append(action.target)
        if action.target == "broken":
            raise ActionFailed("it is stuck")
        if action.target == "mistaken":
            raise ZeroDivisionError("a mistake")
        return "did it"

    def first_memory(self) -> int:
        return 0

    def memory_to_json(self, memory: int) -> Mapping[str, Any]:
        return {"rounds": memory}

    def memory_from_json(self, data: Mapping[str, Any]) -> int:
        return int(data["rounds"])


class NoPrograms:
    """For guards that restart nothing."""

    def __init__(self) -> None:
        self.begun: list[tuple[str, Action]] = []

    def begin(self, guard: str, action: Action) -> None:
        self.begun.append((guard, action))


@dataclass
class House:
    """Posts of some guards with all that they need."""

    guards: tuple[Guard[Any, Any], ...]
    observe: bool = False

    def __post_init__(self) -> None:
        self.keeper = Keeper(None, {"few": Budget(2, 3600.0)})
        self.board = Board([guard.name for guard in self.guards], self.keeper.clock.now_seconds)
        self.programs = NoPrograms()
        self.performer = Performer(self.keeper, self.board, None if self.observe else self.programs)
        self.posts = [Post(guard, self.keeper, self.board, self.performer.perform) for guard in self.guards]

    def rounds(self, name: str) -> int:
        return self.board.standings()[name].rounds

    def texts(self, kind: str) -> list[str]:
        return [event.text for event in self.board.events() if event.kind == kind]


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + WAIT_SECONDS
    while not condition():
        assert time.monotonic() < end, "not in time"
        time.sleep(0.01)


def threads_of(guard: str) -> int:
    """How many threads of a guard live; earlier tests may have left others."""
    return sum(thread.name == f"guard-{guard}" for thread in threading.enumerate())


@pytest.fixture
def ends() -> Iterator[list[Callable[[], object]]]:
    """What is called after the test, so that no thread goes on."""
    calls: list[Callable[[], object]] = []
    yield calls
    for call in calls:
        call()


def test_a_hanging_guard_gets_another_thread_and_the_others_go_on(ends: list[Callable[[], object]]) -> None:
    gate, calls = threading.Event(), []

    def hang_once() -> None:
        calls.append(1)
        if len(calls) == 1:
            gate.wait()

    ends.append(gate.set)
    stuck, fine = Counting("stuck", trouble=hang_once), Counting("fine")
    house = House((stuck, fine))
    for post in house.posts:
        ends.append(post.stop)
        post.start()
    until(lambda: house.rounds("fine") > 3)
    assert house.rounds("stuck") == 0
    time.sleep(stuck.deadline_seconds)
    house.posts[0].watch()
    (hang,) = [event for event in house.board.events() if event.kind == "hang"]
    assert hang.text == "a round did not end within 0.2 s"
    until(lambda: house.rounds("stuck") > 3)
    rounds = house.keeper.memory("stuck")
    gate.set()  # the thread that was given up comes back, and finds that its round is nobody's
    until(lambda: threads_of("stuck") == 1)
    assert rounds is not None
    assert house.board.standings()["stuck"].findings[0].part == "rounds"


def test_threads_that_hang_do_not_pile_up(ends: list[Callable[[], object]]) -> None:
    gate = threading.Event()
    ends.append(gate.set)
    house = House((Counting("piled", deadline_seconds=0.01, trouble=lambda: bool(gate.wait())),))
    (post,) = house.posts
    ends.append(post.stop)
    post.start()
    for _ in range(10):
        time.sleep(0.03)
        post.watch()
    assert 1 < threads_of("piled") <= MOST_HUNG_THREADS
    (finding,) = house.board.standings()["piled"].findings
    assert (finding.part, finding.state) == (OWN_PART, State.DEGRADED)
    gate.set()
    until(lambda: house.board.standings()["piled"].findings[0].part == "rounds")


def test_a_crash_is_told_and_the_memory_stays(
    ends: list[Callable[[], object]], caplog: pytest.LogCaptureFixture
) -> None:
    calls: list[int] = []

    def crash_at_the_third() -> None:
        calls.append(1)
        if len(calls) == 3:
            raise OSError(5, "Input/output error")

    house = House((Counting("shaky", trouble=crash_at_the_third),))
    (post,) = house.posts
    ends.append(post.stop)
    post.start()
    until(lambda: house.rounds("shaky") >= 4)  # 2, the crash's own, and after it
    assert house.texts("crash") == ["crashed: OSError: [Errno 5] Input/output error"]
    assert house.board.counts()["shaky", "crash"] == 1
    memory = house.keeper.memory("shaky")
    assert memory is not None
    assert memory["rounds"] >= 3
    assert "Traceback" in caplog.text


def test_a_guard_that_crashes_for_what_it_remembers_forgets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("guards.post.FIRST_PAUSE_SECONDS", 0.001)
    house = House((Counting(),))
    house.keeper.remember("counting", {"rounds": 41})
    guard = Counting()
    post = Post(guard, house.keeper, house.board, house.performer.perform)
    decide, seen = guard.decide, []

    def careful(reading: int, memory: int, now_seconds: float) -> Decision[int]:
        seen.append(memory)
        if memory == 41:
            raise ValueError("of all numbers")
        return decide(reading, memory, now_seconds)

    monkeypatch.setattr(guard, "decide", careful)
    post.start()
    until(lambda: 0 in seen)
    post.stop()
    assert seen[:CRASHES_UNTIL_FORGOTTEN] == [41] * CRASHES_UNTIL_FORGOTTEN


def test_a_memory_of_another_release_is_left(caplog: pytest.LogCaptureFixture) -> None:
    house = House((Counting(),))
    house.keeper.remember("counting", {"laps": 3})
    post = Post(Counting(), house.keeper, house.board, house.performer.perform)
    post.one_round()
    assert house.texts("store") == ["what it remembered can't be read: KeyError: 'rounds'"]
    assert house.keeper.memory("counting") == {"rounds": 1}


ACTIONS = (
    Action(Repair.DROP_OLD_LOGS, "logs", "full"),
    Action(Repair.CORRECT_CLOCK, "broken", "late"),
    Action(Repair.CORRECT_CLOCK, "mistaken", "late"),
    Action(Repair.TRIM_MEMORY, "paid", "large", budget="few"),
    Action(Repair.RESTART_PROGRAM, "stage", "leaks", budget="few"),
)


def test_actions_are_done_paid_and_told(caplog: pytest.LogCaptureFixture) -> None:
    guard = Counting(actions=ACTIONS)
    house = House((guard,))
    for _ in range(3):
        house.posts[0].one_round()
    assert house.texts("done") == ["drop-old-logs logs: did it (full)", "trim-memory paid: did it (large)"]
    assert [event.times for event in house.board.events() if event.kind == "done"] == [3, 2]
    assert house.texts("failed") == [
        "correct-clock broken: it is stuck (late)",
        "correct-clock mistaken: ZeroDivisionError: a mistake (late)",
    ]
    assert len(house.texts("refused")) == 1
    assert house.board.counts()["counting", "refused"] == 1
    assert guard.acted.count("paid") == 2
    assert [(name, action.target) for name, action in house.programs.begun] == [("counting", "stage")] * 3


def test_observing_does_nothing_and_says_what_it_would() -> None:
    guard = Counting(actions=ACTIONS)
    house = House((guard,), observe=True)
    house.posts[0].one_round()
    assert guard.acted == []
    assert house.programs.begun == []
    assert house.board.counts()["counting", "would"] == len(ACTIONS)
    assert house.keeper.left() == {"few": 2}


def test_the_runner_looks_after_all_and_stops() -> None:
    gate, calls = threading.Event(), []

    def hang_once() -> None:
        calls.append(1)
        if len(calls) == 1:
            gate.wait()

    house = House((Counting("stuck", trouble=hang_once), Counting("fine")))
    runner = Runner(house.posts, house.keeper, house.board)
    thread = threading.Thread(target=runner.run)
    thread.start()
    until(lambda: house.rounds("stuck") > 2 and house.rounds("fine") > 2)
    runner.stop()
    thread.join(WAIT_SECONDS)
    gate.set()
    assert not thread.is_alive()
    rounds = house.rounds("fine")
    time.sleep(0.1)
    assert house.rounds("fine") <= rounds + 1


def test_where_no_thread_is_to_be_had_the_next_second_tries_again(
    ends: list[Callable[[], object]], monkeypatch: pytest.MonkeyPatch
) -> None:
    house = House((Counting("late"),))
    (post,) = house.posts
    ends.append(post.stop)

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError(f"can't start new thread {thread.name}")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        for _ in range(2):
            with pytest.raises(RuntimeError):
                post.watch()
    post.watch()
    until(lambda: house.rounds("late") > 1)
    assert threads_of("late") == 1


def test_the_sign_of_life_stands_still_with_the_rounds_or_the_loop(ends: list[Callable[[], object]]) -> None:
    gate = threading.Event()
    ends.append(gate.set)
    house = House((Counting("stuck", deadline_seconds=60.0, trouble=lambda: bool(gate.wait())), Counting("fine")))
    runner = Runner(house.posts, house.keeper, house.board)
    assert runner.allowed_seconds == 120.0
    start = runner.round_seconds
    house.posts[1].one_round()
    assert runner.round_seconds == start  # the loop has not come round
    thread = threading.Thread(target=runner.run)
    thread.start()
    until(lambda: runner.round_seconds > start)
    runner.stop()
    thread.join(WAIT_SECONDS)
    last = runner.round_seconds
    house.posts[1].one_round()
    assert runner.round_seconds <= last + 1.0


def test_what_is_no_text_and_no_figure_does_not_reach_the_pages() -> None:
    board = Board(["links"], lambda: 0.0)
    evidence = {"a_bytes": float("nan"), "b_bytes": 10**400, "c_bytes": 7, "d": "eth\udcff", "e_flag": True, "f": None}
    board.round_ended("links", (Finding("nic/eth\udcff", State.DEGRADED, "of eth\udcff", evidence),), 0.1)
    board.event("links", "state", "eth\udcff")
    (finding,) = board.standings()["links"].findings
    assert (finding.part, finding.reason) == ("nic/eth?", "of eth?")
    shown = {"a_bytes": None, "b_bytes": None, "c_bytes": 7, "d": "eth?", "e_flag": True, "f": None}
    assert finding.evidence == shown
    collector = BoardCollector(board, dict, trouble=str, write_seconds=float)
    assert b'fleet_guard_c_bytes{guard="links",part="nic/eth?"} 7.0' in render(collector)
    assert [event.text for event in board.events()] == ["nic/eth?: initialising → degraded: of eth?", "eth?"]


def test_a_refusal_that_differs_in_figures_alone_is_no_new_event() -> None:
    board = Board(["liveness"], lambda: 0.0)
    for seconds in (61, 63.5):
        board.event("liveness", "refused", f"restart stage: no lease (hung for {seconds} s)")
        board.event("liveness", "done", f"batch limit {seconds}")
    assert [(event.kind, event.times) for event in board.events()] == [("refused", 2), ("done", 1), ("done", 1)]


def test_states_that_change_are_events() -> None:
    board = Board(["heat"], lambda: 0.0)
    hot = Finding("soc", State.DEGRADED, "81 °C, above 80 °C")
    board.round_ended("heat", (Finding("soc", State.HEALTHY),), 0.1)
    board.round_ended("heat", (hot,), 0.1)
    board.round_ended("heat", (hot,), 0.1)
    board.round_ended("heat", (Finding("soc", State.HEALTHY),), 0.1)
    texts = [event.text for event in board.events()]
    assert texts == ["soc: healthy → degraded: 81 °C, above 80 °C", "soc: degraded → healthy"]
    assert board.standings()["heat"].state is State.HEALTHY
