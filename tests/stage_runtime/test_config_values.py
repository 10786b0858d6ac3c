"""Every key of stage.json and gateway.json with wrong values: one clear message, exit code 78, no crash."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from fleet.errors import ExitCode, FleetError
from fleet.gateway.config import load_config as load_gateway
from fleet.inventory.model import Timing
from stage_runtime.server.config import load_config as load_stage
from tests.stage_runtime.site import StageSite

WRONG: list[Any] = [None, True, -1, 1.5, "", "x", [], {}, [1], {"a": 1}, math.nan, math.inf, 10**30, "9" * 5000]
Path_ = tuple[str | int, ...]


def stage(directory: Path) -> dict[str, Any]:
    site = StageSite(directory, directory, "d" * 64, layers=6, tied=True)
    copied: dict[str, Any] = json.loads(json.dumps(site.config("box2")))
    return copied


def gateway(directory: Path) -> dict[str, Any]:
    pipeline = {
        "model": "tiny",
        "model_directory": str(directory),
        "model_digest": "d" * 64,
        "policy": "exact",
        "max_tokens_per_sequence": 10,
        "max_sequences": 2,
    }
    return {
        "schema": 2,
        "site": "lab",
        "box": "control",
        "pipelines": {"main": pipeline},
        "coordinator": {"box": "control", "host": "127.0.0.1", "port": 7402},
        "listen": {"host": "127.0.0.1", "port": 8443},
        "loopback": {"host": "127.0.0.1", "port": 8080},
        "tls": {"ca": "ca.crt", "certificate": "box.crt", "key": "box.key"},
        "api_keys_file": "keys.json",
        "journal_directory": str(directory),
        "max_queued_requests": 4,
        "request_timeout_seconds": 3.0,
        "first_token_timeout_seconds": 2.0,
        "replan_wait_seconds": 3.0,
        "keep_alive_seconds": 1.0,
        "resume_max_seconds": 60.0,
        "resume_max_streams": 2,
        "clock_synchronised_file": None,
        "timing": Timing().model_dump(),
    }


def read_gateway(path: Path) -> object:
    return load_gateway(path)


def places(data: Any, above: Path_ = ()) -> Iterator[Path_]:
    """Every key and index, at any depth."""
    for key in data if isinstance(data, dict) else range(len(data)):
        yield (*above, key)
        if isinstance(data[key], (dict, list)):
            yield from places(data[key], (*above, key))


@pytest.mark.parametrize(("build", "load"), [(stage, load_stage), (gateway, read_gateway)])
def test_wrong_values_are_named_and_never_crash(
    tmp_path: Path, build: Callable[[Path], dict[str, Any]], load: Callable[[Path], object]
) -> None:
    good = build(tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(good))
    load(file)
    for place in places(good):
        for value in WRONG:
            data = copy.deepcopy(good)
            inner = data
            for key in place[:-1]:
                inner = inner[key]  # type: ignore[index]
            inner[place[-1]] = value  # type: ignore[index]
            file.write_text(json.dumps(data))
            try:
                load(file)
            except FleetError as error:
                assert error.exit_code == ExitCode.INVALID_INVENTORY
                assert "object" not in error.message, f"{place}: {error.message}"
                assert len(error.message) < 1000
            else:
                assert type(value) not in (list, dict), f"{place} may be {value!r}"
                assert place[0] != "timing" or value == 1.5, f"{place} may be {value!r}"


@pytest.mark.parametrize("load", [load_stage, read_gateway])
@pytest.mark.parametrize("text", ["[" * 100_000, '{"a":' * 100_000, "1" * 5000, '"x"', "null", "\xff"])
def test_files_that_are_no_configuration(tmp_path: Path, text: str, load: Callable[[Path], object]) -> None:
    file = tmp_path / "config.json"
    file.write_text(text, encoding="latin-1")
    with pytest.raises(FleetError) as error:
        load(file)
    assert error.value.exit_code == ExitCode.INVALID_INVENTORY
