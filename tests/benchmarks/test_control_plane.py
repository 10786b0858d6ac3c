"""The benchmark of the control plane runs and prints every row; how fast is not asserted."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_control_plane_prints_every_row() -> None:
    command = [sys.executable, "-m", "benchmarks.control_plane", "--quick", "--fresh", "--stages", "4"]
    finished = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert finished.returncode == 0, finished.stderr
    rows = ("coordinator, %", "asyncio TLS sink", "whole plan", "merge after the loss", "merge worked out beforehand")
    for row in (*rows, "coordinator ÷ sink"):
        assert any(line.startswith(row) for line in finished.stdout.splitlines()), row
