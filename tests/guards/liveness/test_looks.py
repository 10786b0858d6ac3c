"""What a look sees: a real supervisord, real processes, and recorded files of the kernel."""

from __future__ import annotations

import contextlib
import http.server
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from fleet.provision.agent.rpc import SupervisorRpc
from guards.assembly import NoLeases
from guards.board import Board
from guards.findings import Action, Repair, State
from guards.guard import ActionFailed, Guard
from guards.keeper import BudgetSpent, Keeper
from guards.liveness.guard import LivenessGuard, budgets
from guards.liveness.looks import LivenessReading, look_at_programs, process_state
from guards.liveness.memory import LivenessMemory
from guards.liveness.probes import AdminSocketProbe, HttpProbe
from guards.restarts import Restarts, RestartTiming
from guards.roots import Roots
from guards.settings import LivenessSettings

WAIT_SECONDS = 20.0
# the test's program is young, and a second is long enough for it to be silent
SETTINGS = LivenessSettings(grace_seconds=0.0)

PROGRAM = """
import json, os, socket, sys
if os.path.exists(sys.argv[1]):
    os.unlink(sys.argv[1])
server = socket.socket(socket.AF_UNIX)
server.bind(sys.argv[1])
server.listen()
while True:
    connection, _ = server.accept()
    with connection:
        if connection.recv(100):
            connection.sendall(json.dumps({"state": "ready", "open_sequences": 0}).encode() + b"\\n")
"""


@pytest.fixture
def supervisord(tmp_path: Path) -> Iterator[Path]:
    (tmp_path / "program.py").write_text(PROGRAM)
    (tmp_path / "supervisord.conf").write_text(
        f"""[unix_http_server]
file={tmp_path}/s.sock
[supervisord]
logfile={tmp_path}/supervisord.log
pidfile={tmp_path}/s.pid
[rpcinterface:supervisor]
supervisor.rpcinterface_factory=supervisor.rpcinterface:make_main_rpcinterface
[program:stage]
command={sys.executable} {tmp_path}/program.py {tmp_path}/stage.sock
startsecs=1
[program:broken]
command=/nowhere/program
startretries=0
"""
    )
    argv = [sys.executable, "-m", "supervisor.supervisord", "--nodaemon", "-c", str(tmp_path / "supervisord.conf")]
    process = subprocess.Popen(argv, stdout=subprocess.DEVNULL, start_new_session=True)
    yield tmp_path
    process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(WAIT_SECONDS)


def look_until(guard: LivenessGuard, seen: Callable[[LivenessReading], bool]) -> LivenessReading:
    deadline = time.monotonic() + WAIT_SECONDS
    while not seen(reading := guard.sense()):
        assert time.monotonic() < deadline, reading
        time.sleep(0.1)
    return reading


def test_a_stopped_process_under_a_real_supervisord(supervisord: Path) -> None:
    made = LivenessGuard(
        SETTINGS,
        Roots(),
        programs=["stage", "broken", "gone"],
        supervisor=SupervisorRpc(str(supervisord / "s.sock")),
        probes={"stage": AdminSocketProbe(supervisord / "stage.sock", answer_seconds=0.5)},
    )
    guard: Guard[LivenessReading, LivenessMemory] = made
    reading = look_until(
        made,
        lambda seen: (
            not seen.problem
            and seen.programs["stage"].answer == {"state": "ready", "open_sequences": 0}
            and seen.programs["broken"].state == "FATAL"
        ),
    )
    stage = reading.programs["stage"]
    assert stage.age_seconds is not None and 0 <= stage.age_seconds < WAIT_SECONDS
    decision = guard.decide(reading, guard.first_memory(), 100.0)
    states = {finding.part: finding.state for finding in decision.findings}
    assert states["supervisord"] is State.HEALTHY and states["program/stage"] is State.HEALTHY
    assert states["program/broken"] in (State.DEGRADED, State.UNHEALTHY)
    assert states["program/gone"] is State.DEGRADED

    os.kill(stage.pid, signal.SIGSTOP)
    held = look_until(made, lambda seen: seen.programs["stage"].kernel_state == "T")
    assert "timed out" in held.programs["stage"].silence
    first = made.decide(held, decision.memory, 102.0)
    action = made.decide(made.sense(), first.memory, 104.0).actions[-1]
    assert (action.repair, action.arguments["pid"]) == (Repair.KILL_PROGRAM, stage.pid)

    restarts, keeper = real_restarts(made, supervisord)
    restarts.run("liveness", action)
    again = look_until(made, lambda seen: seen.programs["stage"].answer == {"state": "ready", "open_sequences": 0})
    assert again.programs["stage"].pid not in (0, stage.pid)
    with pytest.raises(BudgetSpent, match="60 s from one to the next"):
        keeper.check("restart-stage")


def real_restarts(guard: LivenessGuard, directory: Path) -> tuple[Restarts, Keeper]:
    """The runner's part, as it does what this guard decides."""
    keeper = Keeper(None, budgets(SETTINGS, ["stage"]))
    supervisor = SupervisorRpc(str(directory / "s.sock"))

    def healthy(name: str) -> bool:
        answer = guard.sense().programs[name].answer
        return answer is not None and "error" not in answer

    board = Board([guard.name], keeper.clock.now_seconds)
    timing = RestartTiming(WAIT_SECONDS, WAIT_SECONDS)
    return Restarts(supervisor, NoLeases(), keeper, board, timing=timing, healthy=healthy), keeper


def test_supervisord_that_is_silent(tmp_path: Path) -> None:
    made = LivenessGuard(
        SETTINGS, Roots(), programs=["stage"], supervisor=SupervisorRpc(str(tmp_path / "none")), probes={}
    )
    memory, states = made.first_memory(), []
    for _ in range(3):
        decision = made.decide(made.sense(), memory, 0.0)
        memory = decision.memory
        states.append(decision.findings[0].state)
        assert decision.actions == ()
    assert states == [State.DEGRADED, State.DEGRADED, State.UNHEALTHY]
    with pytest.raises(ActionFailed):
        made.act(Action(Repair.RESTART_PROGRAM, "stage", ""))


def test_admin_socket_of_another_process_and_of_none(tmp_path: Path) -> None:
    probe = AdminSocketProbe(tmp_path / "stage.sock", answer_seconds=0.2)
    assert "No such file" in str(probe.ask(1)["error"])
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / "stage.sock"))
        server.listen()
        assert f"process {os.getpid()} answers instead of 1" in str(probe.ask(1)["error"])
        assert "timed out" in str(probe.ask(os.getpid())["error"])


@pytest.mark.parametrize("answer", [b"", b"no JSON\n", b"[1]\n", b"{" * 100_000 + b"\n", b'{"state":'])
def test_an_answer_that_is_none(tmp_path: Path, answer: bytes) -> None:
    def reply(server: socket.socket) -> None:
        connection, _ = server.accept()
        with connection:
            connection.recv(100)
            connection.sendall(answer)

    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / "stage.sock"))
        server.listen()
        thread = threading.Thread(target=reply, args=(server,))
        thread.start()
        assert AdminSocketProbe(tmp_path / "stage.sock").ask(os.getpid()).keys() == {"error"}
        thread.join()


class Answers(http.server.BaseHTTPRequestHandler):
    status = 200

    def do_GET(self) -> None:
        self.send_response(self.status if self.path == "/livez" else 404)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        del format, args


def test_http_probe() -> None:
    with http.server.HTTPServer(("127.0.0.1", 0), Answers) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        port = server.server_address[1]
        probe = HttpProbe("127.0.0.1", port, tls=False, answer_seconds=5.0)
        assert probe.ask(1) == {}
        Answers.status = 503
        assert "503" in str(probe.ask(1)["error"])
        Answers.status = 200
        assert "error" in HttpProbe("127.0.0.1", port, tls=True, answer_seconds=5.0).ask(1)
        server.shutdown()
    assert "Connection refused" in str(probe.ask(1)["error"])


@pytest.mark.parametrize(("answer", "error"), [(b"HTTP/1.1", "timed out"), (b"220 mail ready\r\n", "no HTTP")])
def test_http_that_is_dripped_or_none(answer: bytes, error: str) -> None:
    ended = threading.Event()

    def serve(server: socket.socket) -> None:
        connection, _ = server.accept()
        with connection:
            connection.sendall(answer)
            while not ended.wait(0.02):
                try:
                    connection.sendall(b" ")
                except OSError:
                    return

    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=serve, args=(server,))
        thread.start()
        seen = HttpProbe("127.0.0.1", server.getsockname()[1], tls=False, answer_seconds=0.3).ask(1)
        ended.set()
        thread.join()
    assert error in str(seen["error"])


class Crashing:
    def ask(self, pid: int) -> Mapping[str, Any]:
        raise RuntimeError(f"no idea about {pid}")


class Two:
    def programs(self) -> Mapping[str, Mapping[str, Any]]:
        info = {"statename": "RUNNING", "pid": os.getpid(), "start": 5, "spawnerr": ""}
        return {"stage": info, "gateway": {**info, "statename": "STOPPED", "pid": 0}}


def test_a_probe_that_crashes_is_a_silence() -> None:
    reading = look_at_programs(Two(), {"stage": Crashing(), "gateway": Crashing()}, Roots())
    assert "no idea" in reading.programs["stage"].silence
    assert reading.programs["gateway"].answer is None
    assert reading.programs["stage"].kernel_state in ("R", "S", "D")


@pytest.mark.parametrize(
    ("stat", "uptime", "seen"),
    [
        # a real line, with a command that tries to look like one
        ("812 (py) T 1 (x) S 1 812 812 0 -1 4194560 900 0 0 0 5 3 0 0 20 0 9 0 4000 9000 20", 100.0, ("S", 60.0)),
        ("812 (python) T 1 812 812 0 -1 4194560 900 0 0 0 5 3 0 0 20 0 9 0 4000 9000 20", None, ("T", None)),
        ("812 (python) Z", 100.0, ("", None)),
        ("", 100.0, ("", None)),
    ],
)
def test_state_and_age_of_a_process(
    tmp_path: Path, stat: str, uptime: float | None, seen: tuple[str, float | None]
) -> None:
    (tmp_path / "812").mkdir()
    (tmp_path / "812/stat").write_text(stat)
    ticks = os.sysconf("SC_CLK_TCK")
    state, age = process_state(Roots(proc=tmp_path), 812, uptime)
    assert (state, age if age is None else age + 4000 / ticks) == (seen[0], None if seen[1] is None else 100.0)
    assert process_state(Roots(proc=tmp_path), 813, uptime) == ("", None)


def test_memory_of_another_version_is_refused() -> None:
    made = LivenessGuard(SETTINGS, Roots(), programs=[], supervisor=Two(), probes={})
    kept = made.memory_from_json(json.loads('{"stage":{"restarting":true,"mended":[2,1],"started":[],"restarts":[]}}'))
    assert kept.programs["stage"].mended == (1.0, 2.0)
    assert made.memory_to_json(kept)["stage"]["restarting"] is True
    with pytest.raises(KeyError):
        made.memory_from_json({"stage": {}})
