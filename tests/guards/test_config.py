"""guards.json is read strictly; the settings in it are complete."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from fleet.errors import FleetError
from guards.config import Watched, load_config
from guards.settings import GuardSettings
from stage_runtime.link.configuration import Address


def document() -> dict[str, Any]:
    return {
        "schema": 1,
        "site": "site",
        "box": "box1",
        "listen": {"host": "127.0.0.1", "port": 7404},
        "tls": {"ca": "/pki/ca.crt", "certificate": "/pki/box.crt", "key": "/pki/box.key"},
        "clock_synchronised_file": None,
        "state_directory": "/state/guards",
        "supervisor_socket": "/run/fleet/supervisor.sock",
        "programs": [
            {"name": "stage", "admin_socket": "/run/fleet/stage.sock"},
            {"name": "gateway", "http": {"host": "127.0.0.1", "port": 8080}},
            {"name": "coordinator", "https": {"host": "192.0.2.1", "port": 7405}},
            {"name": "other"},
        ],
        "stage": {"admin_socket": "/run/fleet/stage.sock", "pipeline": "main"},
        "coordinator": {"box": "control", "host": "192.0.2.1", "port": 7405},
        "log_directory": "/var/log/fleet",
        "directories": ["/opt/fleet"],
        "time_servers": ["192.0.2.1"],
        "build_unix_seconds": 1_790_000_000,
        "link_mbit_per_second": 1000.0,
        "mac": None,
        "stop_seconds": 35.0,
        "ready_seconds": 120,
        "observe": False,
        "settings": dataclasses.asdict(GuardSettings()),
    }


def write(directory: Path, data: object) -> Path:
    path = directory / "guards.json"
    path.write_text(json.dumps(data))
    return path


def test_a_whole_file(tmp_path: Path) -> None:
    config = load_config(write(tmp_path, document()))
    assert config.stage is not None
    assert config.stage.pipeline == "main"
    assert config.settings == GuardSettings()
    assert config.build_unix_seconds == 1.79e9
    stage, gateway, coordinator, other = config.programs
    assert (stage.admin_socket, stage.http) == (Path("/run/fleet/stage.sock"), None)
    assert (gateway.http, coordinator.https) == (Address("127.0.0.1", 8080), Address("192.0.2.1", 7405))
    assert other == Watched("other")
    alone = document() | {"stage": None, "coordinator": None, "mac": "02:77:00:00:00:01"}
    config = load_config(write(tmp_path, alone))
    assert (config.stage, config.coordinator, config.mac) == (None, None, "02:77:00:00:00:01")


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"schema": 2}, "schema: read 2, this version knows 1"),
        ({"boxx": "a"}, "unknown key 'boxx', did you mean 'box'?"),
        ({"observe": "no"}, "observe: read 'no', expected true or false"),
        ({"build_unix_seconds": "now"}, "build_unix_seconds: read 'now', expected a number from 0 on"),
        ({"programs": [""]}, "programs[0]: read '', expected a mapping"),
        ({"programs": [{"name": "p"}] * 65}, "programs: read 65, expected at most 64"),
        (
            {"programs": [{"name": "p", "admin_socket": "/s", "http": {"host": "a", "port": 1}}]},
            "program p: read admin_socket and http, expected one of them at most",
        ),
        ({"stage": {"admin_socket": "/s"}}, "key 'stage.pipeline' is missing"),
        ({"settings": {}}, "key 'settings.thermal' is missing"),
    ],
)
def test_complaints_name_the_key(tmp_path: Path, change: dict[str, Any], complaint: str) -> None:
    with pytest.raises(FleetError) as caught:
        load_config(write(tmp_path, document() | change))
    assert caught.value.message.endswith(complaint)
    assert caught.value.exit_code == 78
    assert "fleet provision" in caught.value.hint


def test_settings_are_complete_and_nothing_else(tmp_path: Path) -> None:
    data = document()
    del data["settings"]["clock"]["query_seconds"]
    with pytest.raises(FleetError, match=r"key 'settings\.clock\.query_seconds' is missing"):
        load_config(write(tmp_path, data))
    data["settings"]["clock"] |= {"query_seconds": 3.0, "quarry_seconds": 3.0}
    with pytest.raises(FleetError, match=r"unknown key 'settings\.clock\.quarry_seconds'"):
        load_config(write(tmp_path, data))


@pytest.mark.parametrize("wrong", [True, "80", None, -1, float("nan"), float("inf"), 10**400])
def test_settings_are_numbers_and_complaints_name_the_whole_path(tmp_path: Path, wrong: object) -> None:
    data = document()
    data["settings"]["thermal"]["high_celsius"] = wrong
    with pytest.raises(FleetError, match=r"settings\.thermal\.high_celsius(: read '|' is missing)"):
        load_config(write(tmp_path, data))


def test_a_guard_without_a_pause_is_refused(tmp_path: Path) -> None:
    data = document()
    data["settings"]["liveness"]["period_seconds"] = 0
    with pytest.raises(FleetError, match=r"settings\.liveness\.period_seconds: read 0, expected at least 0\.1"):
        load_config(write(tmp_path, data))
