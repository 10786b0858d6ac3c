"""Everything a site needs, gathered in the office into one directory; manifest.json is written last.

Every step keeps what it finished, so a run after Ctrl-C (or after nothing changed) does only what is missing.
`.state/` in the bundle's directory remembers what was made from what; it is not part of the bundle.
"""

from __future__ import annotations

import contextlib
import fcntl
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from fleet import __version__
from fleet.bundle.context import BuildContext
from fleet.bundle.files import DigestCache, Report, size_text
from fleet.bundle.manifest import BundledModel, FileEntry, Manifest, TargetWheels
from fleet.bundle.model_source import obtain_model
from fleet.bundle.own_wheel import build_own_wheel
from fleet.bundle.pip import office_pip
from fleet.bundle.target import Target
from fleet.bundle.torch_source import TorchPin, apply_override, override_from_environment
from fleet.bundle.torch_wheel import obtain_torch
from fleet.bundle.wheels import gather_wheels
from fleet.errors import ExitCode, FleetError
from fleet.inventory.model import Role
from fleet.inventory.sitefile import SiteFile

SEARCHED_DIRECTORIES = ("wheels", "fleet", "models")


@dataclass(frozen=True)
class BundleResult:
    """The finished bundle, and whether this run changed anything of it."""

    manifest: Manifest
    changed: bool


def targets_of(site_file: SiteFile, override: str | None) -> dict[Target, TorchPin | None]:
    """Targets of the site's boxes, each with the torch that its stages run (None: no stage there).

    Raises:
        FleetError: two profiles of one target pin different torches, or a stage's profile pins none.
    """
    site = site_file.site
    targets: dict[Target, TorchPin | None] = {}
    for name, box in site.boxes.items():
        target = Target(*site_file.target_of(name))
        profile = site.device_profiles[box.profile]
        if Role.STAGE not in box.roles or profile.torch is None:
            targets.setdefault(target, None)
            continue
        location = site_file.resolve(profile.torch.location) if profile.torch.location else None
        said_by = f"device profile {box.profile}"
        pin = apply_override(TorchPin(profile.torch.version, profile.torch.source, location, said_by), override)
        known = targets.get(target)
        if known is not None and (known.version, known.source, known.location) != (
            pin.version,
            pin.source,
            pin.location,
        ):
            raise FleetError(
                f"{site_file.file}: {known.said_by} and {pin.said_by} share the target {target.name}, "
                f"but pin torch {known.version} ({known.source}) and {pin.version} ({pin.source})",
                hint="give both profiles the same torch",
            )
        targets[target] = pin
    return targets


def check_sources(site_file: SiteFile, override: str | None) -> None:
    """Find out before the first download that something named by the inventory is not on this machine.

    Args:
        site_file: the inventory.
        override: the environment's source of torch, which takes the place of every profile's.

    Raises:
        FleetError: names every missing file and directory with the line that asks for it.
    """
    site = site_file.site
    profiles = {box.profile for box in site.boxes.values() if Role.STAGE in box.roles and not override}
    wanted: list[tuple[tuple[str, ...], str | None]] = []
    for name, profile in site.device_profiles.items():
        if name in profiles and profile.torch is not None:
            wanted.append((("device_profiles", name, "torch", "location"), profile.torch.location))
    for name, model in site.models.items():
        wanted.append((("models", name, "source", "path"), model.source.path))
    missing = [
        f"{site_file.file}:{site_file.lines.get(key, 1)}: {'.'.join(key)}: {site_file.resolve(path)} does not exist"
        for key, path in wanted
        if path is not None and not site_file.resolve(path).exists()
    ]
    if missing:
        raise FleetError(
            "\n".join(missing),
            hint=f"put it there or correct the path (relative to {site_file.file.parent}), then: "
            f"fleet bundle {site_file.file}",
        )


def build_bundle(
    site_file: SiteFile, directory: Path, report: Report, *, refresh: bool = False, verbose: bool = False
) -> BundleResult:
    """Build or complete a site's bundle.

    Args:
        site_file: the inventory.
        directory: where it goes.
        report: takes lines of progress.
        refresh: look for newer wheels even if nothing changed.
        verbose: report pip's own output too.

    Raises:
        FleetError: what a step needs is missing, refused or too large; exit code 4 if another run holds the bundle.
    """
    state = directory / ".state"
    state.mkdir(parents=True, exist_ok=True)
    with _locked(state / "lock", directory):
        check_sources(site_file, override_from_environment())
        cache = DigestCache(state / "digests.json")
        try:
            pip = office_pip(state / "pip", report, verbose=verbose)
            manifest = _build(site_file, BuildContext(directory, pip, cache, refresh))
        finally:
            cache.save()
        changed = manifest.write()
        _remove_leftovers(manifest, report)
    return BundleResult(manifest, changed)


def _build(site_file: SiteFile, context: BuildContext) -> Manifest:
    directory = context.bundle
    targets = targets_of(site_file, override_from_environment())
    steps = _Steps(context.report, 1 + len(targets) + len(site_file.site.models))

    steps.start("our own wheel")
    own_wheel = build_own_wheel(directory / "fleet", context.state / "own-wheel.json", context.pip)
    wheels: dict[str, TargetWheels] = {}
    for target, pin in targets.items():
        steps.start(f"wheels for {target.name}" + (f", torch {pin.version}" if pin else ""))
        torch = obtain_torch(pin, target, context) if pin is not None else None
        wheels[target.name] = gather_wheels(target, own_wheel, torch, context)
    models: dict[str, BundledModel] = {}
    for name, model in site_file.site.models.items():
        steps.start(f"model {name}")
        converted = obtain_model(name, model.source, site_file.resolve, context)
        path = converted.directory.relative_to(directory).as_posix()
        models[name] = BundledModel(converted.digest, path, model.licence)
    own_path = own_wheel.relative_to(directory).as_posix()
    files = _files(directory, own_path, wheels, models, context.cache)
    return Manifest(directory, site_file.site.site, __version__, files, own_path, wheels, models)


class _Steps:
    """Numbers the steps, so that a user sees how far a run is."""

    def __init__(self, report: Report, total: int) -> None:
        self._report, self._total, self._number = report, total, 0

    def start(self, what: str) -> None:
        self._number += 1
        self._report(f"[{self._number}/{self._total}] {what}")


def _files(
    directory: Path,
    own_wheel: str,
    wheels: Mapping[str, TargetWheels],
    models: Mapping[str, BundledModel],
    cache: DigestCache,
) -> dict[str, FileEntry]:
    names = {own_wheel}
    for target in wheels.values():
        names |= {target.uv} | {wheel.file for lock in target.locks.values() for wheel in lock.requirements}
    for model in models.values():
        names |= {path.relative_to(directory).as_posix() for path in (directory / model.directory).iterdir()}
    entries = {}
    for name in sorted(names):
        path = directory / name
        entries[name] = FileEntry(cache.sha256(path), path.stat().st_size)
    return entries


def _remove_leftovers(manifest: Manifest, report: Report) -> None:
    """Files of earlier runs that the manifest no longer names; the manifest is durable before they go."""
    for top in SEARCHED_DIRECTORIES:
        root = manifest.directory / top
        for path in sorted(root.rglob("*"), reverse=True) if root.is_dir() else ():
            name = path.relative_to(manifest.directory).as_posix()
            if path.is_dir():
                if not any(path.iterdir()):
                    path.rmdir()
            elif name not in manifest.files and not path.name.startswith(".finished-"):
                report(f"  removing {name}, no longer needed")
                path.unlink()


@contextlib.contextmanager
def _locked(lock: Path, directory: Path) -> Iterator[None]:
    """One run a bundle at a time; the lock ends with the process, however it ends."""
    with lock.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise FleetError(
                f"{directory} is being built by another `fleet bundle`",
                hint="wait for it to end, or build elsewhere with --output DIR",
                exit_code=ExitCode.LOCKED,
            ) from error
        yield


def total_size_text(manifest: Manifest) -> str:
    """Size of all files of a bundle, for people."""
    return size_text(sum(entry.size_bytes for entry in manifest.files.values()))
