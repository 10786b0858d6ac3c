"""Making a new release the running one, and going back when its programs are not healthy."""

from __future__ import annotations

import os
import signal
import time
from typing import Any, NoReturn

from fleet.provision.agent import health, supervise
from fleet.provision.agent.errors import AgentError
from fleet.provision.agent.paths import Ownership, open_quietly, switch_link, write_aside
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
            with open(open_quietly(path), "rb") as file:  # its directory may be the service user's
                self._files[path] = file.read(), {"mode": mode, "owner": owner, "group": group}

    def __bool__(self) -> bool:
        return bool(self.links or self._files)

    def restore(self, ownership: Ownership) -> None:
        """Put files and links back."""
        for path, (data, spec) in self._files.items():
            write_aside(path, [data], ownership, spec, sync=True)
        for path, target in self.links.items():
            switch_link(path, target)


class Activation:
    """Switch links, bring supervisord and programs to the new state, wait for the health gate.

    Args:
        spec: the desired state without contents.
        changes: all changes of this apply; links, supervisor and programs are this step's.
        backup: what the apply has replaced so far.
    """

    def __init__(self, spec: Spec, changes: list[Spec], backup: Backup, peer: Peer) -> None:
        self._spec = spec
        self._backup = backup
        self._peer = peer
        self._ownership = Ownership(spec["privileged"])
        self._links = [change["path"] for change in changes if change["kind"] == "link"]
        self._programs = [change["path"] for change in changes if change["kind"] == "program"]
        self._supervisor_changes = any(change["kind"] == "supervisor" for change in changes)

    def run(self, record: Record) -> list[str]:
        """Returns the programs that were started.

        Raises:
            AgentError: kind "rolled-back" when the previous release is active again, else "failed".
        """
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # to the end of the agent: never between two releases
        self._peer.step("activation")
        targets = {link["path"]: link["target"] for link in self._spec["links"]}
        for path in self._links:
            self._backup.keep_link(path)
            switch_link(path, targets[path])
        try:
            started = self._start(self._programs)
            self._peer.step(STEP)
            began = time.monotonic()
            wrong = health.wait_healthy(self._spec, self._peer)
        except AgentError as error:
            self._fail(error.step, error.message, error.hint, error.detail, self._programs)
        if wrong:
            text = "; ".join(f"{name} {problem}" for name, problem in wrong.items())
            message = f"{text} (after {time.monotonic() - began:.0f} of {self._spec['health_gate_seconds']:g} s)"
            logs = health.log_tails(self._spec, sorted(wrong))  # before anything is rolled back
            self._fail(STEP, message, "mend the cause that the logs show, then provision again", logs, started)
        record.data["programs"] = {program["name"]: program["fingerprint"] for program in self._spec["programs"]}
        record.data["supervisor"] = self._spec["supervisor"]["fingerprint"]
        record.save()
        return started

    def _start(self, programs: list[str]) -> list[str]:
        if self._supervisor_changes:
            supervise.start_or_restart(self._spec["supervisor"], self._peer)
            return [program["name"] for program in self._spec["programs"]]
        return supervise.reconcile(self._spec["supervisor"], programs, self._peer)

    def _fail(self, step: str, message: str, hint: str, detail: str, started: list[str]) -> NoReturn:
        """Go back to the previous release if there is one, then say what happened."""
        if not self._backup:
            message += "; there is no previous release to go back to"
            raise AgentError(step, message, hint=hint, detail=detail)
        self._peer.step("roll back")
        self._backup.restore(self._ownership)
        try:
            self._start(started)
        except AgentError as error:
            message += f"; going back to the previous release failed: {error.message}"
            raise AgentError(step, message, hint=hint, detail=detail) from error
        message += "; the previous release is active again"
        raise AgentError(step, message, hint=hint, kind="rolled-back", detail=detail)
