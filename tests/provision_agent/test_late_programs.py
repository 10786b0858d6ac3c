"""The health gate and programs that answers do not depend on, under a real supervisord."""

from __future__ import annotations

import io
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from fleet.provision.agent import health, wire
from fleet.provision.agent.peer import Peer
from fleet.provision.agent.rpc import SupervisorRpc
from fleet.provision.supervisor_config import Program, render_supervisor_config

WAIT_SECONDS = 30.0
NEVER_SECONDS = 3600


def program(name: str, code: str, log: Path, start_seconds: int) -> Program:
    return Program(name, (sys.executable, "-c", code), {}, f"{log}/{name}.log", None, start_seconds, 5)


@pytest.fixture
def socket_path(tmp_path: Path) -> Iterator[str]:
    """A supervisord with a program that runs, one that never gets as far as RUNNING, and one that can't start."""
    sleep = "import time; time.sleep(600)"
    text = render_supervisor_config(
        socket=f"{tmp_path}/s",
        pid_file=f"{tmp_path}/pid",
        log_file=f"{tmp_path}/log",
        programs=[
            program("runs", sleep, tmp_path, 1),
            program("late", sleep, tmp_path, NEVER_SECONDS),
            program("broken", "raise SystemExit(78)", tmp_path, 1),
        ],
    )
    (tmp_path / "conf").write_text(text)
    process = subprocess.Popen(
        [sys.executable, "-m", "supervisor.supervisord", "--nodaemon", "-c", f"{tmp_path}/conf"],
        stdout=subprocess.DEVNULL,
    )
    try:
        end = time.monotonic() + WAIT_SECONDS
        while not SupervisorRpc(f"{tmp_path}/s").answers():
            assert time.monotonic() < end
            time.sleep(0.05)
        yield f"{tmp_path}/s"
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(WAIT_SECONDS)


def gate(socket_path: str, seconds: float, programs: dict[str, bool]) -> dict[str, str]:
    """What is wrong after the gate; programs: name → whether answers depend on it."""
    entries = [
        {"name": name, "health_socket": None, "health_states": [], "serves": serves}
        for name, serves in programs.items()
    ]
    spec = {"supervisor": {"socket": socket_path}, "programs": entries, "health_gate_seconds": seconds}
    peer = Peer(wire.Reader(lambda count: b""), wire.Writer(io.BytesIO().write))
    try:
        return health.wait_healthy(spec, peer)
    finally:
        peer.close()


def test_guards_that_are_late_cost_no_release_and_a_stage_does(socket_path: str) -> None:
    assert gate(socket_path, WAIT_SECONDS, {"runs": True}) == {}
    assert gate(socket_path, 0.5, {"runs": True, "late": False}) == {}
    assert gate(socket_path, 0.5, {"runs": True, "late": True}) == {"late": "is STARTING in supervisord"}


def test_guards_that_cannot_be_started_at_all_do(socket_path: str) -> None:
    wrong = gate(socket_path, WAIT_SECONDS, {"runs": True, "broken": False})
    assert wrong.get("broken") == "ended 3 times"
