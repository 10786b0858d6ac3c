"""Programs are stopped, killed and started through a real supervisord: one at a time, paid, and with a lease."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from fleet.provision.agent.rpc import SupervisorRpc
from fleet.provision.supervisor_config import Program, render_supervisor_config
from guards.admin_socket import MOST_ANSWER_BYTES, AdminSocket, Silent
from guards.board import Board
from guards.budgets import Budget
from guards.findings import Action, Repair
from guards.guard import ActionFailed
from guards.keeper import Keeper
from guards.restarts import LeaseRefused, Restarts, RestartTiming
from guards.stage_client import StageClient

WAIT_SECONDS = 20.0
RESTART = Action(Repair.RESTART_PROGRAM, "stage", "it leaks", {"needs_lease": True}, "restart-stage")


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + WAIT_SECONDS
    while not condition():
        assert time.monotonic() < end, "not in time"
        time.sleep(0.05)


class Coordinator:
    """Gives leases, unless it has a reason not to."""

    def __init__(self) -> None:
        self.refusal = ""
        self.taken: list[str] = []
        self.held = 0

    @contextmanager
    def take(self, because: str) -> Iterator[None]:
        if self.refusal:
            raise LeaseRefused(self.refusal)
        self.taken.append(because)
        self.held += 1
        try:
            yield
        finally:
            self.held -= 1


class Box:
    """A supervisord with a stage, and everything that restarts it."""

    def __init__(self, rpc: SupervisorRpc) -> None:
        self.rpc = rpc
        self.coordinator = Coordinator()
        self.keeper = Keeper(None, {"restart-stage": Budget(2, 3600.0)})
        self.board = Board(["memory"], self.keeper.clock.now_seconds)
        self.healthy = True
        self.held_while_restarting: list[int] = []
        self.restarts = Restarts(
            rpc, self.coordinator, self.keeper, self.board, timing=RestartTiming(10.0, 10.0), healthy=self._healthy
        )

    def _healthy(self, name: str) -> bool:
        self.held_while_restarting.append(self.coordinator.held)
        return self.healthy and self.rpc.programs()[name]["statename"] == "RUNNING"

    def pid(self) -> int:
        return int(self.rpc.programs()["stage"]["pid"])

    def events(self) -> list[tuple[str, str]]:
        return [(event.kind, event.text) for event in self.board.events()]


@pytest.fixture(scope="module")
def supervisord() -> Iterator[SupervisorRpc]:
    directory = Path(tempfile.mkdtemp(prefix="guards"))
    stage = Program("stage", (sys.executable, "-c", "import time; time.sleep(600)"), {}, "/dev/null", None, 1, 5)
    text = render_supervisor_config(
        socket=f"{directory}/s.sock", pid_file=f"{directory}/s.pid", log_file=f"{directory}/s.log", programs=[stage]
    )
    (directory / "s.conf").write_text(text)
    process = subprocess.Popen(
        [sys.executable, "-m", "supervisor.supervisord", "--nodaemon", "-c", f"{directory}/s.conf"]
    )
    rpc = SupervisorRpc(f"{directory}/s.sock")
    try:
        until(rpc.answers)
        yield rpc
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(WAIT_SECONDS)
        shutil.rmtree(directory)


@pytest.fixture
def box(supervisord: SupervisorRpc) -> Box:
    until(lambda: supervisord.programs()["stage"]["statename"] == "RUNNING")
    return Box(supervisord)


def test_a_restart_under_a_lease(box: Box) -> None:
    before = box.pid()
    box.restarts.run("memory", RESTART)
    ((kind, text),) = box.events()
    assert kind == "done"
    assert text.startswith("restart-program stage: healthy again after ")
    assert box.pid() not in (0, before)
    assert box.coordinator.taken == ["it leaks"]
    assert set(box.held_while_restarting) == {1}
    assert box.coordinator.held == 0
    assert box.keeper.left() == {"restart-stage": 1}


def test_no_lease_no_restart_and_nothing_is_paid(box: Box) -> None:
    before = box.pid()
    box.coordinator.refusal = "box2 is being restarted"
    box.restarts.run("memory", RESTART)
    assert box.events() == [("refused", "restart-program stage: box2 is being restarted (it leaks)")]
    assert box.pid() == before
    assert box.keeper.left() == {"restart-stage": 2}


def test_a_stopped_process_is_killed_without_a_lease(box: Box) -> None:
    before = box.pid()
    os.kill(before, signal.SIGSTOP)
    box.coordinator.refusal = "no coordinator answers"
    box.restarts.run("memory", Action(Repair.KILL_PROGRAM, "stage", "stopped", {"needs_lease": False}, "restart-stage"))
    assert box.events()[0][0] == "done"
    assert box.pid() not in (0, before)


def test_a_program_that_was_left_stopped_is_started(box: Box) -> None:
    box.rpc.stop_group("stage")
    until(lambda: box.pid() == 0)
    box.restarts.run("memory", Action(Repair.START_PROGRAM, "stage", "STOPPED", {"needs_lease": False}))
    assert box.events()[0][0] == "done"
    assert box.pid() != 0


def test_a_spent_budget_asks_for_a_person(box: Box) -> None:
    for _ in range(2):
        box.keeper.charge("restart-stage")
    before = box.pid()
    box.restarts.run("memory", RESTART)
    assert box.events() == [
        ("refused", "restart-program stage: budget restart-stage is spent, 2 in 1 h: a person is needed (it leaks)")
    ]
    assert (box.pid(), box.coordinator.taken) == (before, [])


def test_one_that_does_not_come_back_is_told_and_the_lease_given_back(box: Box) -> None:
    box.healthy = False
    quick = Restarts(
        box.rpc, box.coordinator, box.keeper, box.board, timing=RestartTiming(10.0, 0.5), healthy=lambda name: False
    )
    quick.run("memory", RESTART)
    assert box.events() == [("failed", "restart-program stage: not within 0.5 s: stage is healthy (it leaks)")]
    assert box.coordinator.held == 0


def test_what_supervisord_does_not_have(box: Box) -> None:
    box.restarts.run("memory", Action(Repair.START_PROGRAM, "engine", "FATAL", {"needs_lease": False}))
    assert box.events() == [("failed", "start-program engine: supervisord has no program engine; it has stage (FATAL)")]
    gone = Restarts(
        SupervisorRpc("/nowhere/s.sock"),
        box.coordinator,
        box.keeper,
        box.board,
        timing=RestartTiming(1.0, 1.0),
        healthy=lambda name: True,
    )
    gone.run("memory", RESTART)
    assert "supervisord at /nowhere/s.sock did not answer" in box.events()[1][1]


def test_one_at_a_time(box: Box) -> None:
    box.restarts.begin("memory", RESTART)
    box.restarts.begin("memory", RESTART)  # the same again is under way
    box.restarts.begin("memory", Action(Repair.START_PROGRAM, "engine", "FATAL", {"needs_lease": False}))
    until(lambda: len(box.events()) == 2)
    refused, done = box.events()
    assert refused == ("refused", "start-program engine: stage is being restarted (FATAL)")
    assert done[0] == "done"
    assert box.coordinator.taken == ["it leaks"]


@contextmanager
def answering(path: Path, answer: bytes) -> Iterator[list[bytes]]:
    """A socket that answers each line with the same bytes."""
    asked: list[bytes] = []
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(path))
    listener.listen()

    def serve() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            with connection:
                asked.append(connection.makefile("rb").readline())
                try:
                    connection.sendall(answer)
                except OSError:
                    continue

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield asked
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join()


def test_what_the_stage_is_asked(tmp_path: Path) -> None:
    client = StageClient(tmp_path / "a.sock")
    with answering(tmp_path / "a.sock", b'{"freed_bytes": 5}\n') as asked:
        assert client.trim() == 5
        client.limit_batch(3)
        client.limit_duty(50.0)
        client.shed_sequences(True)
        client.tell("unhealthy: clock/clock", 61.5)
        assert client.health() == {"freed_bytes": 5}
    assert [json.loads(line) for line in asked] == [
        {"op": "trim"},
        {"op": "batch-limit", "sequences": 3},
        {"op": "duty-limit", "percent": 50.0},
        {"op": "shed", "shedding": True},
        {"op": "guards", "state": "unhealthy: clock/clock", "temperature_celsius": 61.5},
        {"op": "health"},
    ]


@pytest.mark.parametrize(
    "answer", [b"", b"{", b"[1]\n", b"nonsense\n", b"[" * 100_000 + b"\n", b" " * (MOST_ANSWER_BYTES + 100_000)]
)
def test_answers_that_are_none(tmp_path: Path, answer: bytes) -> None:
    client = StageClient(tmp_path / "a.sock")
    with answering(tmp_path / "a.sock", answer):
        assert client.health() is None
        with pytest.raises(ActionFailed, match=r"a\.sock"):
            client.limit_batch(1)


def test_a_stage_that_refuses_or_is_not_there(tmp_path: Path) -> None:
    client = StageClient(tmp_path / "a.sock", answer_seconds=0.2)
    with pytest.raises(Silent, match="No such file"):
        AdminSocket(tmp_path / "a.sock").ask({"op": "health"})
    with pytest.raises(ActionFailed, match="No such file"):
        client.tell("healthy", None)
    with answering(tmp_path / "a.sock", b'{"error": "n is too small"}\n'), pytest.raises(ActionFailed) as caught:
        client.limit_batch(0)
    assert str(caught.value) == "the stage refuses batch-limit: n is too small"


def test_figures_of_a_stage_that_are_none_are_unknown(tmp_path: Path) -> None:
    answer = b'{"a": NaN, "b": -Infinity, "c": 1' + b"0" * 400 + b', "d": 7, "freed_bytes": "many"}\n'
    with answering(tmp_path / "a.sock", answer):
        client = StageClient(tmp_path / "a.sock")
        assert client.health() == {"a": None, "b": None, "c": None, "d": 7, "freed_bytes": "many"}
        with pytest.raises(ActionFailed, match="tells no bytes: 'many'"):
            client.trim()


def test_an_answer_that_is_dripped_ends_in_time(tmp_path: Path) -> None:
    ended = threading.Event()

    def drip(listener: socket.socket) -> None:
        connection, _ = listener.accept()
        with connection:
            while not ended.wait(0.02):
                try:
                    connection.sendall(b" ")
                except OSError:
                    return

    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "a.sock"))
        listener.listen()
        thread = threading.Thread(target=drip, args=(listener,))
        thread.start()
        with pytest.raises(Silent, match="timed out"):
            AdminSocket(tmp_path / "a.sock", answer_seconds=0.3).ask({"op": "health"})
        ended.set()
        thread.join()
