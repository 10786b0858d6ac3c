"""One look at the programs of a box: what supervisord, the kernel and each program itself say. No judgement."""

from __future__ import annotations

import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol

from fleet.provision.agent.errors import AgentError
from guards.roots import Roots

# /proc/<pid>/stat after the command's closing bracket (proc(5)): field 3 is the state, 22 the start time.
START_TICKS_FIELD = 22 - 3


class Programs(Protocol):
    """What is needed of supervisord; `fleet.provision.agent.rpc.SupervisorRpc` has it."""

    def programs(self) -> Mapping[str, Mapping[str, Any]]:
        """Program name → ProcessInfo: statename, pid, start, spawnerr …

        Raises:
            AgentError: supervisord does not answer.
        """


class Probe(Protocol):
    """Asks a program whether it lives (`guards/liveness/probes.py`)."""

    def ask(self, pid: int) -> Mapping[str, Any]:
        """Its health document, empty if it has none, or {"error": why} when there is no answer.

        Args:
            pid: of the program; an answer of another process is none.
        """


@dataclass(frozen=True)
class Look:
    """A program.

    Attributes:
        state: supervisord's: STOPPED, STARTING, RUNNING, BACKOFF, STOPPING, EXITED, FATAL, UNKNOWN.
        pid: 0: none. start: supervisord's wall-clock second of the last start; only whether it changes counts.
        why_not: why supervisord could not start it; empty otherwise.
        kernel_state: letter of /proc/<pid>/stat, "T": stopped by a signal, "D": waits in the kernel; empty: not known.
        age_seconds: since its process began, by the kernel's clock since boot, which no time server moves; None: not
            known.
        answer: its health document, {"error": why}, or None if it was not asked: it does not run, or has no probe.
    """

    state: str
    pid: int
    start: int
    why_not: str = ""
    kernel_state: str = ""
    age_seconds: float | None = None
    answer: Mapping[str, Any] | None = None

    @property
    def silence(self) -> str:
        """Why it did not answer; empty if it did, or was not asked."""
        return "" if self.answer is None else str(self.answer.get("error", ""))[:200]


@dataclass(frozen=True)
class LivenessReading:
    """All programs, or the problem that kept supervisord from telling."""

    programs: Mapping[str, Look]
    problem: str = ""


def look_at_programs(supervisor: Programs, probes: Mapping[str, Probe], roots: Roots) -> LivenessReading:
    """Ask supervisord, then all programs at once, so that one that is silent costs the others no time."""
    try:
        infos = supervisor.programs()
    except AgentError as error:
        return LivenessReading({}, str(error)[:300])
    asked = {
        name: int(info["pid"])
        for name, info in infos.items()
        if name in probes and info["statename"] == "RUNNING" and int(info["pid"]) > 0
    }
    answers: dict[str, Mapping[str, Any]] = {}
    if asked:
        with ThreadPoolExecutor(len(asked), "probe") as pool:
            waiting = {name: pool.submit(_ask, probes[name], pid) for name, pid in asked.items()}
            answers = {name: future.result() for name, future in waiting.items()}
    uptime = _uptime_seconds(roots)
    return LivenessReading({name: _look(info, answers.get(name), roots, uptime) for name, info in infos.items()})


def _ask(probe: Probe, pid: int) -> Mapping[str, Any]:
    try:
        return probe.ask(pid)
    except Exception as error:  # whatever a program answers, it is that program's fault alone
        return {"error": f"{type(error).__name__}: {error}"[:200]}


def _look(info: Mapping[str, Any], answer: Mapping[str, Any] | None, roots: Roots, uptime: float | None) -> Look:
    pid = int(info["pid"])
    state, age = process_state(roots, pid, uptime) if pid > 0 else ("", None)
    return Look(
        str(info["statename"]), pid, int(info["start"]), str(info.get("spawnerr", ""))[:200], state, age, answer
    )


def process_state(roots: Roots, pid: int, uptime_seconds: float | None) -> tuple[str, float | None]:
    """State letter and age in seconds of a process; empty and None where they can't be told."""
    try:
        text = (roots.proc / str(pid) / "stat").read_text(encoding="utf-8", errors="replace")
        # the command may hold blanks and brackets: the last bracket ends it
        fields = text.rpartition(")")[2].split()
        started = int(fields[START_TICKS_FIELD]) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError):
        return "", None
    return fields[0], None if uptime_seconds is None else max(0.0, uptime_seconds - started)


def _uptime_seconds(roots: Roots) -> float | None:
    try:
        return float((roots.proc / "uptime").read_text(encoding="ascii").split()[0])
    except (OSError, ValueError, IndexError):
        return None
