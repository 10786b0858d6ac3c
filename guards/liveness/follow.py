"""What a look adds to the memory of a program. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from guards.liveness.looks import Look
from guards.liveness.memory import ProgramMemory, recent

STOPPED_BY_SIGNAL, WAITS_IN_KERNEL = "T", "D"  # state letters of proc(5)
DOWN = frozenset({"STOPPED", "EXITED", "FATAL", "UNKNOWN"})


def follow(look: Look, memory: ProgramMemory, now_seconds: float) -> ProgramMemory:
    """The memory with this look added."""
    memory = replace(
        memory,
        mended=recent(memory.mended, now_seconds),
        started=recent(memory.started, now_seconds),
        restarts=recent(memory.restarts, now_seconds),
    )
    if look.pid > 0 and (look.pid, look.start) != (memory.pid, memory.start):
        memory = _new_process(look, memory, now_seconds)
    blocked = look.kernel_state == WAITS_IN_KERNEL
    return replace(
        _progress(look, memory, now_seconds),
        silent_rounds=memory.silent_rounds + 1 if look.silence else 0,
        held_rounds=memory.held_rounds + 1 if look.kernel_state == STOPPED_BY_SIGNAL else 0,
        down_rounds=memory.down_rounds + 1 if look.state in DOWN else 0,
        blocked_since=_since(memory.blocked_since, now_seconds) if blocked else None,
        stopped_since=_since(memory.stopped_since, now_seconds) if look.state == "STOPPED" else None,
        away_since=_since(memory.away_since, now_seconds) if look.state != "RUNNING" else None,
    )


def _new_process(look: Look, memory: ProgramMemory, now_seconds: float) -> ProgramMemory:
    """Another process than at the last look. After a restart of the guards nobody knows whether it is another; where we
    wanted that, it counts as if."""
    mended = memory.mended
    if memory.restarting:
        mended = (*mended, now_seconds)
    restarts = (*memory.restarts, now_seconds) if memory.pid > 0 else memory.restarts
    return ProgramMemory(
        look.pid, look.start, away_since=memory.away_since, mended=mended, started=memory.started, restarts=restarts
    )


def _progress(look: Look, memory: ProgramMemory, now_seconds: float) -> ProgramMemory:
    answer = look.answer
    if answer is None or look.silence:
        return memory
    progress = answer.get("progress")
    counter = progress if type(progress) is int else None
    idle = number(answer, "working_seconds") == 0 and number(answer, "open_sequences") == 0
    moved = counter is not None and counter != memory.progress
    since = None if idle else now_seconds if moved or memory.still_since is None else memory.still_since
    return replace(memory, progress=counter, still_since=since)


def _since(before: float | None, now_seconds: float) -> float:
    return now_seconds if before is None else before


def number(answer: Mapping[str, Any], key: str) -> float:
    """A figure of a health document; 0 where it has none."""
    value = answer.get(key)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        return 0.0
    return float(value)
