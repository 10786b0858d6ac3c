"""The health gate: after a start, every program must say that it is healthy before its deadline."""

from __future__ import annotations

import os
import time
from typing import Any, Literal

from fleet.provision.agent.paths import open_quietly
from fleet.provision.agent.peer import Peer
from fleet.provision.agent.rpc import SupervisorRpc, ask_health

POLL_SECONDS = 0.25
EXITS_GIVEN_UP = 3  # a program that ends so often while the gate waits does not get better by waiting
LOG_TAIL_BYTES = 16 * 1024
Verdict = Literal["healthy", "waiting", "failed"]


def judge(program: dict[str, Any], info: dict[str, Any] | None, health: dict[str, Any] | None) -> tuple[Verdict, str]:
    """Pure: what a program's state means.

    Args:
        program: its specification. info: supervisord's ProcessInfo, None if it does not know the program.
        health: the answer of its admin socket, None if not asked.
    """
    if info is None:
        return "failed", "not in supervisord's configuration"
    state = info["statename"]
    if state == "FATAL":
        return "failed", f"supervisord gave up starting it ({info['spawnerr'] or 'it ends too quickly'})"
    if state != "RUNNING":
        return "waiting", f"is {state} in supervisord"
    if health is None:
        return "healthy", "is RUNNING"
    expected = " or ".join(program["health_states"])
    if "error" in health:
        return "waiting", f"does not answer yet ({health['error']}), expected {expected}"
    reported = health.get("state")
    if reported in program["health_states"]:
        return "healthy", f"is {reported}"
    reason = f" ({health['reason']})" if health.get("reason") else ""
    return "failed" if reported == "failed" else "waiting", f"says {reported}{reason}, expected {expected}"


class ExitCounter:
    """How often each program has ended since the first look, by the times that supervisord names. Pure."""

    def __init__(self) -> None:
        self._last: dict[str, int] = {}
        self._exits: dict[str, int] = {}

    def judge(self, name: str, info: dict[str, Any]) -> tuple[Verdict, str] | None:
        """Take a look's ProcessInfo in; "failed" once the program has ended EXITS_GIVEN_UP times, None before."""
        stop = int(info["stop"])
        if self._last.setdefault(name, stop) != stop:
            self._last[name] = stop
            self._exits[name] = self._exits.get(name, 0) + 1
        exits = self._exits.get(name, 0)
        if exits < EXITS_GIVEN_UP:
            return None
        return "failed", f"ended {exits} times"


def look(spec: dict[str, Any], exits: ExitCounter) -> dict[str, tuple[Verdict, str]]:
    """Ask once: program → verdict and what was seen."""
    infos = SupervisorRpc(spec["supervisor"]["socket"]).programs()
    verdicts = {}
    for program in spec["programs"]:
        info = infos.get(program["name"])
        health = None
        if info is not None and info["statename"] == "RUNNING" and program["health_socket"]:
            health = ask_health(program["health_socket"], info["pid"])
        given_up = None if info is None else exits.judge(program["name"], info)
        verdicts[program["name"]] = given_up or judge(program, info, health)
    return verdicts


def wait_healthy(spec: dict[str, Any], peer: Peer) -> dict[str, str]:
    """Wait until every program is healthy, one has failed for good or keeps ending, or `health_gate_seconds` have
    passed.

    Returns:
        Program → what is wrong with it; empty when all are healthy. Of programs that answers do not depend on, being
        late is not wrong.
    """
    late_matters = {program["name"]: program["serves"] for program in spec["programs"]}
    deadline = time.monotonic() + spec["health_gate_seconds"]
    exits = ExitCounter()
    while True:
        verdicts = look(spec, exits)
        wrong = {name: text for name, (verdict, text) in verdicts.items() if verdict != "healthy"}
        failed = any(verdict == "failed" for verdict, _ in verdicts.values())
        if not wrong or failed:
            return wrong
        if time.monotonic() > deadline:
            return {name: text for name, text in wrong.items() if late_matters[name]}
        peer.waits_for("healthy programs: " + "; ".join(f"{name} {text}" for name, text in wrong.items()))
        time.sleep(POLL_SECONDS)


def log_tails(spec: dict[str, Any], names: list[str]) -> str:
    """The last lines of programs' logs, each under a heading; collected before anything is rolled back."""
    infos = SupervisorRpc(spec["supervisor"]["socket"]).programs()
    parts = []
    for name in names:
        files = {infos[name][key] for key in ("stdout_logfile", "stderr_logfile")} if name in infos else set()
        for path in sorted(filter(None, files)):
            if os.path.isfile(path) and not os.path.islink(path):
                parts.append(f"==> {name}: {path} <==\n{_tail(path)}")
    return "\n".join(parts)


def _tail(path: str) -> str:
    with open(open_quietly(path), "rb") as file:  # the service user may put a link there
        file.seek(max(0, os.fstat(file.fileno()).st_size - LOG_TAIL_BYTES))
        return file.read(LOG_TAIL_BYTES).decode(errors="replace")
