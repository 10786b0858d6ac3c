"""How a program stands, and what mends it. Pure.

Gentle first: nothing is done to a program that loads, is young, or waits for its neighbours. What hangs is restarted
(SIGTERM, then SIGKILL, by supervisord), what a signal has stopped is killed, because it hears nothing else, and what
supervisord has given up is started, slowly.

A stage with open sequences that computes nothing waits for its ring: that is for the coordinator to judge
(`fleet/coordinator/judge.py`), and a restart would only take one more stage out. Hung is, there as here, who has been
in one call for `hung_seconds` without a step being finished meanwhile.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from guards.findings import Action, Finding, Repair, State, Value
from guards.liveness.follow import DOWN, follow, number
from guards.liveness.looks import Look
from guards.liveness.memory import ProgramMemory, within
from guards.settings import DAY_SECONDS, HOUR_SECONDS, LivenessSettings


@dataclass(frozen=True)
class _Verdict:
    """repair: NONE, or one that is done to programs. fails: it is known not to serve. paid: by an earlier action."""

    state: State
    reason: str = ""
    repair: Repair = Repair.NONE
    fails: bool = True
    paid: bool = False


def judge_program(
    name: str, look: Look, memory: ProgramMemory, settings: LivenessSettings, now_seconds: float
) -> tuple[Finding, Action | None, ProgramMemory]:
    """A look at one program."""
    memory = follow(look, memory, now_seconds)
    if look.state in DOWN:
        verdict, memory = _down(look, memory, settings, now_seconds)
    elif look.state == "RUNNING":
        verdict, memory = _running(look, memory, settings, now_seconds)
    else:
        verdict = _changing(look, memory, settings, now_seconds)
    return _finding(name, look, memory, verdict, now_seconds), _action(name, look, verdict), memory


def _changing(look: Look, memory: ProgramMemory, settings: LivenessSettings, now_seconds: float) -> _Verdict:
    """supervisord is at work on it: STARTING, BACKOFF, STOPPING. It tries for days before it gives up, so a person is
    called long before."""
    away = 0.0 if memory.away_since is None else now_seconds - memory.away_since
    why = f": {look.why_not}" if look.why_not else ""
    if away >= settings.grace_seconds:
        return _Verdict(State.UNHEALTHY, f"has not been running for {away:.0f} s, is {look.state}{why}")
    return _Verdict(State.INITIALISING if look.state == "STARTING" else State.DEGRADED, f"is {look.state}{why}")


def _running(
    look: Look, memory: ProgramMemory, settings: LivenessSettings, now_seconds: float
) -> tuple[_Verdict, ProgramMemory]:
    verdict = _alive(look, memory, settings, now_seconds)
    if verdict.repair is Repair.NONE:
        well = memory.silent_rounds == memory.held_rounds == 0
        return verdict, replace(memory, restarting=memory.restarting and not well)
    mended = within(memory.mended, now_seconds, DAY_SECONDS)
    if mended >= settings.restarts_per_day:
        reason = f"{verdict.reason}; restarted {mended} times within a day: a person is needed"
        return _Verdict(State.UNHEALTHY, reason), memory
    if memory.mended and now_seconds - memory.mended[-1] < settings.restart_apart_seconds:
        wait = memory.mended[-1] + settings.restart_apart_seconds - now_seconds
        return _Verdict(State.UNHEALTHY, f"{verdict.reason}; restarted again in {wait:.0f} s"), memory
    return verdict, replace(memory, restarting=True)


def _alive(look: Look, memory: ProgramMemory, settings: LivenessSettings, now_seconds: float) -> _Verdict:
    young = look.age_seconds is None or look.age_seconds < settings.grace_seconds
    answer = look.answer or {}
    if memory.held_rounds:
        if memory.held_rounds >= settings.stopped_rounds:
            return _Verdict(State.UNHEALTHY, "stopped by a signal (SIGSTOP)", Repair.KILL_PROGRAM)
        return _Verdict(State.DEGRADED, "stopped by a signal (SIGSTOP)")
    blocked = 0.0 if memory.blocked_since is None else now_seconds - memory.blocked_since
    if blocked >= settings.blocked_seconds and (look.silence or look.answer is None):
        reason = f"waits in the kernel (state D) for {blocked:.0f} s"
        return _Verdict(State.UNHEALTHY, reason, Repair.KILL_PROGRAM, fails=bool(look.silence))
    if memory.silent_rounds:
        if young:
            return _Verdict(State.INITIALISING, f"does not answer yet: {look.silence}")
        if memory.silent_rounds >= settings.silent_rounds:
            reason = f"does not answer, {memory.silent_rounds} times in a row: {look.silence}"
            return _Verdict(State.UNHEALTHY, reason, Repair.RESTART_PROGRAM)
        return _Verdict(State.DEGRADED, f"does not answer: {look.silence}")
    if answer.get("state") == "loading":
        if look.age_seconds is not None and look.age_seconds >= max(settings.loading_seconds, settings.grace_seconds):
            return _Verdict(State.UNHEALTHY, f"loads for {look.age_seconds:.0f} s", Repair.RESTART_PROGRAM)
        return _Verdict(State.INITIALISING, f"loads: {str(answer.get('reason', ''))[:200]}")
    if answer.get("state") == "failed":
        return _Verdict(State.UNHEALTHY, f"says failed: {str(answer.get('reason', ''))[:200]}")
    return _working(look, memory, settings, now_seconds, young=young)


def _working(
    look: Look, memory: ProgramMemory, settings: LivenessSettings, now_seconds: float, *, young: bool
) -> _Verdict:
    answer = look.answer or {}
    still = 0.0 if memory.still_since is None else now_seconds - memory.still_since
    held = min(still, number(answer, "working_seconds"))
    if held >= settings.hung_seconds:
        reason = f"has work and finished no step for {held:.0f} s"
        return _Verdict(State.DEGRADED, reason) if young else _Verdict(State.UNHEALTHY, reason, Repair.RESTART_PROGRAM)
    if still >= settings.hung_seconds and memory.progress is not None:
        return _Verdict(State.DEGRADED, f"has open sequences, but nothing to compute for {still:.0f} s")
    restarts = within(memory.restarts, now_seconds, HOUR_SECONDS)
    if restarts > settings.flaps_per_hour:
        reason = f"restarted {restarts} times within an hour, bound {settings.flaps_per_hour:g}"
        return _Verdict(State.DEGRADED, reason)
    return _Verdict(State.HEALTHY)


def _down(
    look: Look, memory: ProgramMemory, settings: LivenessSettings, now_seconds: float
) -> tuple[_Verdict, ProgramMemory]:
    why = f": {look.why_not}" if look.why_not else ""
    broken = look.state == "STOPPED" and memory.restarting
    if broken:
        reason, apart = "a restart broke half-way", settings.restart_apart_seconds
    elif look.state == "STOPPED":
        reason, apart = "somebody stopped it", settings.fatal_restart_apart_seconds
        stopped = 0.0 if memory.stopped_since is None else now_seconds - memory.stopped_since
        if settings.stopped_start_seconds <= 0 or stopped < settings.stopped_start_seconds:
            return _Verdict(State.DEGRADED, reason), memory
    else:
        reason, apart = f"is {look.state}{why}", settings.fatal_restart_apart_seconds
    if memory.down_rounds < settings.down_rounds:
        return _Verdict(State.DEGRADED, reason), memory
    started = within(memory.started, now_seconds, DAY_SECONDS)
    if started >= settings.fatal_restarts_per_day:
        text = f"{reason}; started {started} times within a day: a person is needed"
        return _Verdict(State.UNHEALTHY, text), memory
    if memory.started and now_seconds - memory.started[-1] < apart:
        wait = memory.started[-1] + apart - now_seconds
        return _Verdict(State.UNHEALTHY, f"{reason}; started again in {wait:.0f} s"), memory
    later = replace(memory, started=(*memory.started, now_seconds))
    return _Verdict(State.UNHEALTHY, reason, Repair.START_PROGRAM, paid=broken), later


def _finding(name: str, look: Look, memory: ProgramMemory, verdict: _Verdict, now_seconds: float) -> Finding:
    evidence: dict[str, Value] = {
        "state": look.state,
        "pid": look.pid,
        "age_seconds": look.age_seconds,
        "restarts_last_hour": within(memory.restarts, now_seconds, HOUR_SECONDS),
        "starts_last_day": within(memory.started, now_seconds, DAY_SECONDS),
    }
    ill = verdict.state in (State.DEGRADED, State.UNHEALTHY)
    repair = Repair.CHECK_PROGRAM if ill and verdict.repair is Repair.NONE else verdict.repair
    return Finding(f"program/{name}", verdict.state, verdict.reason, evidence, repair)


def _action(name: str, look: Look, verdict: _Verdict) -> Action | None:
    if verdict.repair is Repair.NONE:
        return None
    if verdict.repair is Repair.START_PROGRAM:
        return Action(
            verdict.repair, name, verdict.reason, {"needs_lease": False}, "" if verdict.paid else start_budget(name)
        )
    arguments: dict[str, Value] = {"needs_lease": not verdict.fails, "pid": look.pid}
    return Action(verdict.repair, name, verdict.reason, arguments, restart_budget(name))


def restart_budget(program: str) -> str:
    """Pays restarts and kills of a program."""
    return f"restart-{program}"


def start_budget(program: str) -> str:
    """Pays starts of a program that supervisord has given up."""
    return f"start-{program}"
