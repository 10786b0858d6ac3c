"""Running tools with deadlines, and records of the processes that the lab started (pid and start time)."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.lab.errors import LabError, LabTimeoutError

TOOL_DEADLINE_SECONDS = 30.0
KILL_DEADLINE_SECONDS = 15.0  # a busy machine takes its time to unmount and reap
POLL_SECONDS = 0.02
_STAT_START_TIME_FIELD = 19  # proc(5): field 22, counted after the closing bracket of the command name


@dataclass(frozen=True)
class Result:
    """What a finished command gave back."""

    argv: tuple[str, ...]
    exit_code: int
    stdout: str
    stderr: str


def run(
    argv: Sequence[str],
    *,
    input_text: str | None = None,
    deadline_seconds: float = TOOL_DEADLINE_SECONDS,
    check: bool = True,
) -> Result:
    """Run a tool to its end and capture its output.

    Raises:
        LabError: the tool is not installed, or (`check`) it exited with another code than 0.
        LabTimeoutError: it still ran after `deadline_seconds`.
    """
    try:
        done = subprocess.run(
            list(argv),
            input=input_text,
            stdin=subprocess.DEVNULL if input_text is None else None,
            capture_output=True,
            text=True,
            errors="backslashreplace",
            check=False,
            timeout=deadline_seconds,
        )
    except FileNotFoundError:
        raise LabError(f"{argv[0]} is not installed", hint="run: python -m tests.lab.packages") from None
    except subprocess.TimeoutExpired:
        raise LabTimeoutError(f"{' '.join(argv)} still ran after {deadline_seconds:g} s") from None
    if check and done.returncode != 0:
        words = (done.stderr.strip() or done.stdout.strip() or "it said nothing")[-2000:]
        raise LabError(f"{' '.join(argv)} exited with {done.returncode}: {words}")
    return Result(tuple(argv), done.returncode, done.stdout, done.stderr)


def wait_until(condition: Callable[[], bool], what: str, deadline_seconds: float) -> None:
    """Poll `condition` until it holds.

    Raises:
        LabTimeoutError: naming `what`, when it does not hold in time.
    """
    end = time.monotonic() + deadline_seconds
    while not condition():
        if time.monotonic() > end:
            raise LabTimeoutError(f"{what}: not seen within {deadline_seconds:g} s")
        time.sleep(POLL_SECONDS)


def start_time(pid: int) -> int | None:
    """Clock ticks after boot at which the process started, None when there is none (a zombie counts as none)."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = stat.rpartition(")")[2].split()
    return None if fields[0] in "ZX" else int(fields[_STAT_START_TIME_FIELD])


@dataclass(frozen=True)
class ProcessRecord:
    """A process that the lab started; a later process with the same pid has another start time."""

    pid: int
    started_ticks: int

    @classmethod
    def of(cls, pid: int) -> ProcessRecord:
        """The record of a process that runs now.

        Raises:
            LabError: it has ended already.
        """
        ticks = start_time(pid)
        if ticks is None:
            raise LabError(f"process {pid} ended at once")
        return cls(pid, ticks)

    @classmethod
    def load(cls, file: Path) -> ProcessRecord | None:
        """The record in `file`; None when there is none, or it was torn by a power cut of the host."""
        try:
            data = json.loads(file.read_text(encoding="utf-8"))
            return cls(int(data["pid"]), int(data["started_ticks"]))
        except (FileNotFoundError, ValueError, KeyError, TypeError):
            return None

    def save(self, file: Path) -> None:
        """Write the record to `file`."""
        text = json.dumps({"pid": self.pid, "started_ticks": self.started_ticks})
        file.write_text(text, encoding="utf-8")

    @property
    def alive(self) -> bool:
        return start_time(self.pid) == self.started_ticks

    def kill(self, number: int = signal.SIGKILL) -> None:
        """Send a signal, unless the process is gone or its pid belongs to another by now."""
        if self.alive:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def end(self, what: str) -> None:
        """SIGTERM, SIGKILL after a while, and wait until it is gone."""
        self.kill(signal.SIGTERM)
        try:
            wait_until(lambda: not self.alive, what, KILL_DEADLINE_SECONDS)
        except LabTimeoutError:
            self.kill()
            wait_until(lambda: not self.alive, what, KILL_DEADLINE_SECONDS)


def children(pid: int) -> list[int]:
    """Pids of the children of the process' first thread; empty when it is gone."""
    try:
        return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii").split()]
    except (FileNotFoundError, ProcessLookupError):
        return []


def command_name(pid: int) -> str:
    """The process' `comm`, empty when it is gone."""
    try:
        return Path(f"/proc/{pid}/comm").read_text(encoding="utf-8", errors="replace").strip()
    except (FileNotFoundError, ProcessLookupError):
        return ""
