"""What the judgement of a program needs of earlier looks. Frozen; only past starts and kills outlive the process."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from guards.settings import DAY_SECONDS


@dataclass(frozen=True)
class ProgramMemory:
    """Times are running-clock seconds.

    Attributes:
        pid, start: of the last process that was seen; 0: none yet.
        silent_rounds, held_rounds, down_rounds: looks in a row in which it did not answer, was stopped by SIGSTOP, had
            ended.
        blocked_since: it waits in the kernel, at every look since then. stopped_since: somebody stopped it then.
            away_since: supervisord has not said RUNNING since then.
        progress: its counter of finished work. still_since: that has not moved since then, although there was work.
        restarting: we want it restarted, so a stop that is not followed by a start is ours to mend.
        mended: when a process that we wanted restarted or killed was replaced. started: when we asked for a start.
        restarts: when its process was replaced, for whatever reason.
    """

    pid: int = 0
    start: int = 0
    silent_rounds: int = 0
    held_rounds: int = 0
    down_rounds: int = 0
    blocked_since: float | None = None
    stopped_since: float | None = None
    away_since: float | None = None
    progress: int | None = None
    still_since: float | None = None
    restarting: bool = False
    mended: tuple[float, ...] = ()
    started: tuple[float, ...] = ()
    restarts: tuple[float, ...] = ()


@dataclass(frozen=True)
class LivenessMemory:
    """Of all programs. silent_rounds: looks in a row in which supervisord did not answer."""

    programs: Mapping[str, ProgramMemory] = field(default_factory=dict)
    silent_rounds: int = 0


def within(times: tuple[float, ...], now_seconds: float, seconds: float) -> int:
    """How many of the times are so recent."""
    return sum(now_seconds - each < seconds for each in times)


def recent(times: tuple[float, ...], now_seconds: float) -> tuple[float, ...]:
    """Those of the last day; no bound of ours looks further back."""
    return tuple(each for each in times if now_seconds - each < DAY_SECONDS)


def to_json(memory: LivenessMemory) -> dict[str, Any]:
    """For the store."""
    return {
        name: {
            "restarting": each.restarting,
            "mended": list(each.mended),
            "started": list(each.started),
            "restarts": list(each.restarts),
        }
        for name, each in memory.programs.items()
    }


def from_json(data: Mapping[str, Any]) -> LivenessMemory:
    """From the store; raises as `guards.guard.Guard` says."""
    return LivenessMemory(
        {
            str(name): ProgramMemory(
                restarting=bool(each["restarting"]),
                mended=_times(each["mended"]),
                started=_times(each["started"]),
                restarts=_times(each["restarts"]),
            )
            for name, each in data.items()
        }
    )


def _times(data: Any) -> tuple[float, ...]:
    return tuple(sorted(float(each) for each in data))
