"""Single files of a virtual environment put right from their wheels, everything else left alone."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import py_compile
import zipfile
from collections.abc import Iterable
from typing import Any

from fleet.provision.agent import manifest as manifests
from fleet.provision.agent.environments import wheels_of
from fleet.provision.agent.manifest import CACHE_DIRECTORY, Manifest, site_packages
from fleet.provision.agent.paths import Ownership, make_parents, remove, sync_directory, write_aside
from fleet.provision.agent.peer import Peer
from fleet.provision.agent.record import Record

Spec = dict[str, Any]


def mend(spec: Spec, damaged: dict[str, str], peer: Peer, ownership: Ownership, record: Record) -> bool:
    """Put files right. Modes, owners, links and extra files need no wheel; bytecode is compiled anew.

    Args:
        damaged: path relative to the environment → why, as in `EnvironmentFact.damaged`.

    Returns:
        False if a file is none of a wheel's (what uv itself made): the environment must be built anew.
    """
    root, manifest = spec["path"], manifests.load(spec["path"], record)
    if manifest is None:
        return False
    content = set()
    for relative, why in damaged.items():
        path = os.path.join(root, relative)
        if why == "extra":
            remove(path)
            sync_directory(os.path.dirname(path))
        elif why in ("content", "missing") and not manifest[relative][0].startswith("->"):
            content.add(relative)
        elif why in ("content", "missing"):
            remove(path)
            os.symlink(manifest[relative][0][2:], path)
        elif not os.path.islink(path):
            ownership.set(path, manifest[relative][1], "root", "root")
    bytecode = {name for name in content if f"{CACHE_DIRECTORY}/" in name}
    left = content - bytecode
    if left:
        wanted = _wheels_holding(root, left, spec["wheels"])
        with wheels_of(root, wanted, peer, ownership) as wheels:
            for wheel in wheels.values():
                left -= _take(wheel, root, left, manifest, ownership)
    return not left and _compile(root, bytecode, manifest, ownership, record)


def _wheels_holding(root: str, names: Iterable[str], wheels: list[Spec]) -> dict[str, Spec]:
    """The wheels that brought files: by RECORD, and by directory for the metadata itself."""
    packages = os.path.relpath(site_packages(root), root)
    owners = {relative: distribution for distribution, relative, _ in manifests.records(root)}
    distributions = set()
    for name in names:
        top = os.path.relpath(name, packages).split("/")[0]
        distributions.add(top[: -len(".dist-info")] if top.endswith(".dist-info") else owners.get(name, ""))
    return {
        wheel["name"]: wheel
        for wheel in wheels
        if any(name and wheel["name"].lower().startswith(name.lower() + "-") for name in distributions)
    }


def _take(wheel: str, root: str, names: set[str], manifest: Manifest, ownership: Ownership) -> set[str]:
    """Write what this wheel holds of `names` with the recorded digest; returns those written."""
    packages = os.path.relpath(site_packages(root), root)
    written = set()
    with zipfile.ZipFile(wheel) as archive:
        for member in archive.namelist():
            top, _, rest = member.partition("/")
            in_data = top.endswith(".data") and rest.startswith(("purelib/", "platlib/"))
            relative = os.path.join(packages, rest.partition("/")[2] if in_data else member)
            if relative not in names:
                continue
            data = archive.read(member)
            digest, mode, modified = manifest[relative]
            if hashlib.sha256(data).hexdigest() == digest:
                path = os.path.join(root, relative)
                make_parents(path)
                write_aside(path, [data], ownership, {"mode": mode, "owner": "root", "group": "root"}, sync=True)
                os.utime(path, ns=(modified, modified))
                written.add(relative)
    return written


def _compile(root: str, names: set[str], manifest: Manifest, ownership: Ownership, record: Record) -> bool:
    """Compile bytecode anew; its bytes may differ from the first time, so the manifest takes the new digests.
    Returns False for bytecode without a source."""
    for name in sorted(names):
        path = os.path.join(root, name)
        source = importlib.util.source_from_cache(path)
        if not os.path.isfile(source):
            return False
        remove(path)
        py_compile.compile(source, cfile=path, doraise=True)
        ownership.set(path, manifest[name][1], "root", "root")
        manifest[name] = manifests.entry(path)
    if names:
        record.data["environments"][root] = manifests.write(root, manifest, ownership)
        record.save()
    return True
