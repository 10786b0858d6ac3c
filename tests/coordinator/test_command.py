"""`fleet coordinator` as a process: what it says when it can't work."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.coordinator.site import config_data
from tests.stage_runtime.pki import SiteCa


def start(directory: Path, data: dict[str, Any] | str, *options: str) -> subprocess.CompletedProcess[str]:
    file = directory / "coordinator.json"
    file.write_text(data if isinstance(data, str) else json.dumps(data))
    command = [sys.executable, "-m", "fleet.cli.main", "coordinator", "--config", str(file), *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_check_reads_everything_and_writes_nothing(tmp_path: Path, ca: SiteCa) -> None:
    result = start(tmp_path, config_data(tmp_path / "state", ca), "--check")
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")
    assert not (tmp_path / "state").exists()


@pytest.mark.parametrize(
    ("damage", "code", "said"),
    [
        ("{", 78, "coordinator.json: no JSON: Expecting"),
        ({"timing": {}}, 78, "timing."),
        ({"tls": {"ca": "/nonexistent", "certificate": "/none.crt", "key": "/none.key"}}, 1, "/none.crt"),
        ({"listen": {"host": "192.0.2.1", "port": 7402}}, 1, "cannot listen on 192.0.2.1:7402"),
        ({"http": {"host": "192.0.2.1", "port": 7405}}, 1, "cannot listen on 192.0.2.1:7405"),
        ({"state_directory": "/dev/null/state"}, 1, "/dev/null/state"),
    ],
)
def test_what_is_wrong_is_said_in_two_lines(
    tmp_path: Path, ca: SiteCa, damage: dict[str, Any] | str, code: int, said: str
) -> None:
    result = start(tmp_path, damage if isinstance(damage, str) else {**config_data(tmp_path, ca), **damage})
    assert result.returncode == code
    assert said in result.stderr
    assert "\n  next: " in result.stderr
    assert "Traceback" not in result.stderr


def test_it_needs_neither_torch_nor_pydantic() -> None:
    code = (
        "import sys, fleet.coordinator.run, fleet.cli.coordinator; "
        "print([name for name in ('torch', 'pydantic', 'yaml', 'fabric', 'tokenizers') if name in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert result.stdout.strip() == "[]"
