"""Typed read and write of a bundle's manifest.json; standard library only, because provisioning and planning use it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from fleet.bundle.files import canonical_json, sha256_bytes, sha256_file, write_atomically
from fleet.errors import FleetError

MANIFEST_SCHEMA = 1
MANIFEST_FILE = "manifest.json"
LARGEST_MANIFEST_BYTES = 16 << 20
"""About 200 bytes a file; sixteen mebibytes are eighty thousand files."""
STAGE_LOCK = "stage"
CONTROL_LOCK = "control"


@dataclass(frozen=True)
class FileEntry:
    """A file of the bundle: SHA-256 (hex) and size of its bytes."""

    sha256: str
    size_bytes: int


@dataclass(frozen=True)
class LockedWheel:
    """A requirement of a lock. `file` is the wheel's path below the bundle's directory, `wheels/<target>/….whl`."""

    name: str
    version: str
    file: str
    sha256: str


@dataclass(frozen=True)
class Lock:
    """All third-party wheels of one environment; `digest` is the SHA-256 of the requirements' canonical JSON."""

    digest: str
    requirements: tuple[LockedWheel, ...]


@dataclass(frozen=True)
class TargetWheels:
    """Wheels of one target, e.g. linux_x86_64-cp311: path of `uv`'s wheel, and locks by name (stage, control)."""

    uv: str
    locks: Mapping[str, Lock]


@dataclass(frozen=True)
class BundledModel:
    """A model: digest of its model.json, path of its directory below the bundle's, licence of the weights."""

    digest: str
    directory: str
    licence: str


@dataclass(frozen=True)
class Manifest:
    """What a finished bundle holds. Paths are relative to `directory`, with forward slashes.

    Attributes:
        directory: the bundle on this machine; not part of the file.
        site: name of the site. fleet_version: version of our own wheel.
        files: every file but manifest.json. fleet_wheel: path of our own wheel.
        targets: target → wheels. models: inventory name → model.
    """

    directory: Path
    site: str
    fleet_version: str
    files: Mapping[str, FileEntry]
    fleet_wheel: str
    targets: Mapping[str, TargetWheels]
    models: Mapping[str, BundledModel]

    def path(self, file: str) -> Path:
        """Where a file of the bundle lies on this machine."""
        return self.directory / file

    def model_directory(self, name: str) -> Path:
        """Where a model of the inventory lies.

        Raises:
            FleetError: the bundle has no such model.
        """
        if name not in self.models:
            known = ", ".join(self.models) or "none"
            raise FleetError(f"{self.directory}: the bundle has no model {name!r} (it has {known})", hint=_AGAIN)
        return self.directory / self.models[name].directory

    def lock(self, target: str, name: str) -> Lock:
        """A lock of a target.

        Raises:
            FleetError: the bundle was not built for that target, or without that lock.
        """
        if target not in self.targets:
            known = ", ".join(self.targets) or "none"
            raise FleetError(f"{self.directory}: the bundle has no wheels for {target} (it has {known})", hint=_AGAIN)
        locks = self.targets[target].locks
        if name not in locks:
            raise FleetError(f"{self.directory}: the bundle has no lock {name!r} for {target}", hint=_AGAIN)
        return locks[name]

    def verify(self, files: Iterable[str] | None = None) -> None:
        """Compare files (all if None) with their sizes and SHA-256s.

        Raises:
            FleetError: names the first file that is missing or different, with both values.
        """
        for file in self.files if files is None else files:
            entry, path = self.files[file], self.directory / file
            if not path.is_file():
                raise FleetError(f"{path} is missing from the bundle", hint=_AGAIN)
            if path.stat().st_size != entry.size_bytes:
                raise FleetError(
                    f"{path} has {path.stat().st_size} bytes, the manifest says {entry.size_bytes}", hint=_AGAIN
                )
            found = sha256_file(path)
            if found != entry.sha256:
                raise FleetError(f"{path} has SHA-256 {found}, the manifest says {entry.sha256}", hint=_AGAIN)

    def to_data(self) -> dict[str, Any]:
        """The JSON object of docs/architecture.md."""
        return {
            "schema": MANIFEST_SCHEMA,
            "site": self.site,
            "fleet_version": self.fleet_version,
            "files": {name: {"sha256": entry.sha256, "bytes": entry.size_bytes} for name, entry in self.files.items()},
            "fleet_wheel": self.fleet_wheel,
            "targets": {
                name: {
                    "uv": target.uv,
                    "locks": {
                        lock_name: {"digest": lock.digest, "requirements": requirements_data(lock.requirements)}
                        for lock_name, lock in target.locks.items()
                    },
                }
                for name, target in self.targets.items()
            },
            "models": {
                name: {"digest": model.digest, "directory": model.directory, "licence": model.licence}
                for name, model in self.models.items()
            },
        }

    def write(self) -> bool:
        """Write manifest.json atomically; returns False if it was there already with the same bytes."""
        path = self.directory / MANIFEST_FILE
        encoded = (json.dumps(self.to_data(), sort_keys=True, indent=1) + "\n").encode()
        if path.exists() and path.read_bytes() == encoded:
            return False
        write_atomically(path, encoded)
        return True


_AGAIN = "run `fleet bundle` again; it makes only what is missing"


def requirements_data(requirements: Iterable[LockedWheel]) -> list[dict[str, str]]:
    """A lock's requirements as JSON objects."""
    return [
        {"name": wheel.name, "version": wheel.version, "file": wheel.file, "sha256": wheel.sha256}
        for wheel in requirements
    ]


def make_lock(requirements: Iterable[LockedWheel]) -> Lock:
    """A lock with its digest; requirements in order of their names, so that equal sets have equal digests."""
    ordered = tuple(sorted(requirements, key=lambda wheel: wheel.name))
    return Lock(sha256_bytes(canonical_json(requirements_data(ordered))), ordered)


def load_manifest(directory: Path) -> Manifest:
    """Read `<directory>/manifest.json`. Files are not verified here: `Manifest.verify` does that on demand.

    Raises:
        FleetError: there is no finished bundle, or the manifest is damaged or of another schema.
    """
    path = directory / MANIFEST_FILE
    if not path.is_file():
        raise FleetError(f"{directory} is not a finished bundle: {MANIFEST_FILE} is missing", hint=_AGAIN)
    if path.stat().st_size > LARGEST_MANIFEST_BYTES:
        raise FleetError(f"{path} has {path.stat().st_size} bytes, expected a manifest", hint=_AGAIN)
    try:
        data = json.loads(path.read_bytes())
        if data["schema"] != MANIFEST_SCHEMA:
            raise FleetError(f"{path} has schema {data['schema']!r}, this fleet reads {MANIFEST_SCHEMA}", hint=_AGAIN)
        manifest = _from_data(directory, data)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise FleetError(f"{path} is damaged: {type(error).__name__}: {error}", hint=_AGAIN) from error
    for file in manifest.files:
        if PurePosixPath(file).is_absolute() or ".." in PurePosixPath(file).parts:
            raise FleetError(f"{path} names a file outside the bundle: {file}", hint=_AGAIN)
    listed = [manifest.fleet_wheel, *(target.uv for target in manifest.targets.values())]
    for target in manifest.targets.values():
        listed += [wheel.file for lock in target.locks.values() for wheel in lock.requirements]
    for file in listed:
        if file not in manifest.files:
            raise FleetError(f"{path} needs {file}, but does not list it", hint=_AGAIN)
    return manifest


def _from_data(directory: Path, data: Mapping[str, Any]) -> Manifest:
    return Manifest(
        directory=directory,
        site=str(data["site"]),
        fleet_version=str(data["fleet_version"]),
        files={name: FileEntry(str(raw["sha256"]), int(raw["bytes"])) for name, raw in data["files"].items()},
        fleet_wheel=str(data["fleet_wheel"]),
        targets={name: _target(raw) for name, raw in data["targets"].items()},
        models={
            name: BundledModel(str(raw["digest"]), str(raw["directory"]), str(raw["licence"]))
            for name, raw in data["models"].items()
        },
    )


def _target(raw: Mapping[str, Any]) -> TargetWheels:
    locks = {
        name: Lock(str(lock["digest"]), tuple(LockedWheel(**wheel) for wheel in lock["requirements"]))
        for name, lock in raw["locks"].items()
    }
    return TargetWheels(uv=str(raw["uv"]), locks=locks)
