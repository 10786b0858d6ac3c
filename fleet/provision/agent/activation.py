"""Making a new release the running one, and going back when its programs are not healthy."""

from __future__ import annotations

import os
from typing import Any

from fleet.provision.agent import health, supervise
from fleet.provision.agent.errors import AgentError
from fleet.provision.agent.paths import Ownership, switch_link, write_aside
from fleet.provision.agent.peer import Peer
from fleet.provision.agent.record import Record

STEP = "health gate"
Spec = dict[str, Any]


class Backup:
    """What was there before: targets of links, and bytes of small files that are replaced."""

    MAX_FILE_BYTES = 1024 * 1024

    def __init__(self) -> None:
        self.links: dict[str, str] = {}
        self._files: dict[str, tuple[bytes, Spec]] = {}

    def keep_link(self, path: str) -> None:
        """Remember where a link points, if its target is there."""
        if os.path.islink(path) and os.path.exists(path):
            self.links[path] = os.readlink(path)

    def keep_file(self, path: str, mode: int, owner: str, group: str) -> None:
        """Remember a regular file that will be replaced."""
        if os.path.isfile(path) and not os.path.islink(path) and os.path.getsize(path) <= self.MAX_FILE_BYTES:
            with open(path, "rb") as file:
                self._files[path] = file.read(), {"mode": mode, "owner": owner, "group": group}

    def __bool__(self) -> bool:
        return bool(self.links or self._files)

    def restore(self, ownership: Ownership) -> None:
        """Put files and links back."""
        for path, (data, spec) in self._files.items():
            write_aside(path, [data], ownership, spec, sync=True)
        for path, target in self.links.items():
            switch_link(path, target)


def activate(
    spec: Spec, changes: list[Spec], backup: Backup, peer: Peer, ownership: Ownership, record: Record
) -> list[str]:
    """Switch links, bring supervisord and programs to the new state, wait for the health gate.

    Returns:
        Programs that were started.

    Raises:
        AgentError: kind "rolled-back" when the previous release is active again, else "failed".
    """
    by_path = {link["path"]: link["target"] for link in spec["links"]}
    peer.step("activation")
    for change in changes:
        if change["kind"] == "link":
            backup.keep_link(change["path"])
            switch_link(change["path"], by_path[change["path"]])
    supervisor_changes = any(change["kind"] == "supervisor" for change in changes)
    programs = [change["path"] for change in changes if change["kind"] == "program"]
    try:
        started = _start(spec, supervisor_changes, programs, peer)
        peer.step(STEP)
        wrong = health.wait_healthy(spec, peer)
    except AgentError as error:
        if not backup:
            raise
        _go_back(spec, supervisor_changes, programs, backup, peer, ownership)
        raise AgentError(
            error.step,
            f"{error.message}; the previous release is active again",
            hint=error.hint,
            kind="rolled-back",
            detail=error.detail,
        ) from error
    if wrong:
        _refuse(spec, wrong, supervisor_changes, started, backup, peer, ownership)
    record.data["programs"] = {program["name"]: program["fingerprint"] for program in spec["programs"]}
    record.data["supervisor"] = spec["supervisor"]["fingerprint"]
    record.save()
    return started


def _start(spec: Spec, supervisor_changes: bool, programs: list[str], peer: Peer) -> list[str]:
    if supervisor_changes:
        supervise.start_or_restart(spec["supervisor"], peer)
        return [program["name"] for program in spec["programs"]]
    return supervise.reconcile(spec["supervisor"], programs, peer)


def _refuse(
    spec: Spec,
    wrong: dict[str, str],
    supervisor_changes: bool,
    started: list[str],
    backup: Backup,
    peer: Peer,
    ownership: Ownership,
) -> None:
    """Collect the logs, then go back (if there is something to go back to), then say so."""
    logs = health.log_tails(spec, sorted(wrong))
    text = "; ".join(f"{name} {problem}" for name, problem in wrong.items())
    message = f"{text} (waited up to {spec['health_gate_seconds']:g} s)"
    log_directory = os.path.join(spec["prefix"], "log")
    if not backup:
        raise AgentError(
            STEP,
            f"{message}; there is no previous release to go back to",
            hint=f"read the logs below, or in {log_directory}",
            detail=logs,
        )
    problem = _go_back(spec, supervisor_changes, started, backup, peer, ownership)
    if problem:
        message = f"{message}; going back to the previous release failed: {problem}"
        raise AgentError(STEP, message, hint=f"read {log_directory}", detail=logs)
    raise AgentError(
        STEP,
        f"{message}; the previous release is active again",
        hint="mend the cause that the logs show, then provision again",
        kind="rolled-back",
        detail=logs,
    )


def _go_back(
    spec: Spec, supervisor_changes: bool, started: list[str], backup: Backup, peer: Peer, ownership: Ownership
) -> str:
    """Returns what went wrong on the way, "" if nothing did."""
    peer.step("roll back")
    backup.restore(ownership)
    try:
        _start(spec, supervisor_changes, started, peer)
    except AgentError as error:
        return error.message
    return ""
