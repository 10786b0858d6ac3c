"""`python -m guards` as people and supervisord run it."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from http.client import HTTPSConnection
from pathlib import Path
from typing import Any

import psutil
import pytest

from fleet.provision.agent.rpc import SupervisorRpc
from fleet.provision.supervisor_config import Program, render_supervisor_config
from guards.beat import FILE_NAME, read_beat
from guards.settings import GuardSettings
from stage_runtime.link.tls import TlsIdentity
from tests.stage_runtime.pki import SiteCa

WAIT_SECONDS = 30.0
GUARDS = {"thermal", "memory", "clock", "surroundings"}


def run(*arguments: str, columns: int = 80) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "guards", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env=os.environ | {"COLUMNS": str(columns)},
    )


def test_a_table_of_what_this_machine_has() -> None:
    shown = run("--observe")
    assert (shown.returncode, shown.stderr) == (0, "")
    lines = shown.stdout.splitlines()
    assert lines[0].split() == ["guard", "part", "state", "seen"]
    assert {line.split()[0] for line in lines[1:] if not line.startswith(" ")} == GUARDS
    assert max(len(line) for line in lines) <= 80
    assert "Traceback" not in shown.stdout


def test_the_same_for_programs() -> None:
    shown = run("--observe", "--json")
    document = json.loads(shown.stdout)
    assert set(document["guards"]) == GUARDS
    assert document["observe"] is True
    memory = {finding["part"]: finding for finding in document["guards"]["memory"]["findings"]}
    available = memory["box"]["evidence"]["available_bytes"]
    assert 0 < available <= psutil.virtual_memory().total


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        ((), 2, "one of the arguments --config --observe is required"),
        (("--config", "/nowhere/guards.json"), 78, "error: /nowhere/guards.json: No such file or directory"),
        (("--help",), 0, "python -m guards --observe --json"),
    ],
)
def test_usage(arguments: tuple[str, ...], code: int, text: str) -> None:
    shown = run(*arguments)
    assert shown.returncode == code
    assert text in shown.stdout + shown.stderr


@dataclasses.dataclass
class Box:
    """Guards under a real supervisord, beside a program that sleeps."""

    rpc: SupervisorRpc
    ca: SiteCa
    operator: TlsIdentity
    port: int
    state: Path

    def get(self, path: str) -> tuple[int, Any]:
        context: ssl.SSLContext = self.operator.client_context()
        connection = HTTPSConnection("localhost", self.port, context=context, timeout=10)
        try:
            connection.request("GET", path)
            answer = connection.getresponse()
            body = answer.read()
            return answer.status, json.loads(body) if "json" in answer.headers["Content-Type"] else body.decode()
        finally:
            connection.close()

    def status(self) -> Mapping[str, Any]:
        """Once every guard has done a round."""
        end = time.monotonic() + WAIT_SECONDS
        while True:
            try:
                document = self.get("/v1/guards")[1]
                if all(guard["rounds"] for guard in document["guards"].values()):
                    return dict(document)
            except OSError:
                pass
            assert time.monotonic() < end, (self.state.parent / "log/guards.log").read_text()
            time.sleep(0.2)

    def pid(self, program: str) -> int:
        return int(self.rpc.programs()[program]["pid"])


@pytest.fixture(scope="module")
def box() -> Iterator[Box]:
    directory = Path(tempfile.mkdtemp(prefix="guards"))
    ca = SiteCa(directory / "ca", "site")
    tls = ca.issue("box1")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    for name in ("state", "log"):
        (directory / name).mkdir()
    settings = dataclasses.asdict(GuardSettings())
    settings["liveness"] |= {"period_seconds": 0.3, "grace_seconds": 1.0, "restart_apart_seconds": 1.0}
    config = {
        "schema": 1,
        "site": "site",
        "box": "box1",
        "listen": {"host": "127.0.0.1", "port": port},
        "tls": {"ca": str(tls.ca), "certificate": str(tls.certificate), "key": str(tls.key)},
        "clock_synchronised_file": None,
        "state_directory": f"{directory}/state",
        "supervisor_socket": f"{directory}/s.sock",
        "programs": [{"name": "engine"}],
        "stage": None,
        "coordinator": None,
        "log_directory": f"{directory}/log",
        "directories": [str(directory)],
        "time_servers": [],
        "build_unix_seconds": 1_700_000_000,
        "link_mbit_per_second": 1000.0,
        "mac": None,
        "stop_seconds": 5.0,
        "ready_seconds": 10.0,
        "observe": False,
        "settings": settings,
    }
    (directory / "guards.json").write_text(json.dumps(config))
    log = f"{directory}/log"
    programs = [
        Program("engine", (sys.executable, "-c", "import time; time.sleep(600)"), {}, f"{log}/engine.log", None, 1, 5),
        Program(
            "guards",
            (sys.executable, "-m", "guards", "--config", f"{directory}/guards.json"),
            {},
            f"{log}/guards.log",
            None,
            1,
            5,
        ),
    ]
    text = render_supervisor_config(
        socket=f"{directory}/s.sock", pid_file=f"{directory}/s.pid", log_file=f"{directory}/s.log", programs=programs
    )
    (directory / "s.conf").write_text(text)
    process = subprocess.Popen(
        [sys.executable, "-m", "supervisor.supervisord", "--nodaemon", "-c", f"{directory}/s.conf"]
    )
    try:
        made = Box(SupervisorRpc(f"{directory}/s.sock"), ca, ca.issue("operator"), port, directory / "state")
        made.status()
        yield made
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(WAIT_SECONDS)
        shutil.rmtree(directory)


def test_all_guards_run_and_tell(box: Box) -> None:
    document = box.status()
    assert set(document["guards"]) == GUARDS | {"liveness"}
    parts = {finding["part"]: finding["state"] for finding in document["guards"]["liveness"]["findings"]}
    assert parts["supervisord"] == "healthy"
    assert document["budgets_left"]["restart-engine"] > 0
    assert document["trouble"] == ""
    beat = read_beat(box.state.parent / FILE_NAME)
    assert beat is not None
    assert (beat.pid, beat.allowed_seconds) == (box.pid("guards"), 120.0)
    assert 0.0 <= time.monotonic() - beat.round_seconds < beat.allowed_seconds
    status, health = box.get("/health")
    assert health["box"] == "box1"
    assert (status == 503) == (health["state"] == "unhealthy")
    assert "fleet_guard_budget_left_number" in box.get("/metrics")[1]


def test_a_stopped_program_is_killed_and_comes_back(box: Box) -> None:
    box.status()
    before = box.pid("engine")
    left = box.status()["budgets_left"]["restart-engine"]
    os.kill(before, signal.SIGSTOP)
    end = time.monotonic() + WAIT_SECONDS
    while box.pid("engine") in (0, before):
        assert time.monotonic() < end, box.get("/v1/guards")[1]["events"]
        time.sleep(0.2)
    until = time.monotonic() + WAIT_SECONDS
    while not (done := [event for event in box.get("/v1/guards")[1]["events"] if event["kind"] == "done"]):
        assert time.monotonic() < until
        time.sleep(0.2)
    assert done[0]["text"].startswith("kill-program engine: healthy again after ")
    assert box.status()["budgets_left"]["restart-engine"] == left - 1


def test_guards_that_are_killed_come_back_with_their_budgets(box: Box) -> None:
    engine, left = box.pid("engine"), box.status()["budgets_left"]
    for _ in range(3):
        before = box.pid("guards")
        os.kill(before, signal.SIGKILL)
        end = time.monotonic() + WAIT_SECONDS
        while box.pid("guards") in (0, before):
            assert time.monotonic() < end
            time.sleep(0.1)
    assert box.status()["budgets_left"] == left
    assert box.pid("engine") == engine


def test_the_process_is_small_and_idle(box: Box) -> None:
    box.status()
    process = psutil.Process(box.pid("guards"))
    assert process.memory_info().rss < 40 * 2**20
    assert process.num_threads() < 20
    assert not [name for name in ("torch", "aiohttp") if any(name in one.path for one in process.memory_maps())]
