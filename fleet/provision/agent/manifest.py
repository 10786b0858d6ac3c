"""The manifest of a virtual environment: every file's digest, mode and time, recorded when it was made."""

from __future__ import annotations

import base64
import csv
import hashlib
import json
import os
import sys
from collections.abc import Iterator
from concurrent.futures import Executor
from typing import Any

from fleet.provision.agent.errors import AgentError
from fleet.provision.agent.paths import Ownership, path_fact, write_aside
from fleet.provision.agent.record import Record

MANIFEST_NAME = "fleet-manifest.json"
CACHE_DIRECTORY = "__pycache__"
FILE_SPEC = {"mode": 0o644, "owner": "root", "group": "root"}
Entry = list[Any]  # [digest or "->target", mode, mtime in ns]; the time, because bytecode names its source's time
Manifest = dict[str, Entry]  # by path relative to the environment


def site_packages(root: str) -> str:
    """Where wheels are installed, for this interpreter's version."""
    return os.path.join(root, "lib", f"python{sys.version_info[0]}.{sys.version_info[1]}", "site-packages")


def entries(root: str, skip_caches: bool) -> Iterator[tuple[str, str]]:
    """(path relative to root, absolute path) of every file and link, but the manifest."""
    for directory, directories, files in os.walk(root):
        if skip_caches and CACHE_DIRECTORY in directories:
            directories.remove(CACHE_DIRECTORY)
        links = [name for name in directories if os.path.islink(os.path.join(directory, name))]
        for name in [*files, *links]:
            path = os.path.join(directory, name)
            relative = os.path.relpath(path, root)
            if relative != MANIFEST_NAME:
                yield relative, path


def _content(fact: dict[str, Any]) -> str:
    return "->" + fact["target"] if fact["kind"] == "link" else str(fact.get("sha256", ""))


def entry(path: str) -> Entry:
    """The manifest's entry of a file or link as it is now."""
    fact = path_fact(path)
    return [_content(fact), fact.get("mode", 0), os.lstat(path).st_mtime_ns]


def take(root: str, pool: Executor) -> Manifest:
    """The manifest of an environment as it is now."""
    found = dict(sorted(entries(root, skip_caches=False)))
    return dict(zip(found, pool.map(entry, found.values()), strict=True))


def write(root: str, manifest: Manifest, ownership: Ownership) -> str:
    """Write the manifest into the environment; returns its digest, which belongs into the record."""
    text = json.dumps({"schema": 1, "files": manifest}, separators=(",", ":")).encode()
    write_aside(os.path.join(root, MANIFEST_NAME), [text], ownership, FILE_SPEC, sync=True)
    return hashlib.sha256(text).hexdigest()


def load(root: str, record: Record) -> Manifest | None:
    """The recorded manifest, or None if the environment is not there as it was made."""
    path = os.path.join(root, MANIFEST_NAME)
    fact = path_fact(path)
    if fact["kind"] != "file" or record.data["environments"].get(root) != fact["sha256"]:
        return None
    with open(path, "rb") as file:
        files: Manifest = json.load(file)["files"]
    return files


def fact(root: str, record: Record, privileged: bool, pool: Executor) -> dict[str, Any]:
    """In the shape of `fleet.provision.facts.EnvironmentFact`: every file against the manifest. In local mode programs
    own the environment and write bytecode caches: those count neither as extra nor as damage."""
    manifest = load(root, record)
    if manifest is None:
        return {"present": False, "damaged": {}}
    damaged = {name: "missing" for name in manifest if privileged or f"{CACHE_DIRECTORY}/" not in name}
    found = dict(entries(root, skip_caches=not privileged))
    for relative, present in zip(found, pool.map(path_fact, found.values()), strict=True):
        damaged[relative] = _why(present, manifest.get(relative), privileged)
    return {"present": True, "damaged": {name: why for name, why in sorted(damaged.items()) if why}}


def _why(present: dict[str, Any], recorded: Entry | None, privileged: bool) -> str:
    if recorded is None:
        return "extra"
    if _content(present) != recorded[0]:
        return "content"
    if present["mode"] != recorded[1]:
        return "mode"
    return "owner" if privileged and present["owner"] != "root" else ""


def records(root: str) -> Iterator[tuple[str, str, str]]:
    """(distribution, path relative to root, SHA-256 as RECORD writes it) of every file that a wheel brought.
    `distribution` is `name-version`, as wheels' file names begin."""
    packages = site_packages(root)
    for name in sorted(os.listdir(packages)):
        listing = os.path.join(packages, name, "RECORD")
        if not name.endswith(".dist-info") or not os.path.isfile(listing):
            continue
        with open(listing, newline="", encoding="utf-8", errors="replace") as file:
            for row in csv.reader(file):
                if len(row) > 1 and row[1].startswith("sha256="):
                    path = os.path.normpath(os.path.join(packages, row[0]))
                    yield name[: -len(".dist-info")], os.path.relpath(path, root), row[1][len("sha256=") :]


def check_installed(root: str, manifest: Manifest, hint: str) -> None:
    """Every installed file has the digest that its wheel states: a damaged wheel cache would show here.

    Raises:
        AgentError: one has not.
    """
    for distribution, relative, recorded in records(root):
        digest = bytes.fromhex(manifest[relative][0]) if relative in manifest else b""
        if base64.urlsafe_b64encode(digest).rstrip(b"=").decode() != recorded:
            message = f"{relative} is not what the wheel of {distribution} holds (a damaged wheel cache)"
            raise AgentError("environment", message, hint=hint)
