"""Making the changes that the operator found, in the order that never leaves a box without a release to run."""

from __future__ import annotations

from typing import Any

from fleet.provision.agent import environments, identity, mending, trees
from fleet.provision.agent.activation import Activation, Backup
from fleet.provision.agent.errors import AgentError
from fleet.provision.agent.paths import Ownership, make_parents, path_fact, remove
from fleet.provision.agent.peer import Peer
from fleet.provision.agent.record import Record
from fleet.provision.agent.system import command
from fleet.provision.agent.wire import WireError

Spec = dict[str, Any]
ACTIVATING_KINDS = ("link", "supervisor", "program")
TURN_STEP = "turn"
SEND_CONTENT = {"missing", "kind", "content"}


class Application:
    """One apply.

    Args:
        spec: the desired state without contents.
        changes: [{"kind", "path", "why"}] of `fleet.provision.diff`.
    """

    def __init__(self, spec: Spec, changes: list[Spec], peer: Peer) -> None:
        self._spec = spec
        self._changes = changes
        self._peer = peer
        self._ownership = Ownership(spec["privileged"])
        self._record = Record(spec["prefix"], spec["privileged"])
        self._backup = Backup()

    def run(self) -> list[str]:
        """Apply everything; returns the programs that were started.

        Raises:
            AgentError: a step failed. EOFError: the operator is gone; what arrived is kept for the next run.
        """
        self._packages()
        self._user()
        self._directories()
        self._trees()
        self._environments()
        self._files()
        self._identity()
        if self._of(*ACTIVATING_KINDS):
            self._await_turn()
            return Activation(self._spec, self._changes, self._backup, self._peer).run(self._record)
        return []

    def _await_turn(self) -> None:
        """While the site serves, only one box at a time restarts programs; the operator's side knows whose turn it is.

        Raises:
            EOFError: the operator is gone: this box keeps running what it runs.
        """
        self._peer.step(TURN_STEP)
        self._peer.waits_for("the other boxes")
        self._peer.send({"op": "arrived"})
        if (word := self._peer.receive()).get("op") != "activate":
            raise WireError(f"expected activate, got {word.get('op')}")

    def _of(self, *kinds: str) -> dict[str, str]:
        """Changes of some kinds: path → why."""
        return {change["path"]: change["why"] for change in self._changes if change["kind"] in kinds}

    def _packages(self) -> None:
        missing = self._of("package")
        if missing:
            raise AgentError(
                "packages",
                f"Debian packages are missing: {', '.join(missing)}",
                hint=f"apt-get install --no-install-recommends {' '.join(missing)}  (on the box)",
            )

    def _user(self) -> None:
        for name in self._of("user"):
            self._peer.step(f"user {name}")
            argv = ["useradd", "--system", "--user-group", "--no-create-home", "--home-dir", "/nonexistent"]
            command("user", [*argv, "--shell", "/usr/sbin/nologin", name])

    def _directories(self) -> None:
        changes = self._of("directory")
        if changes:
            self._peer.step(f"directories: {len(changes)}")
        for spec in self._spec["directories"]:
            if spec["path"] not in changes:
                continue
            if path_fact(spec["path"])["kind"] not in ("directory", "missing"):
                remove(spec["path"])
            make_parents(f"{spec['path']}/child")
            self._ownership.set(spec["path"], spec["mode"], spec["owner"], spec["group"])

    def _trees(self) -> None:
        changes, file_changes = self._of("tree"), self._of("tree-file")
        for tree in self._spec["trees"]:
            if tree["path"] in changes:
                self._peer.step(f"tree {tree['path']}")
                trees.build(tree, self._peer, self._ownership)
                continue
            damaged = [(spec, file_changes[spec["path"]]) for spec in tree["files"] if spec["path"] in file_changes]
            extra = [
                path for path, why in file_changes.items() if why == "extra" and path.startswith(tree["path"] + "/")
            ]
            if damaged or extra:
                self._peer.step(f"mend {tree['path']}")
                trees.mend(damaged, self._peer, self._ownership)
                trees.remove_strangers(extra)

    def _environments(self) -> None:
        whole, files = self._of("environment"), self._of("environment-file")
        for spec in self._spec["environments"]:
            prefix = spec["path"] + "/"
            damaged = {path[len(prefix) :]: why for path, why in files.items() if path.startswith(prefix)}
            if damaged:
                self._peer.step(f"mend {spec['path']}")
                mended = mending.mend(spec, damaged, self._peer, self._ownership, self._record)
            if spec["path"] in whole or (damaged and not mended):
                self._peer.step(f"environment {spec['path']}")
                environments.build(spec, self._spec["prefix"], self._peer, self._ownership, self._record)

    def _files(self) -> None:
        changes = self._of("file")
        damaged = [(spec, changes[spec["path"]]) for spec in self._spec["files"] if spec["path"] in changes]
        if not damaged:
            return
        self._peer.step(f"files: {len(damaged)}")
        if self._of(*ACTIVATING_KINDS):
            for spec, why in damaged:
                if SEND_CONTENT & set(why.split(", ")):
                    self._backup.keep_file(spec["path"], spec["mode"], spec["owner"], spec["group"])
        trees.mend(damaged, self._peer, self._ownership)

    def _identity(self) -> None:
        changes = self._of("identity")
        if not changes:
            return
        spec = self._spec["identity"]
        files = identity.IdentityFiles(spec, identity.owner_of(self._spec), self._ownership, self._record)
        self._peer.step("identity")
        if not set(changes.values()) <= {"mode", "owner"}:
            if changes.get(spec["key_path"]) in ("missing", "content"):
                files.make_key()
            self._peer.waits_for("the certificate from the operator's side")
            self._peer.send({"op": "certificate-request", "request": files.make_request()})
            files.store_certificate(self._peer.receive()["certificate"])
        files.set_attributes()
