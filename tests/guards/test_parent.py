"""The main process of the unit, with a real supervisord and a real notify socket."""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from fleet.provision.agent.rpc import SupervisorRpc
from guards.beat import Beat, read_beat
from guards.parent import Asker, Notifier, Watchdog, main

WAIT_SECONDS = 20.0
WATCHDOG_SECONDS = 1.2

Start = Callable[..., "subprocess.Popen[bytes]"]


class Systemd:
    """The receiving end of sd_notify."""

    def __init__(self, address: str) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind("\0" + address[1:] if address.startswith("@") else address)

    def next(self, seconds: float = WAIT_SECONDS) -> str:
        """The next message; empty if none comes."""
        readable, _, _ = select.select([self._socket], [], [], seconds)
        return self._socket.recv(4096).decode() if readable else ""

    def until(self, word: str) -> list[str]:
        """Messages up to the first that holds the word."""
        got: list[str] = []
        while word not in (message := self.next()):
            assert message, f"no {word}, only {got}"
            got.append(message)
        return [*got, message]

    def close(self) -> None:
        self._socket.close()


@pytest.fixture(params=["path", "abstract"])
def systemd(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[Systemd, str]]:
    address = (
        str(tmp_path / "notify") if request.param == "path" else f"@fleet-test-{os.getpid()}-{time.monotonic_ns()}"
    )
    receiver = Systemd(address)
    yield receiver, address
    receiver.close()


# Guards whose first process beats once and hangs; those after it go on.
GUARDS = f"""
import os, sys, time
from pathlib import Path
sys.path.insert(0, {str(Path.cwd())!r})
from guards.beat import Beat, write_beat
here = Path(__file__).parent
first = not (here / "guards.beat").exists()
while True:
    write_beat(here / "guards.beat", Beat(os.getpid(), time.monotonic(), 1.0))
    time.sleep(1000 if first else 0.05)
"""


def configuration(directory: Path) -> Path:
    (directory / "guards.py").write_text(GUARDS)
    file = directory / "supervisord.conf"
    file.write_text(
        f"""[unix_http_server]
file={directory}/s.sock
[supervisord]
logfile={directory}/supervisord.log
pidfile={directory}/s.pid
[rpcinterface:supervisor]
supervisor.rpcinterface_factory=supervisor.rpcinterface:make_main_rpcinterface
[program:guards]
command={sys.executable} {directory}/guards.py
startsecs=0
[program:sleeper]
command=/bin/sh -c "env > {directory}/environment; exec sleep 1000"
""",
        encoding="utf-8",
    )
    return file


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    started: list[subprocess.Popen[bytes]] = []

    def begin(**environment: str) -> subprocess.Popen[bytes]:
        supervisord = [sys.executable, "-m", "supervisor.supervisord", "--nodaemon", "-c", str(configuration(tmp_path))]
        argv = [sys.executable, "-m", "guards.parent", "--socket", str(tmp_path / "s.sock"), "--", *supervisord]
        plain = {k: v for k, v in os.environ.items() if not k.startswith(("NOTIFY_", "WATCHDOG_"))}
        process = subprocess.Popen(argv, env=plain | environment, stdout=subprocess.DEVNULL, start_new_session=True)
        started.append(process)
        return process

    yield begin
    for process in started:
        for pid in (supervisord_pid(tmp_path), process.pid):
            if pid is not None and process.poll() is None:
                os.kill(pid, signal.SIGCONT)
        process.terminate()
        try:
            process.wait(WAIT_SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def supervisord_pid(directory: Path) -> int | None:
    try:
        return int((directory / "s.pid").read_text())
    except (OSError, ValueError):
        return None


def watched(address: str) -> dict[str, str]:
    return {"NOTIFY_SOCKET": address, "WATCHDOG_USEC": str(int(WATCHDOG_SECONDS * 1e6))}


def test_pings_only_while_supervisord_answers(systemd: tuple[Systemd, str], start: Start, tmp_path: Path) -> None:
    receiver, address = systemd
    start(**watched(address))
    assert "WATCHDOG=1" in receiver.until("READY=1")[-1]
    receiver.until("WATCHDOG=1")
    pid = supervisord_pid(tmp_path)
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    receiver.until("does not answer")
    silent = [receiver.next() for _ in range(3)]
    assert all("does not answer" in message and "WATCHDOG" not in message for message in silent)
    os.kill(pid, signal.SIGCONT)
    receiver.until("WATCHDOG=1")


@pytest.mark.parametrize("systemd", ["path"], indirect=True)
def test_guards_that_hang_are_killed_and_nothing_else(
    systemd: tuple[Systemd, str], start: Start, tmp_path: Path
) -> None:
    receiver, address = systemd
    start(**watched(address))
    receiver.until("READY=1")
    rpc = SupervisorRpc(str(tmp_path / "s.sock"))

    def beat() -> Beat:
        end = time.monotonic() + WAIT_SECONDS
        while (found := read_beat(tmp_path / "guards.beat")) is None:
            assert time.monotonic() < end
            time.sleep(0.05)
        return found

    hung, sleeper = beat(), rpc.programs()["sleeper"]["pid"]
    end = time.monotonic() + WAIT_SECONDS
    while (again := beat()).pid == hung.pid:
        assert time.monotonic() < end, "the hung guards are still there"
        time.sleep(0.1)
    while beat().round_seconds < again.round_seconds + 3.0:  # those that go on are left alone
        assert time.monotonic() < end
        time.sleep(0.1)
    programs = rpc.programs()
    assert programs["guards"]["pid"] == again.pid
    assert programs["sleeper"]["pid"] == sleeper
    receiver.until("WATCHDOG=1")


@pytest.mark.parametrize("systemd", ["path"], indirect=True)
def test_stop_reaches_supervisord_and_its_status_comes_back(
    systemd: tuple[Systemd, str], start: Start, tmp_path: Path
) -> None:
    receiver, address = systemd
    parent = start(**watched(address))
    receiver.until("READY=1")
    environment = tmp_path / "environment"
    deadline = time.monotonic() + WAIT_SECONDS
    while not (environment.exists() and "PATH" in environment.read_text()) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert "NOTIFY_SOCKET" not in environment.read_text()
    assert "WATCHDOG_USEC" not in environment.read_text()
    parent.send_signal(signal.SIGTERM)
    messages = receiver.until("ended with 0")
    assert any("STOPPING=1" in message for message in messages)
    stopping = next(i for i, message in enumerate(messages) if "STOPPING=1" in message)
    assert not any("WATCHDOG=1" in message for message in messages[stopping:])
    assert parent.wait(WAIT_SECONDS) == 0
    assert not (tmp_path / "s.sock").exists()


def test_death_of_supervisord_ends_the_parent_without_systemd_too(start: Start, tmp_path: Path) -> None:
    parent = start()
    deadline = time.monotonic() + WAIT_SECONDS
    while (pid := supervisord_pid(tmp_path)) is None and time.monotonic() < deadline:
        time.sleep(0.05)
    assert pid is not None
    parent.send_signal(signal.SIGUSR2)  # supervisord opens its log anew, and lives
    os.kill(pid, signal.SIGKILL)
    assert parent.wait(WAIT_SECONDS) == 128 + signal.SIGKILL


def test_a_command_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    try:
        assert main(["--socket", "/nowhere", "--", "/nowhere/supervisord"]) == 1
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    assert "/nowhere/supervisord: No such file" in capsys.readouterr().err


def test_a_late_answer_is_none() -> None:
    came: list[bool] = []
    asker = Asker(lambda: True, came.append, deadline_seconds=-1.0)
    assert asker.begin()
    while not came:
        time.sleep(0.01)
    assert came == [False]


@pytest.mark.parametrize(
    ("environment", "seconds"),
    [
        ({}, None),
        ({"WATCHDOG_USEC": "30000000"}, 30.0),
        ({"WATCHDOG_USEC": "30000000", "WATCHDOG_PID": "7"}, 30.0),
        ({"WATCHDOG_USEC": "30000000", "WATCHDOG_PID": "8"}, None),
        ({"WATCHDOG_USEC": "0"}, None),
        ({"WATCHDOG_USEC": "soon"}, None),
    ],
)
def test_watchdog_of_the_environment(environment: dict[str, str], seconds: float | None) -> None:
    assert Watchdog.from_environment(environment, pid=7).seconds == seconds


def test_a_socket_that_is_gone_is_no_crash(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Notifier(str(tmp_path / "gone")).tell("WATCHDOG=1")
    assert "gone" in capsys.readouterr().err
    Notifier("").tell("WATCHDOG=1")
    assert capsys.readouterr().err == ""
