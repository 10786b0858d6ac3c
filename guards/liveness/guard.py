"""The guard of the programs: asks supervisord and each program, and decides who is restarted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from guards.budgets import Budget
from guards.findings import Action, Decision, Finding, Repair, State
from guards.guard import ActionFailed
from guards.liveness.judge import judge_program, restart_budget, start_budget
from guards.liveness.looks import LivenessReading, Probe, Programs, look_at_programs
from guards.liveness.memory import LivenessMemory, ProgramMemory, from_json, to_json
from guards.roots import Roots
from guards.settings import DAY_SECONDS, LivenessSettings

# supervisord may take 10 s for each step of an answer, a program 5 s for each of its own.
DEADLINE_SECONDS = 60.0


def budgets(settings: LivenessSettings, programs: Sequence[str]) -> dict[str, Budget]:
    """What actions of this guard are paid from, for each program."""
    restarts = Budget(int(settings.restarts_per_day), DAY_SECONDS, settings.restart_apart_seconds)
    starts = Budget(int(settings.fatal_restarts_per_day), DAY_SECONDS, settings.fatal_restart_apart_seconds)
    return {
        **{restart_budget(name): restarts for name in programs},
        **{start_budget(name): starts for name in programs},
    }


class LivenessGuard:
    """Implements `guards.guard.Guard`. Its actions are program repairs, which the runner does (`guards/restarts.py`).

    Args:
        programs: names that are watched; supervisord may run others.
        supervisor: tells how they stand. probes: of programs that can be asked themselves.
    """

    name = "liveness"
    deadline_seconds = DEADLINE_SECONDS

    def __init__(
        self,
        settings: LivenessSettings,
        roots: Roots,
        *,
        programs: Sequence[str],
        supervisor: Programs,
        probes: Mapping[str, Probe],
    ) -> None:
        self.period_seconds = settings.period_seconds
        self._settings, self._roots = settings, roots
        self._programs, self._supervisor = tuple(programs), supervisor
        self._probes = {name: probe for name, probe in probes.items() if name in programs}

    def sense(self) -> LivenessReading:
        """Look at all programs."""
        return look_at_programs(self._supervisor, self._probes, self._roots)

    def decide(self, reading: LivenessReading, memory: LivenessMemory, now_seconds: float) -> Decision[LivenessMemory]:
        """Judge each program by itself; while supervisord is silent nothing can be said, or done, about any."""
        if reading.problem:
            rounds = memory.silent_rounds + 1
            ill = State.UNHEALTHY if rounds >= self._settings.silent_rounds else State.DEGRADED
            finding = Finding("supervisord", ill, reading.problem, {"silent_rounds": rounds}, Repair.CHECK_PROGRAM)
            return Decision((finding,), (), replace(memory, silent_rounds=rounds))
        findings = [Finding("supervisord", State.HEALTHY)]
        actions: list[Action] = []
        kept: dict[str, ProgramMemory] = {}
        for name in self._programs:
            look, before = reading.programs.get(name), memory.programs.get(name, ProgramMemory())
            if look is None:
                kept[name] = before
                reason = "supervisord has no such program"
                findings.append(Finding(f"program/{name}", State.DEGRADED, reason, {}, Repair.CHECK_PROGRAM))
                continue
            finding, action, kept[name] = judge_program(name, look, before, self._settings, now_seconds)
            findings.append(finding)
            if action is not None:
                actions.append(action)
        return Decision(tuple(findings), tuple(actions), LivenessMemory(kept))

    def act(self, action: Action) -> str:
        """None of its actions is done here.

        Raises:
            ActionFailed: always.
        """
        raise ActionFailed(f"{action.repair.value} is not done by this guard")

    def first_memory(self) -> LivenessMemory:
        """Nothing seen yet."""
        return LivenessMemory()

    def memory_to_json(self, memory: LivenessMemory) -> Mapping[str, Any]:
        """Past restarts and starts; counts of looks begin anew."""
        return to_json(memory)

    def memory_from_json(self, data: Mapping[str, Any]) -> LivenessMemory:
        """The reverse; see `guards.guard.Guard`."""
        return from_json(data)
