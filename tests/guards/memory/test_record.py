from __future__ import annotations

import json
import os
import subprocess
import threading
from pathlib import Path
from socketserver import StreamRequestHandler, ThreadingUnixStreamServer

import pytest

from tests.guards.memory.record import main, read_trace

HEALTH = {"kv_bytes": 1000, "weight_bytes": 2000, "open_sequences": 3, "rss_bytes": 4000, "state": "ready"}


class Admin(StreamRequestHandler):
    """Answers every line with the health document."""

    def handle(self) -> None:
        while self.rfile.readline():
            self.wfile.write(json.dumps(HEALTH).encode() + b"\n")


def test_a_recording_can_be_read(tmp_path: Path) -> None:
    socket, output = tmp_path / "a", tmp_path / "trace.jsonl"
    with ThreadingUnixStreamServer(str(socket), Admin) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        code = main([str(os.getpid()), str(socket), str(output), "--period", "0.01", "--seconds", "0.05"])
        server.shutdown()
    assert code == 0
    first, *_ = read_trace(output)
    assert (first.kv_bytes, first.weight_bytes, first.open_sequences) == (1000, 2000, 3)
    assert first.retained_bytes > 1_000_000
    assert set(json.loads(output.read_text(encoding="utf-8").splitlines()[0])) == {
        *("running_seconds", "retained_bytes", "kv_bytes", "weight_bytes", "open_sequences", "rss_bytes"),
    }


def test_a_stage_that_is_silent_leaves_no_line(tmp_path: Path) -> None:
    output = tmp_path / "trace.jsonl"
    assert main([str(os.getpid()), str(tmp_path / "none"), str(output), "--period", "0.01", "--seconds", "0.02"]) == 0
    with pytest.raises(ValueError, match="no samples"):
        read_trace(output)


def test_a_recording_ends_with_the_process(tmp_path: Path) -> None:
    ended = subprocess.Popen(["true"])
    ended.wait()
    assert main([str(ended.pid), str(tmp_path / "none"), str(tmp_path / "trace.jsonl")]) == 0
