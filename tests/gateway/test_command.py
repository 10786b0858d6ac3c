"""`fleet gateway` as a process: what it says when it can't serve."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.gateway.site import Pki, config_data


def start_gateway(directory: Path, data: dict[str, Any] | str, *options: str) -> subprocess.CompletedProcess[str]:
    file = directory / "gateway.json"
    file.write_text(data if isinstance(data, str) else json.dumps(data))
    command = [sys.executable, "-m", "fleet.cli.main", "gateway", "--config", str(file), *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_check_reads_everything_and_stops(directory: Path, pki: Pki) -> None:
    result = start_gateway(directory, config_data(directory, pki), "--check")
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")


@pytest.mark.parametrize(
    ("damage", "code", "said"),
    [
        ("{", 78, "gateway.json: no JSON: Expecting"),
        ({"timing": {}}, 78, "ring_connect_seconds' is missing"),
        ({"api_keys_file": "/nonexistent/keys.json"}, 78, "/nonexistent/keys.json"),
        ({"tls": {"ca": "/nonexistent", "certificate": "/none.crt", "key": "/none.key"}}, 1, "/none.crt"),
        ({"listen": {"host": "192.0.2.1", "port": 8443}}, 1, "cannot listen on 192.0.2.1:8443"),
    ],
)
def test_what_is_wrong_is_said_in_two_lines(
    directory: Path, pki: Pki, damage: dict[str, Any] | str, code: int, said: str
) -> None:
    good = config_data(directory, pki)
    result = start_gateway(directory, damage if isinstance(damage, str) else {**good, **damage})
    assert result.returncode == code
    assert said in result.stderr
    assert "\n  next: " in result.stderr
    assert "Traceback" not in result.stderr
