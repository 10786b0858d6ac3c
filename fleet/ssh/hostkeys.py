"""Pinned host keys: the site's own known_hosts file, filled on first use, never silently changed."""

from __future__ import annotations

import base64
import hashlib
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import paramiko

from fleet.errors import FleetError
from fleet.ssh.results import BoxError


def fingerprint(key: paramiko.PKey) -> str:
    """As `ssh-keygen -l` prints it: `SHA256:…`."""
    return "SHA256:" + base64.b64encode(hashlib.sha256(key.asbytes()).digest()).rstrip(b"=").decode()


class HostKeyStore:
    """`<state>/known_hosts` (0600) in OpenSSH's format, one line a box, named by the box and not by its address.

    Args:
        path: the file; made when the first key is pinned.
        accept: boxes whose changed key replaces the pinned one.
        report: takes one line when a key is pinned or replaced.
        accept_command: what accepts a changed key; `{box}` is filled in.
        remember: False with `--check`: a first key is believed for this run, and nothing is written.
    """

    def __init__(
        self,
        path: Path,
        *,
        accept: frozenset[str],
        report: Callable[[str], None],
        accept_command: str,
        remember: bool = True,
    ) -> None:
        self._path = path
        self._accept = accept
        self._report = report
        self._accept_command = accept_command
        self._remember = remember
        self._lock = threading.Lock()
        self._keys = self._load()

    def _load(self) -> dict[str, paramiko.PKey]:
        if not self._path.exists():
            return {}
        found: dict[str, paramiko.PKey] = {}
        for number, line in enumerate(self._path.read_text().splitlines(), start=1):
            if not line.strip() or line.startswith("#"):
                continue
            try:
                entry = paramiko.hostkeys.HostKeyEntry.from_line(line, number)
            except (paramiko.SSHException, paramiko.hostkeys.InvalidHostKey, ValueError) as error:
                raise self._unreadable(number, str(error)) from error
            if entry is None or entry.hostnames is None:
                raise self._unreadable(number, "not `name type key`")
            found |= dict.fromkeys(entry.hostnames, entry.key)
        return found

    def _unreadable(self, number: int, why: str) -> FleetError:
        return FleetError(
            f"{self._path}:{number}: host key can't be read: {why}",
            hint="remove that line; the box's key is pinned anew at the next connection",
        )

    def expected(self, box: str) -> paramiko.PKey | None:
        """The pinned key that the box must show; None if its next key is to be pinned."""
        with self._lock:
            return None if box in self._accept else self._keys.get(box)

    def changed(self, box: str, pinned: paramiko.PKey, shown: paramiko.PKey) -> BoxError:
        """The error that refuses another key than the pinned one."""
        return BoxError(
            box,
            "host key",
            f"the box shows another host key: {fingerprint(shown)} ({shown.get_name()}), pinned is "
            f"{fingerprint(pinned)} ({pinned.get_name()}) in {self._path}",
            hint=f"if the box was set up anew: {self._accept_command.format(box=box)}",
        )

    def check(self, box: str, key: paramiko.PKey) -> None:
        """Compare a server's key with the pinned one; pin it if there is none.

        Raises:
            BoxError: another key is pinned, and the box is not one of those to accept.
        """
        with self._lock:
            pinned = self._keys.get(box)
            if pinned is not None and pinned.asbytes() == key.asbytes():
                return
            if pinned is not None and box not in self._accept:
                raise self.changed(box, pinned, key)
            self._keys[box] = key
            if self._remember:
                self._save()
        what = "pinned" if pinned is None else f"replaced ({fingerprint(pinned)} before)"
        if not self._remember:
            what = "would be " + what
        self._report(f"host key of {box} {what}: {fingerprint(key)}")

    def _save(self) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        aside = self._path.with_name(self._path.name + ".new")
        lines = [f"{box} {key.get_name()} {key.get_base64()}\n" for box, key in sorted(self._keys.items())]
        descriptor = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        with os.fdopen(descriptor, "w") as file:
            file.writelines(lines)
            file.flush()
            os.fsync(file.fileno())
        aside.replace(self._path)


class PinnedPolicy(paramiko.MissingHostKeyPolicy):  # type: ignore[misc]  # paramiko is untyped
    """Hands every host key to the store (paramiko itself knows no key, so it asks for each).

    Args:
        store: the site's store. box: whose connection this is.
    """

    def __init__(self, store: HostKeyStore, box: str) -> None:
        self._store = store
        self._box = box

    def missing_host_key(self, client: Any, hostname: Any, key: paramiko.PKey) -> None:
        """Called by paramiko before it authenticates; a raised error ends the connection."""
        del client, hostname
        self._store.check(self._box, key)
