"""The guard of memory: leaks of the stage, pressure on the box and its GPUs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

from guards.budgets import Budget
from guards.deadline import DeadlineReader
from guards.findings import Action, Decision, Finding, Repair, State
from guards.guard import ActionFailed
from guards.memory.gpu import GpuMemory, Gpus
from guards.memory.headroom import Headroom, read_headroom
from guards.memory.leak import SETTLING, Leak, LeakState, found_leak, resolution
from guards.memory.pressure import judge_box, judge_gpu, must_shed
from guards.memory.process import Gone, ProcessMemory, Unreadable, read_process
from guards.memory.windows import Run, Sample, observe
from guards.roots import Roots
from guards.settings import DAY_SECONDS, HOUR_SECONDS, MemorySettings

STAGE = "stage"
LEAK_RESTART = "leak-restart"
ROLLING_RESTART = "rolling-restart"
DEADLINE_SECONDS = 20.0


class Stage(Protocol):
    """What this guard needs of the stage of this box."""

    def pid(self) -> int | None:
        """Of the process that holds its memory; None if it does not run, or nobody can say."""

    def health(self) -> Mapping[str, Any] | None:
        """Its health document; None if it does not answer."""

    def trim(self) -> int:
        """Give freed memory back to the system; the bytes that became free. ActionFailed if it does not obey."""

    def shed_sequences(self, shedding: bool) -> None:
        """Take no new sequences, or take them again. ActionFailed if it does not obey."""


@dataclass(frozen=True)
class Declared:
    """What the stage says of itself.

    Attributes:
        kv_bytes: KV caches; the touched part, if it tells that apart. weight_bytes: weights as held.
        open_sequences: that it computes. shedding: whether it takes no new ones; None: it does not say.
    """

    kv_bytes: int
    weight_bytes: int
    open_sequences: int
    shedding: bool | None = None

    @staticmethod
    def of(document: Mapping[str, Any]) -> Declared | None:
        """From a health document of any make; None if it lacks a figure."""
        kv = _count(document.get("kv_used_bytes"))
        kv = _count(document.get("kv_bytes")) if kv is None else kv
        weights, sequences = _count(document.get("weight_bytes")), _count(document.get("open_sequences"))
        if kv is None or weights is None or sequences is None:
            return None
        shedding = document.get("shedding")
        return Declared(kv, weights, sequences, shedding if isinstance(shedding, bool) else None)


@dataclass(frozen=True)
class MemoryReading:
    """A look. None: not known, `stage_reason` says why."""

    headroom: Headroom
    gpus: tuple[GpuMemory, ...] = ()
    process: ProcessMemory | None = None
    declared: Declared | None = None
    stage_reason: str = ""


@dataclass(frozen=True)
class MemoryOfMemory:
    """What is remembered from round to round.

    Attributes:
        identity: of the stage's process. since_seconds: when it was first seen.
        run: what is kept of its memory; not over a restart of the guards.
        leak: the last verdict. leak_seconds: when a leak was last found in this process.
        asked_seconds, trimmed_seconds: when a restart, or a trim, was last asked for.
        shedding: new sequences must wait. told_seconds: when the stage was last told so, or that they need not.
    """

    identity: str = ""
    since_seconds: float = 0.0
    run: Run | None = None
    leak: Leak = SETTLING
    leak_seconds: float = -math.inf
    asked_seconds: float = -math.inf
    trimmed_seconds: float = -math.inf
    shedding: bool = False
    told_seconds: float = -math.inf


def budgets(settings: MemorySettings) -> dict[str, Budget]:
    """What restarts by this guard are paid from."""
    every_seconds = settings.rolling_restart_hours * HOUR_SECONDS
    rolling = math.ceil(DAY_SECONDS / every_seconds) if every_seconds > 0 else 0
    return {
        LEAK_RESTART: Budget(int(settings.restarts_per_day), DAY_SECONDS, settings.restart_apart_seconds),
        # a process younger than that is not restarted anyhow; the budget holds over whatever the guard forgets
        ROLLING_RESTART: Budget(rolling, DAY_SECONDS, every_seconds / 2.0),
    }


class MemoryGuard:
    """See the module and `guards/guard.py`.

    Args:
        stage: how to reach it.
    """

    name = "memory"
    deadline_seconds = DEADLINE_SECONDS

    def __init__(self, settings: MemorySettings, roots: Roots, stage: Stage) -> None:
        self.period_seconds = settings.period_seconds
        self._settings, self._roots, self._stage = settings, roots, stage
        reader = DeadlineReader(settings.gpu_deadline_seconds, settings.gpu_retry_seconds)
        self._gpus = Gpus(reader, settings.gpu_retry_seconds)

    def sense(self) -> MemoryReading:
        """Look at the box, its GPUs and the stage."""
        headroom, gpus = read_headroom(self._roots), self._gpus.read()
        pid = self._stage.pid()
        if pid is None:
            return MemoryReading(headroom, gpus, stage_reason="the stage does not run")
        try:
            process = read_process(self._roots, pid)
        except (Gone, Unreadable) as error:
            return MemoryReading(headroom, gpus, stage_reason=str(error))
        document = self._stage.health()
        declared = None if document is None else Declared.of(document)
        reason = "" if declared else "the stage does not say what it holds"
        return MemoryReading(headroom, gpus, process, declared, reason)

    def decide(self, reading: MemoryReading, memory: MemoryOfMemory, now_seconds: float) -> Decision[MemoryOfMemory]:
        """Judge; see `guards/memory/leak.py` and `guards/memory/pressure.py` for the rules."""
        settings = self._settings
        memory = _watch(reading, memory, now_seconds, settings)
        findings = [
            judge_box(reading.headroom, settings),
            *(judge_gpu(gpu, settings) for gpu in reading.gpus),
            _stage_finding(reading, memory, now_seconds, settings),
        ]
        actions = []
        for ask in (_ask_shed, _ask_trim, _ask_restart):
            action, memory = ask(reading, memory, now_seconds, settings)
            actions += [] if action is None else [action]
        return Decision(tuple(findings), tuple(actions), memory)

    def act(self, action: Action) -> str:
        """Trim or shed; programs are restarted by the runner."""
        if action.repair == Repair.TRIM_MEMORY:
            return f"the stage gave back {self._stage.trim() / 1e6:.1f} MB"
        if action.repair == Repair.SHED_SEQUENCES:
            shedding = bool(action.arguments["shedding"])
            self._stage.shed_sequences(shedding)
            return "new sequences wait" if shedding else "new sequences are taken again"
        raise ActionFailed(f"the memory guard can't {action.repair.value}")

    def first_memory(self) -> MemoryOfMemory:
        """Nothing seen yet."""
        return MemoryOfMemory()

    def memory_to_json(self, memory: MemoryOfMemory) -> Mapping[str, Any]:
        """The latch, and since when the process is known; days of samples aren't worth a write every two minutes."""
        return {"identity": memory.identity, "since_seconds": memory.since_seconds, "shedding": memory.shedding}

    def memory_from_json(self, data: Mapping[str, Any]) -> MemoryOfMemory:
        """The reverse; see `guards.guard.Guard`."""
        since = float(data["since_seconds"])
        if not math.isfinite(since):
            raise ValueError(f"since_seconds: read {since}")
        return MemoryOfMemory(identity=str(data["identity"]), since_seconds=since, shedding=bool(data["shedding"]))


def _watch(
    reading: MemoryReading, memory: MemoryOfMemory, now_seconds: float, settings: MemorySettings
) -> MemoryOfMemory:
    """The memory with this look at the stage's process; another process begins anew."""
    process, declared = reading.process, reading.declared
    if process is None:
        return memory
    if process.identity != memory.identity:
        # it may have forgotten what it was told
        told = replace(memory, identity=process.identity, since_seconds=now_seconds, told_seconds=-math.inf)
        memory = replace(told, run=None, leak=SETTLING, leak_seconds=-math.inf, asked_seconds=-math.inf)
    if declared is None:
        return memory
    sample = Sample(
        now_seconds, process.retained_bytes, declared.kv_bytes, declared.weight_bytes, declared.open_sequences
    )
    run = observe(memory.run, sample, settings)
    found = found_leak(run, settings)
    if found is not None:
        return replace(memory, run=run, leak=found, leak_seconds=now_seconds)
    if run.changed and not _leaks(memory, now_seconds, settings):
        return replace(memory, run=run, leak=resolution(run, settings))
    return replace(memory, run=run)


def _leaks(memory: MemoryOfMemory, now_seconds: float, settings: MemorySettings) -> bool:
    """Whether a leak was found in this process, and not so long ago that it would have been found again."""
    return now_seconds - memory.leak_seconds < max(HOUR_SECONDS, settings.least_window_seconds)


def _stage_finding(
    reading: MemoryReading, memory: MemoryOfMemory, now_seconds: float, settings: MemorySettings
) -> Finding:
    process, declared, leak = reading.process, reading.declared, memory.leak
    evidence = {
        "retained_bytes": None if process is None else process.retained_bytes,
        "kv_bytes": None if declared is None else declared.kv_bytes,
        "weight_bytes": None if declared is None else declared.weight_bytes,
        "slope_mb_per_hour": leak.mb_per_hour,
        "slope_low_mb_per_hour": leak.low_mb_per_hour,
        "slope_high_mb_per_hour": leak.high_mb_per_hour,
        "resolution_mb_per_day": leak.resolution_mb_per_day,
        "stretch_seconds": leak.stretch_seconds,
    }
    if process is None or declared is None:
        # whether it ought to run and answer is for the guard of programs to say
        return Finding(STAGE, State.INITIALISING, reading.stage_reason, evidence)
    if _leaks(memory, now_seconds, settings):
        bound = f"the bound is {settings.leak_mb_per_hour:g} MB/h"
        return Finding(STAGE, State.UNHEALTHY, f"{leak.text}; {bound}", evidence, Repair.RESTART_PROGRAM)
    state = State.HEALTHY if leak.state == LeakState.NONE else State.INITIALISING
    return Finding(STAGE, state, leak.text, evidence)


Asked = tuple[Action | None, MemoryOfMemory]


def _ask_shed(reading: MemoryReading, memory: MemoryOfMemory, now_seconds: float, settings: MemorySettings) -> Asked:
    """Tell the stage when the latch moves, and again as long as it says otherwise."""
    shedding = must_shed(reading.headroom, reading.gpus, memory.shedding, settings)
    moved = shedding != memory.shedding
    memory = replace(memory, shedding=shedding)
    if reading.declared is None:
        # nobody is there to be told; whoever comes is told at once
        return None, replace(memory, told_seconds=-math.inf) if moved else memory
    told = reading.declared.shedding
    if told is None:
        due = moved or (shedding and math.isinf(memory.told_seconds))
    else:
        due = told != shedding and (moved or now_seconds - memory.told_seconds >= settings.ask_again_seconds)
    if not due:
        return None, memory
    because = "memory is short" if shedding else "memory has recovered"
    action = Action(Repair.SHED_SEQUENCES, STAGE, because, {"shedding": shedding})
    return action, replace(memory, told_seconds=now_seconds)


def _ask_trim(reading: MemoryReading, memory: MemoryOfMemory, now_seconds: float, settings: MemorySettings) -> Asked:
    """An idle stage, at most every `trim_period_seconds`."""
    declared = reading.declared
    idle = declared is not None and declared.open_sequences == 0 and declared.weight_bytes > 0
    if not idle or now_seconds - memory.trimmed_seconds < settings.trim_period_seconds:
        return None, memory
    action = Action(Repair.TRIM_MEMORY, STAGE, "the stage is idle")
    return action, replace(memory, trimmed_seconds=now_seconds)


def _ask_restart(reading: MemoryReading, memory: MemoryOfMemory, now_seconds: float, settings: MemorySettings) -> Asked:
    """For a leak, or because of its age; asked for again as long as it is the same process."""
    if reading.process is None or now_seconds - memory.asked_seconds < settings.ask_again_seconds:
        return None, memory
    rolling_seconds = settings.rolling_restart_hours * HOUR_SECONDS
    if _leaks(memory, now_seconds, settings):
        action = Action(Repair.RESTART_PROGRAM, STAGE, memory.leak.text, budget=LEAK_RESTART)
    elif rolling_seconds > 0 and now_seconds - memory.since_seconds >= rolling_seconds:
        because = f"it has run for {settings.rolling_restart_hours:g} h, the interval of rolling restarts"
        action = Action(Repair.RESTART_PROGRAM, STAGE, because, budget=ROLLING_RESTART)
    else:
        return None, memory
    return action, replace(memory, asked_seconds=now_seconds)


def _count(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None
