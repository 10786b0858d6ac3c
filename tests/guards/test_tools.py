"""Other people's tools: late ones, those that say too much, and those that leave a child behind."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from guards.roots import Roots
from guards.tools import MOST_OUTPUT_BYTES, ToolFailed, ToolMissing, run_tool

WAIT_SECONDS = 20.0


@pytest.fixture
def roots(tmp_path: Path) -> Roots:
    return Roots(path=f"{tmp_path}:/usr/bin:/bin")


def tool(directory: Path, script: str) -> None:
    path = directory / "tool"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


def test_what_it_answers(tmp_path: Path, roots: Roots) -> None:
    tool(tmp_path, "echo $LC_ALL $1; printf '\\377' ; echo first >&2; echo second >&2; exit 3")
    output = run_tool(roots, "tool", "x", deadline_seconds=WAIT_SECONDS)
    assert (output.code, output.text, output.error) == (3, "C x\n\ufffd", "first")
    with pytest.raises(ToolMissing, match="no-such-tool"):
        run_tool(roots, "no-such-tool", deadline_seconds=1.0)


def test_one_that_never_stops_talking_is_cut_short(tmp_path: Path, roots: Roots) -> None:
    tool(tmp_path, f"head -c {3 * MOST_OUTPUT_BYTES} /dev/zero | tr '\\0' x")
    assert len(run_tool(roots, "tool", deadline_seconds=WAIT_SECONDS).text) == MOST_OUTPUT_BYTES
    tool(tmp_path, "exec cat /dev/zero")
    with pytest.raises(ToolFailed, match=r"tool did not answer within 0\.3 s"):
        run_tool(roots, "tool", deadline_seconds=0.3)


def test_a_child_that_it_leaves_behind_is_not_waited_for(tmp_path: Path, roots: Roots) -> None:
    tool(tmp_path, f"sleep 1000 & echo $! > {tmp_path}/child; echo done")
    with pytest.raises(ToolFailed, match=r"did not answer within 0\.5 s"):
        run_tool(roots, "tool", deadline_seconds=0.5)
    os.kill(int((tmp_path / "child").read_text()), signal.SIGKILL)


def test_one_that_no_signal_ends_is_not_begun_again_until_it_has_ended(
    tmp_path: Path, roots: Roots, monkeypatch: pytest.MonkeyPatch
) -> None:
    tool(tmp_path, f"echo begun >> {tmp_path}/begun; exec sleep 1000")
    monkeypatch.setattr("guards.tools.KILL_SECONDS", 0.05)
    started: list[subprocess.Popen[bytes]] = []

    def hold(process: subprocess.Popen[bytes]) -> None:
        started.append(process)

    with monkeypatch.context() as patch:  # a process in state D takes no signal; no test can make one
        patch.setattr(subprocess.Popen, "kill", hold)
        with pytest.raises(ToolFailed, match="did not answer within"):
            run_tool(roots, "tool", "stuck", deadline_seconds=1.0)
    with pytest.raises(ToolFailed, match=f"still hangs from the last time, as process {started[0].pid}"):
        run_tool(roots, "tool", "stuck", deadline_seconds=1.0)
    os.kill(started[0].pid, signal.SIGKILL)
    tool(tmp_path, "echo well")
    end = time.monotonic() + WAIT_SECONDS
    while True:
        try:
            assert run_tool(roots, "tool", "stuck", deadline_seconds=WAIT_SECONDS).text == "well\n"
            break
        except ToolFailed:
            assert time.monotonic() < end
            time.sleep(0.02)
    assert (tmp_path / "begun").read_text() == "begun\n"
