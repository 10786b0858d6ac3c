"""The facts request: digests of everything managed. Reads only."""

from __future__ import annotations

import os
import pwd
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from fleet.provision.agent import identity, manifest, supervise
from fleet.provision.agent.manifest import CACHE_DIRECTORY
from fleet.provision.agent.paths import NEW_SUFFIX, open_quietly, path_fact
from fleet.provision.agent.record import Record
from fleet.provision.agent.system import packages_missing, system_fact

TEXT_LIMIT_BYTES = 64 * 1024


def collect(spec: dict[str, Any], texts: list[str]) -> dict[str, Any]:
    """In the shape of `fleet.provision.facts.Facts`.

    Args:
        spec: the desired state without its contents, see `fleet.provision.sending.spec_json`.
        texts: paths whose text is wanted.
    """
    record = Record(spec["prefix"], spec["privileged"])
    wanted = [entry["path"] for kind in ("directories", "files", "links", "trees") for entry in spec[kind]]
    wanted += [file["path"] for tree in spec["trees"] for file in tree["files"]]
    with ThreadPoolExecutor(max_workers=len(os.sched_getaffinity(0))) as pool:  # hashlib releases the GIL
        facts = dict(zip(wanted, pool.map(path_fact, wanted), strict=True))
        checked = {
            entry["path"]: manifest.fact(entry["path"], record, spec["privileged"], pool)
            for entry in spec["environments"]
        }
    privileged = bool(spec["privileged"])
    supervisor, programs = supervise.fact(spec["supervisor"], record)
    return {
        "paths": facts,
        "extra": {
            tree["path"]: sorted(_unmanaged(tree, skip_caches=not privileged))
            for tree in spec["trees"]
            if facts[tree["path"]]["kind"] == "directory"
        },
        "environments": checked,
        "identity": identity.fact(spec["identity"], identity.owner_of(spec), privileged, record),
        "supervisor": supervisor,
        "programs": programs,
        "texts": {path: text for path in texts if (text := _text(path)) is not None},
        "packages_missing": packages_missing(spec["packages"]) if privileged else [],
        "user_present": not privileged or spec["user"] is None or _user_present(spec["user"]),
        "system": system_fact(spec["prefix"]),
    }


def _unmanaged(tree: dict[str, Any], *, skip_caches: bool) -> Iterable[str]:
    """Files and links of a tree that its specification does not name. Bytecode caches are left out where programs run
    as the trees' owner and so write them."""
    managed = {file["path"] for file in tree["files"]}
    for directory, directories, files in os.walk(tree["path"]):
        if skip_caches and CACHE_DIRECTORY in directories:
            directories.remove(CACHE_DIRECTORY)
        links = [name for name in directories if os.path.islink(os.path.join(directory, name))]
        for name in [*files, *links]:
            path = os.path.join(directory, name)
            if path not in managed and not name.endswith(NEW_SUFFIX):
                yield path


def _text(path: str) -> str | None:
    """Text of a small regular file, links above it followed; None if it is no such thing."""
    path = os.path.realpath(path)
    if not os.path.isfile(path) or os.path.getsize(path) > TEXT_LIMIT_BYTES:
        return None
    with open(open_quietly(path), "rb") as file:
        data = file.read(TEXT_LIMIT_BYTES)
    try:
        return data.decode()
    except UnicodeDecodeError:
        return None


def _user_present(name: str) -> bool:
    try:
        pwd.getpwnam(name)
    except KeyError:
        return False
    return True
