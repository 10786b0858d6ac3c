"""Benchmarks run and print every row; how fast is not asserted, because the machine of a test is never quiet."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.stage_runtime.tiny import make_model

ROOT = Path(__file__).resolve().parents[2]
DEADLINE_SECONDS = 300.0
RING_ONLY = ("memory (PSS), second stage", "memory (PSS), third stage")
STAGES_ONLY = ("beside compute", "compute of all stages", "start to ready", "memory (PSS), first stage")
EVERYONE = (
    "decode, 1 request",
    "decode, 6 requests in flight",
    "prefill of 66 tokens",
    "first token of 1 request",
)


def test_decode_prints_every_row(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model", tied=True)
    command = [sys.executable, "-m", "benchmarks.decode", str(model.directory), "--quick", "--fresh"]
    finished = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=DEADLINE_SECONDS, check=False)
    assert finished.returncode == 0, finished.stderr
    lines = finished.stdout.splitlines()
    assert any(line.startswith("at start: load average ") for line in lines)
    assert any(line.startswith("n = 1 rounds") for line in lines)
    for names, figures in ((RING_ONLY, 1), (STAGES_ONLY, 2), (EVERYONE, 5)):
        for name in names:
            (line,) = [line for line in lines if line.startswith(name)]
            values = [float(word) for word in line[line.index("  ") :].split()]
            assert len(values) == figures, line
            assert all(value > 0 for value in values), line
