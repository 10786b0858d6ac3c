"""All wheels of one target, resolved in the office: what has no usable wheel fails here, not on site.

torch is fetched first and takes no part in pip's resolution (its requirements do), so nothing can replace it. pip
judges markers by the interpreter it runs on, so the set it downloads is closed once more here, with the markers of
the target, and what is missing is asked for by name.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from fleet.bundle.context import BuildContext
from fleet.bundle.files import (
    DigestCache,
    canonical_json,
    fsync_directory,
    require_free_space,
    sha256_bytes,
    write_atomically,
)
from fleet.bundle.manifest import (
    CONTROL_LOCK,
    STAGE_LOCK,
    Lock,
    LockedWheel,
    TargetWheels,
    make_lock,
    requirements_data,
)
from fleet.bundle.pip import Pip
from fleet.bundle.target import Target
from fleet.bundle.torch_source import CUDA_PACKAGE
from fleet.bundle.wheel_metadata import WheelMetadata, read_wheel_metadata
from fleet.errors import FleetError

LOCK_EXTRAS = {STAGE_LOCK: ("stage", "guards"), CONTROL_LOCK: ("control", "guards")}
"""Which extras of our own wheel an environment has (docs/architecture.md)."""
MOST_ROUNDS = 5
"""Each round asks pip for what the target's markers add; real packages need one or two."""
WHEELS_BYTES = 200_000_000
"""Free disk asked for, beside torch: uv has 25 MB, numpy-less locks about 20 MB, twice while they are moved."""
UV_REQUIREMENT = "uv>=0.5"


@dataclass(frozen=True)
class Gathered:
    """Wheels in one directory: canonical package name → file and metadata."""

    files: Mapping[str, Path]
    metadata: Mapping[str, WheelMetadata]


@dataclass(frozen=True)
class Closure:
    """What a set of requirements leads to: package names, and requirements that no wheel at hand answers."""

    names: frozenset[str]
    missing: tuple[str, ...]


def lock_roots(own: WheelMetadata, lock: str, target: Target) -> tuple[Requirement, ...]:
    """Our own direct requirements of a lock on a target, torch excepted (it is pinned by the device profile)."""
    applying = target.applying(own.requires, LOCK_EXTRAS[lock])
    return tuple(requirement for requirement in applying if canonicalize_name(requirement.name) != "torch")


def check_torch_version(own: WheelMetadata, version: str) -> None:
    """Our own lower bound of torch, compared by release numbers so that vendors' pre-releases count.

    Raises:
        FleetError: the pinned torch is too old for the stage runtime.
    """
    for line in own.requires:
        requirement = Requirement(line)
        release = Version(Version(version).base_version)
        if canonicalize_name(requirement.name) == "torch" and release not in requirement.specifier:
            raise FleetError(
                f"torch {version} does not satisfy {requirement.name}{requirement.specifier}",
                hint="pin a newer torch in the device profile",
            )


def close(roots: Iterable[Requirement], metadata: Mapping[str, WheelMetadata], target: Target) -> Closure:
    """Follow requirements through wheels' metadata with the target's markers. Pure."""
    waiting = list(roots)
    seen: set[tuple[str, frozenset[str]]] = set()
    names: set[str] = set()
    missing: list[str] = []
    while waiting:
        requirement = waiting.pop()
        name = canonicalize_name(requirement.name)
        visit = (name, frozenset(requirement.extras))
        found = metadata.get(name)
        if found is None or not requirement.specifier.contains(found.version, prereleases=True):
            missing.append(_plain(requirement))
            continue
        if visit in seen:
            continue
        seen.add(visit)
        names.add(name)
        waiting.extend(target.applying(found.requires, requirement.extras))
    return Closure(frozenset(names), tuple(sorted(set(missing))))


def _plain(requirement: Requirement) -> str:
    """A requirement without its marker, which has been judged already."""
    extras = f"[{','.join(sorted(requirement.extras))}]" if requirement.extras else ""
    return f"{requirement.name}{extras}{requirement.specifier}"


def gather_wheels(target: Target, own_wheel: Path, torch: Path | None, context: BuildContext) -> TargetWheels:
    """Fetch every wheel of a target's locks and uv, and compute the locks.

    Args:
        target: architecture and Python.
        own_wheel: our wheel, whose extras say what is needed.
        torch: the fetched wheel, in `wheels/<target>` already; None where no stage runs.
        context: this run; wheels go to `wheels/<target>` of its bundle.

    Raises:
        FleetError: a package has no usable wheel for the target, or a CUDA package came in.
    """
    bundle, cache = context.bundle, context.cache
    own = read_wheel_metadata(own_wheel)
    torch_metadata = read_wheel_metadata(torch) if torch is not None else None
    roots = {CONTROL_LOCK: list(lock_roots(own, CONTROL_LOCK, target))}
    if torch_metadata is not None:
        check_torch_version(own, torch_metadata.version)
        roots[STAGE_LOCK] = [
            *lock_roots(own, STAGE_LOCK, target),
            *target.applying(torch_metadata.requires),
        ]
    wanted = sorted({_plain(each) for each in (Requirement(UV_REQUIREMENT), *roots[CONTROL_LOCK])} | {
        _plain(each) for each in roots.get(STAGE_LOCK, [])
    })  # fmt: skip
    torch_digest = cache.sha256(torch) if torch is not None else None
    key = sha256_bytes(canonical_json([target.name, wanted, torch_digest, target.platforms]))
    record = context.state / f"{target.name}.json"
    if not context.refresh:
        known = _known(record, key, bundle, cache)
        if known is not None:
            return known

    directory = bundle / "wheels" / target.name
    directory.mkdir(parents=True, exist_ok=True)
    require_free_space(directory, WHEELS_BYTES, f"gathering wheels for {target.name}")
    with tempfile.TemporaryDirectory(prefix=".gathering-", dir=context.state) as staging:
        gathered = _download(wanted, roots, target, Path(staging), context.pip)
        closures = {lock: close(requirements, gathered.metadata, target) for lock, requirements in roots.items()}
        for lock, closure in closures.items():
            _refuse_cuda(lock, closure, roots[lock], target)
        kept = {name: _adopt(path, directory) for name, path in gathered.files.items()}
        fsync_directory(directory)
    locks: dict[str, Lock] = {}
    for lock, closure in closures.items():
        wheels = [_locked(name, gathered.metadata[name], kept[name], bundle, cache) for name in closure.names]
        if lock == STAGE_LOCK and torch is not None and torch_metadata is not None:
            wheels.append(_locked("torch", torch_metadata, torch, bundle, cache))
        locks[lock] = make_lock(wheels)
    result = TargetWheels(kept["uv"].relative_to(bundle).as_posix(), locks)
    write_atomically(record, canonical_json({"key": key, **_data(result, bundle, cache)}))
    return result


def _download(
    wanted: list[str], roots: Mapping[str, list[Requirement]], target: Target, staging: Path, pip: Pip
) -> Gathered:
    """Let pip download what is wanted until the target's markers ask for nothing more."""
    asked = list(wanted)
    for round_number in range(MOST_ROUNDS):
        directory = staging / str(round_number)
        pip.report(f"  resolving and downloading {len(asked)} requirements and what they need")
        arguments = ["download", "--quiet", "--dest", str(directory), *target.pip_options, *asked]
        pip.run(arguments, f"resolving wheels for {target.name}")
        gathered = _read(directory)
        missing = {
            line for requirements in roots.values() for line in close(requirements, gathered.metadata, target).missing
        }
        if not missing:
            return gathered
        asked += sorted(missing)
    raise FleetError(
        f"wheels for {target.name}: requirements keep missing: {', '.join(sorted(missing))}",
        hint=f"run `fleet bundle` with Python {target.python}, so that pip judges markers as the boxes would",
    )


def _read(directory: Path) -> Gathered:
    files: dict[str, Path] = {}
    metadata: dict[str, WheelMetadata] = {}
    for path in sorted(directory.glob("*.whl")):
        found = read_wheel_metadata(path)
        name = canonicalize_name(found.name)
        files[name], metadata[name] = path, found
    return Gathered(files, metadata)


def _refuse_cuda(lock: str, closure: Closure, roots: list[Requirement], target: Target) -> None:
    """Our own direct requirement nvidia-ml-py (NVML's bindings, pure Python) is no CUDA package."""
    direct = {canonicalize_name(requirement.name) for requirement in roots}
    cuda = sorted(name for name in closure.names if CUDA_PACKAGE.match(name) and name not in direct)
    if cuda or "torch" in closure.names:
        raise FleetError(
            f"lock {lock} for {target.name}: {', '.join(cuda) or 'another torch'} would come in",
            hint="a package drags in CUDA or its own torch; see which with `pip download -v`, and report it",
        )


def _adopt(source: Path, directory: Path) -> Path:
    """Move a downloaded wheel, its bytes durable, into the bundle."""
    with source.open("rb") as file:
        os.fsync(file.fileno())
    path = directory / source.name
    source.replace(path)
    return path


def _locked(name: str, metadata: WheelMetadata, path: Path, bundle: Path, cache: DigestCache) -> LockedWheel:
    return LockedWheel(name, metadata.version, path.relative_to(bundle).as_posix(), cache.sha256(path))


def _data(wheels: TargetWheels, bundle: Path, cache: DigestCache) -> dict[str, Any]:
    locks = {name: requirements_data(lock.requirements) for name, lock in wheels.locks.items()}
    return {"uv": wheels.uv, "uv_sha256": cache.sha256(bundle / wheels.uv), "locks": locks}


def _known(record: Path, key: str, bundle: Path, cache: DigestCache) -> TargetWheels | None:
    """The result of an earlier run with the same requirements, if every wheel is still as it was."""
    if not record.exists():
        return None
    data = json.loads(record.read_bytes())
    if data["key"] != key:
        return None
    locks = {name: make_lock(LockedWheel(**wheel) for wheel in lock) for name, lock in data["locks"].items()}
    expected = {wheel.file: wheel.sha256 for lock in locks.values() for wheel in lock.requirements}
    expected[data["uv"]] = data["uv_sha256"]
    for file, sha256 in expected.items():
        path = bundle / file
        if not path.is_file() or cache.sha256(path) != sha256:
            return None
    return TargetWheels(data["uv"], locks)
