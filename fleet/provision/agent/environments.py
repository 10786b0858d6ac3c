"""Virtual environments: made offline by `uv` from wheels that were sent, mended file by file from the same wheels."""

from __future__ import annotations

import contextlib
import fcntl
import os
import sys
import zipfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from fleet.provision.agent import manifest as manifests
from fleet.provision.agent.errors import AgentError
from fleet.provision.agent.paths import (
    Ownership,
    make_parents,
    remove,
    sha256_of,
    sync_directory,
    sync_file_system,
    write_aside,
)
from fleet.provision.agent.peer import Peer
from fleet.provision.agent.record import Record
from fleet.provision.agent.system import PATH, command

STEP = "environment"
SHARED_CACHE_NAME = ".uv-cache"  # local mode: below the site's prefix, so that boxes hardlink the same files
BUILD_SECONDS = 1800.0
Spec = dict[str, Any]
UV = "uv.whl"  # the name that the wheel of uv has among the others


def _check_python(spec: Spec) -> None:
    here = f"{sys.version_info[0]}.{sys.version_info[1]}"
    if here != spec["python"]:
        raise AgentError(
            STEP,
            f"{sys.executable} is Python {here}, the wheels are for {spec['python']}",
            hint=f'set python: "{here}" in the box\'s device profile, then fleet bundle',
        )


@contextlib.contextmanager
def wheels_of(root: str, wanted: dict[str, Spec], peer: Peer, ownership: Ownership) -> Iterator[dict[str, str]]:
    """Bring wheels: name → path, while the block runs. Sent ones lie beside the environment and stay there after an
    interruption; in local mode they are used where the bundle has them.

    Args:
        root: the environment. wanted: name → {"sha256", "size_bytes"}.
    """
    store = root + ".wheels"
    paths = {name: os.path.join(store, name) for name in wanted}
    missing = {
        name: content
        for name, content in wanted.items()
        if not (os.path.isfile(paths[name]) and sha256_of(paths[name]) == content["sha256"])
    }
    size = sum(content["size_bytes"] for content in missing.values())
    peer.waits_for(f"{len(missing)} wheels, {size / 1e6:.1f} MB")
    request = [{"sha256": content["sha256"], "size_bytes": content["size_bytes"]} for content in missing.values()]
    for name, blob in zip(missing, peer.contents(request), strict=True):
        if blob.file:
            paths[name] = blob.take_file()
        else:
            os.makedirs(store, mode=0o755, exist_ok=True)
            write_aside(paths[name], blob.chunks(), ownership, manifests.FILE_SPEC, sync=False)
    yield paths
    remove(store)


def _unpack_uv(wheel: str, cache: str) -> str:
    """Take the program out of its wheel; returns its path."""
    place = os.path.join(cache, "fleet-uv")
    with zipfile.ZipFile(wheel) as archive:
        programs = [name for name in archive.namelist() if name.endswith(".data/scripts/uv")]
        if len(programs) != 1:
            raise AgentError(STEP, f"{os.path.basename(wheel)} holds no uv program", hint="fleet bundle")
        data = archive.read(programs[0])
    descriptor = os.open(place, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o700)
    with open(descriptor, "wb") as file:
        file.write(data)
    return place


@contextlib.contextmanager
def _cache(spec: Spec, prefix: str, privileged: bool, peer: Peer) -> Iterator[str]:
    """uv's cache: a throw-away one on the environment's own disk (so that files are linked, not copied), or in local
    mode one that the site's boxes share, used by one box at a time."""
    if privileged:
        cache = spec["path"] + ".cache"
        remove(cache)
        os.makedirs(cache, mode=0o700)
        yield cache
        remove(cache)
        return
    cache = os.path.join(os.path.dirname(prefix), SHARED_CACHE_NAME)
    os.makedirs(cache, mode=0o700, exist_ok=True)
    descriptor = os.open(os.path.join(cache, "fleet.lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        peer.waits_for("another box of this site that fills the shared wheel cache")
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield cache
    finally:
        os.close(descriptor)


def build(spec: Spec, prefix: str, peer: Peer, ownership: Ownership, record: Record) -> None:
    """Make an environment beside its place, check it against the wheels' own digests, rename it into place.

    Raises:
        AgentError: another Python than the wheels', `uv` failed, or an installed file is not its wheel's.
    """
    _check_python(spec)
    path, partial = spec["path"], spec["path"] + ".partial"
    make_parents(path)
    remove(partial)
    wanted = {UV: spec["uv"]} | {wheel["name"]: wheel for wheel in spec["wheels"]}
    with wheels_of(path, wanted, peer, ownership) as wheels, _cache(spec, prefix, ownership.privileged, peer) as cache:
        peer.waits_for(f"uv to install {len(spec['wheels'])} wheels")
        uv = _unpack_uv(wheels.pop(UV), cache)
        _run_uv(spec, partial, uv, wheels, cache, compile_bytecode=ownership.privileged)
        with ThreadPoolExecutor(max_workers=len(os.sched_getaffinity(0))) as pool:
            manifest = manifests.take(partial, pool)
        manifests.check_installed(partial, manifest, f"rm -rf {cache}  (a cache), then provision again")
    peer.waits_for("the disk to hold it safely")
    digest = manifests.write(partial, manifest, ownership)
    sync_file_system(partial)
    remove(path)
    os.rename(partial, path)
    sync_directory(os.path.dirname(path))
    record.data["environments"][path] = digest
    record.save()


def _run_uv(spec: Spec, partial: str, uv: str, wheels: dict[str, str], cache: str, *, compile_bytecode: bool) -> None:
    """Bytecode is compiled where programs can't write it themselves; in local mode that would only cost time."""
    variables = {
        "PATH": PATH,
        "HOME": cache,
        "UV_CACHE_DIR": cache,
        "UV_OFFLINE": "1",
        "UV_NO_CONFIG": "1",
        "UV_PYTHON_DOWNLOADS": "never",
        "UV_LINK_MODE": "hardlink",
        "UV_COMPILE_BYTECODE": "1" if compile_bytecode else "0",
    }
    venv = [uv, "venv", "--quiet", "--no-project", "--relocatable", "--python", sys.executable, partial]
    command(STEP, venv, environment=variables, timeout_seconds=BUILD_SECONDS, dies_with_agent=True)
    install = [uv, "pip", "install", "--quiet", "--no-index", "--require-hashes", "--no-deps"]
    install += ["--python", os.path.join(partial, "bin/python")]
    for directory in sorted({os.path.dirname(wheel) for wheel in wheels.values()}):
        install += ["--find-links", directory]
    install += ["--requirements", "-"]
    command(
        STEP,
        install,
        stdin=spec["requirements"].encode(),
        environment=variables,
        timeout_seconds=BUILD_SECONDS,
        dies_with_agent=True,
    )
