"""stage.json: a wrong one ends with exit code 78 and a line that names file and key."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fleet.errors import ExitCode, FleetError
from stage_runtime.server.config import load_config
from tests.stage_runtime.site import StageSite


@pytest.fixture
def raw(tmp_path: Path) -> dict[str, Any]:
    site = StageSite(tmp_path, tmp_path, "d" * 64, layers=6, tied=True, spares=1)
    copied: dict[str, Any] = json.loads(json.dumps(site.config("box2")))  # tests change it deep inside
    return copied


def write(directory: Path, raw: Any) -> Path:
    path = directory / "stage.json"
    path.write_text(raw if isinstance(raw, str) else json.dumps(raw))
    return path


def test_a_good_one(tmp_path: Path, raw: dict[str, Any]) -> None:
    config = load_config(write(tmp_path, raw))
    assert (config.coordinator.box, config.policy, config.memory_keep_free_bytes) == ("control", "exact", 0)
    assert config.link_timing.silence_seconds == raw["timing"]["ring_silence_seconds"]


def edit(path: str, value: Any) -> Callable[[dict[str, Any]], None]:
    """Set a dotted key; None as value deletes it."""

    def change(raw: dict[str, Any]) -> None:
        *parents, last = path.split(".")
        for key in parents:
            raw = raw[int(key)] if isinstance(raw, list) else raw[key]
        if value is None:
            del raw[last]
        else:
            raw[last] = value

    return change


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (edit("threads", None), "key 'threads' is missing"),
        (edit("threads", "2"), "threads: read '2'"),
        (edit("threads", True), "threads: read True"),
        (edit("threads", 0), "threads: read 0, expected an integer from 1"),
        (edit("thread", 1), "unknown key 'thread', did you mean 'threads'?"),
        (edit("schema", 1), "schema: read 1, this version knows 2"),
        (edit("memory_keep_free_bytes", -1), "memory_keep_free_bytes: read -1, expected an integer from 0"),
        (edit("kernel", "int4"), "kernel: read 'int4', expected auto or dense or packed"),
        (edit("policy", "int8"), "policy: read 'int8', expected exact"),
        (edit("plan", {}), "unknown key 'plan'"),
        (edit("coordinator.box", None), "key 'coordinator.box' is missing"),
        (edit("coordinator.port", 0), "coordinator.port: read 0, expected an integer from 1"),
        (edit("ring.port", 70000), "ring.port: read 70000, expected an integer from 1"),
        (edit("ring.hosts", "x"), "unknown key 'ring.hosts', did you mean 'host'?"),
        (edit("tls.key", None), "key 'tls.key' is missing"),
        (edit("timing.ring_ping_seconds", None), "key 'timing.ring_ping_seconds' is missing"),
        (edit("timing.ring_silence_least_seconds", None), "key 'timing.ring_silence_least_seconds' is missing"),
        (edit("timing.heartbeat_seconds", 0), "timing.heartbeat_seconds: read 0"),
        (edit("timing.drain_seconds", "long"), "timing.drain_seconds: read 'long'"),
    ],
)
def test_wrong_ones(tmp_path: Path, raw: dict[str, Any], change: Callable[[dict[str, Any]], None], reason: str) -> None:
    change(raw)
    path = write(tmp_path, raw)
    with pytest.raises(FleetError) as error:
        load_config(path)
    assert error.value.exit_code == ExitCode.INVALID_INVENTORY
    assert str(path) in error.value.message
    assert reason in error.value.message


@pytest.mark.parametrize("text", ["", "{", "[]", "nul", '{"schema": 1}', "\ufeff{}"])
def test_files_that_are_no_configuration(tmp_path: Path, text: str) -> None:
    with pytest.raises(FleetError, match=r"stage\.json: "):
        load_config(write(tmp_path, text))


def test_the_command_exits_78_without_a_traceback_or_torch(tmp_path: Path) -> None:
    command = [sys.executable, "-X", "importtime", "-m", "stage_runtime", "--config", str(tmp_path / "none.json")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 78
    assert "none.json: No such file" in done.stderr
    assert "Traceback" not in done.stderr
    assert " torch\n" not in done.stderr


def test_help_shows_examples() -> None:
    done = subprocess.run([sys.executable, "-m", "stage_runtime", "--help"], capture_output=True, text=True, check=True)
    assert done.stdout.count("python -m stage_runtime") >= 3
