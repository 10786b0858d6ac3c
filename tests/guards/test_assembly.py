"""A whole house of guards beside a stage: a drill heats the box, and the stage is limited and told."""

from __future__ import annotations

import dataclasses
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from guards.assembly import house_of
from guards.beat import FILE_NAME, read_beat
from guards.config import load_config
from guards.roots import Roots
from guards.settings import GuardSettings

WAIT_SECONDS = 20.0


class Stage:
    """An admin socket that obeys and remembers what it was asked."""

    def __init__(self, path: Path) -> None:
        self.asked: list[Mapping[str, Any]] = []
        self.batch_limit = 4
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen()
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            with connection:
                line = connection.makefile("rb").readline()
                if not line:
                    continue  # only asked whose socket it is
                request = json.loads(line)
                self.asked.append(request)
                if request["op"] == "batch-limit":
                    self.batch_limit = request["sequences"]
                health = {
                    "state": "ready",
                    "max_batch_sequences": 4,
                    "batch_limit_sequences": self.batch_limit,
                    "open_sequences": 1,
                }
                connection.sendall(json.dumps(health).encode() + b"\n")

    def told(self) -> list[Mapping[str, Any]]:
        return [request for request in self.asked if request["op"] == "guards"]

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join()


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    (tmp_path / "run").mkdir()
    made = Stage(tmp_path / "run/stage.sock")
    yield made
    made.close()


def config(directory: Path) -> Path:
    settings = dataclasses.asdict(GuardSettings())
    settings["thermal"] |= {"period_seconds": 0.1, "down_dwell_seconds": 0.2, "up_dwell_seconds": 0.2}
    for name in ("state", "log"):
        (directory / name).mkdir()
    data = {
        "schema": 1,
        "site": "site",
        "box": "box1",
        "listen": {"host": "127.0.0.1", "port": 0},
        "tls": {"ca": "/none", "certificate": "/none", "key": "/none"},
        "clock_synchronised_file": None,
        "state_directory": f"{directory}/state",
        "supervisor_socket": f"{directory}/run/supervisor.sock",
        "programs": [],
        "stage": {"admin_socket": f"{directory}/run/stage.sock", "pipeline": "main"},
        "coordinator": None,
        "log_directory": f"{directory}/log",
        "directories": [str(directory)],
        "time_servers": [],
        "build_unix_seconds": 1_700_000_000,
        "link_mbit_per_second": 0,
        "mac": None,
        "stop_seconds": 5.0,
        "ready_seconds": 10.0,
        "observe": False,
        "settings": settings,
    }
    path = directory / "guards.json"
    path.write_text(json.dumps(data))
    return path


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + WAIT_SECONDS
    while not condition():
        assert time.monotonic() < end, "not in time"
        time.sleep(0.05)


def test_a_heat_drill_from_end_to_end(tmp_path: Path, stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("guards.telling.TELL_SECONDS", 0.1)
    monkeypatch.setattr("guards.beat.BEAT_SECONDS", 0.1)
    zone = tmp_path / "sys/class/thermal/thermal_zone0"
    zone.mkdir(parents=True)
    (zone / "type").write_text("cpu-thermal\n")
    (zone / "temp").write_text("45000\n")
    house = house_of(load_config(config(tmp_path)), Roots(sys=tmp_path / "sys", path=str(tmp_path)))
    thread = threading.Thread(target=house.runner.run, args=(house.helpers,))
    thread.start()
    try:
        until(lambda: bool(stage.told()) and stage.told()[-1]["temperature_celsius"] == 45.0)
        drill = tmp_path / "run/drill/thermal/thermal_zone0"
        drill.mkdir(parents=True)
        for directory in (tmp_path / "run/drill", drill.parent, drill):
            directory.chmod(0o755)
        for name, text in (("type", "cpu-thermal"), ("temp", "86000")):
            (drill / name).write_text(text)
            (drill / name).chmod(0o644)
        until(lambda: stage.batch_limit < 4)
        until(lambda: stage.told()[-1]["temperature_celsius"] == 86.0)
        (drill / "temp").unlink()  # the drill is over
        until(lambda: stage.batch_limit == 4)
        until(lambda: stage.told()[-1]["temperature_celsius"] == 45.0)
        beat = read_beat(tmp_path / "run" / FILE_NAME)
        assert beat is not None and beat.pid == os.getpid()
    finally:
        house.runner.stop()
        thread.join(WAIT_SECONDS)
    assert not thread.is_alive()
