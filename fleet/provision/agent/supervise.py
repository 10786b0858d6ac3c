"""The box's one supervisord and its programs: started, changed and stopped with exactly one action each."""

from __future__ import annotations

import os
import subprocess
import time
from typing import Any

from fleet.provision.agent import orphans
from fleet.provision.agent.errors import AgentError
from fleet.provision.agent.lock import make_private_directory
from fleet.provision.agent.peer import Peer
from fleet.provision.agent.record import Record
from fleet.provision.agent.rpc import SupervisorRpc
from fleet.provision.agent.system import PATH, command

STEP = "supervisor"
POLL_SECONDS = 0.2
START_SECONDS = 30.0  # supervisord's own start, until it answers
STOP_SECONDS = 120.0  # programs drain before they end
STOPPED_STATES = ("STOPPED", "EXITED", "FATAL", "UNKNOWN")
# what a local supervisord inherits; secrets of the operator's shell must not reach the programs
INHERITED_VARIABLES = ("HOME", "USER", "LOGNAME", "LANG", "LC_ALL", "TZ", "LD_LIBRARY_PATH", "TMPDIR")


def _unit_state(unit: str) -> tuple[bool, bool]:
    """(enabled, active)."""
    argv = ["systemctl", "show", "--property=UnitFileState,ActiveState", unit]
    lines = command(STEP, argv).stdout.decode().split()
    return "UnitFileState=enabled" in lines, "ActiveState=active" in lines


def fact(spec: dict[str, Any], record: Record) -> tuple[dict[str, Any], dict[str, Any]]:
    """In the shapes of `fleet.provision.facts.SupervisorFact` and `ProgramFact` by name."""
    rpc = SupervisorRpc(spec["socket"])
    running = rpc.answers()
    enabled, active = _unit_state(spec["unit"]) if spec["unit"] else (None, None)
    recorded = record.data["programs"]
    programs = {
        name: {"state": info["statename"], "fingerprint": recorded.get(name, "")}
        for name, info in (rpc.programs() if running else {}).items()
    }
    supervisor = {
        "running": running,
        "fingerprint": record.data["supervisor"],
        "unit_enabled": enabled,
        "unit_active": active,
    }
    return supervisor, programs


def start_or_restart(spec: dict[str, Any], peer: Peer) -> None:
    """Have supervisord run with the present configuration, interpreter and unit: under systemd, else on its own."""
    rpc = SupervisorRpc(spec["socket"])
    peer.waits_for("supervisord to start")
    if spec["unit"]:
        command(STEP, ["systemctl", "daemon-reload"])
        command(STEP, ["systemctl", "enable", "--quiet", spec["unit"]])
        command(STEP, ["systemctl", "restart", spec["unit"]], timeout_seconds=STOP_SECONDS)
    else:
        shut_down(spec, peer)
        _start_here(spec)
    deadline = time.monotonic() + START_SECONDS
    while not rpc.answers():
        if time.monotonic() > deadline:
            raise AgentError(
                STEP,
                f"supervisord does not answer on {spec['socket']} after {START_SECONDS:.0f} s",
                hint=f"journalctl -u {spec['unit']} -n 50" if spec["unit"] else f"less {_start_log(spec)}",
                detail=_start_output(spec),
            )
        time.sleep(POLL_SECONDS)


def _start_log(spec: dict[str, Any]) -> str:
    return os.path.join(os.path.dirname(spec["socket"]), "supervisord-start.log")


def _start_output(spec: dict[str, Any]) -> str:
    if spec["unit"]:
        argv = ["journalctl", "--unit", spec["unit"], "--lines", "50", "--no-pager", "--output", "cat"]
        return command(STEP, argv, check=False).stdout.decode(errors="replace")
    with open(_start_log(spec), encoding="utf-8", errors="replace") as file:
        return file.read()


def _start_here(spec: dict[str, Any]) -> None:
    """Start supervisord in the background: its own session, no terminal, nothing of the operator's environment but
    what it needs. A socket that nobody answers on is a leftover; supervisord replaces it itself."""
    make_private_directory(os.path.dirname(spec["socket"]))
    variables = {name: os.environ[name] for name in INHERITED_VARIABLES if name in os.environ} | {"PATH": PATH}
    with open(_start_log(spec), "wb") as log:
        subprocess.Popen(
            [spec["python"], "-m", "supervisor.supervisord", "--nodaemon", "-c", spec["config_path"]],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=log,
            env=variables,
            cwd="/",
            start_new_session=True,
        )


def _wait_stopped(rpc: SupervisorRpc, groups: list[str], peer: Peer) -> None:
    deadline = time.monotonic() + STOP_SECONDS
    while True:
        running = [
            name
            for name, info in rpc.programs().items()
            if info["group"] in groups and info["statename"] not in STOPPED_STATES
        ]
        if not running:
            return
        if time.monotonic() > deadline:
            raise AgentError(STEP, f"{', '.join(running)} did not stop within {STOP_SECONDS:.0f} s")
        peer.waits_for(f"{', '.join(running)} to stop")
        time.sleep(POLL_SECONDS)


def reconcile(spec: dict[str, Any], restart: list[str], peer: Peer) -> list[str]:
    """Bring the groups to what the configuration says, with one action a program.

    Args:
        restart: programs whose configuration supervisord may see as unchanged, but which must start anew.

    Returns:
        Groups that were started.
    """
    rpc = SupervisorRpc(spec["socket"])
    added, changed, removed = rpc.reload()
    present = {info["group"]: info["statename"] for info in rpc.programs().values()}
    again = [group for group in restart if group in present and group not in (*changed, *removed)]
    stopping = [*removed, *changed, *again]
    for group in stopping:
        rpc.stop_group(group)
    _wait_stopped(rpc, stopping, peer)
    for group in [*removed, *changed]:
        rpc.remove_group(group)
    for group in [*changed, *added]:
        rpc.add_group(group)
    started = [*changed, *added, *again]
    for group in started:
        rpc.start_group(group)
    return started


def shut_down(spec: dict[str, Any], peer: Peer) -> list[str]:
    """Stop all programs and supervisord, and wait until their processes are gone.

    Returns:
        Names of the programs that ran.
    """
    running = _shut_supervisord_down(spec, peer) if SupervisorRpc(spec["socket"]).answers() else []
    return running if spec["unit"] else [*running, *orphans.end(spec["config_path"], peer)]


def _shut_supervisord_down(spec: dict[str, Any], peer: Peer) -> list[str]:
    rpc = SupervisorRpc(spec["socket"])
    programs = rpc.programs()
    running = [name for name, info in programs.items() if info["statename"] not in STOPPED_STATES]
    waiting = {info["pid"]: name for name, info in programs.items() if info["pid"]}
    waiting[rpc.process_id()] = "supervisord"
    if spec["unit"]:
        command(STEP, ["systemctl", "stop", spec["unit"]], timeout_seconds=STOP_SECONDS)
    else:
        rpc.shutdown()
    deadline = time.monotonic() + STOP_SECONDS
    while alive := [name for pid, name in waiting.items() if _alive(pid)]:
        if time.monotonic() > deadline:
            raise AgentError("stop", f"{', '.join(alive)} did not end within {STOP_SECONDS:.0f} s")
        peer.waits_for(f"{', '.join(alive)} to end")
        time.sleep(POLL_SECONDS)
    return running


def _alive(pid: int) -> bool:
    """Runs still; a zombie does not (in a container nobody may be there to collect it)."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()[0] not in (b"Z", b"X")
    except (FileNotFoundError, ProcessLookupError):
        return False
