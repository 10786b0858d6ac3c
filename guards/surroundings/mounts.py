"""File systems that were remounted read-only, and errors that ext4 has counted in its superblock."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath

from guards.deadline import DeadlineReader, Unreadable
from guards.findings import Finding, Repair, State, Value
from guards.roots import Roots

_OCTAL = re.compile(r"\\([0-7]{3})")  # the kernel writes blanks and the like in paths as \040
LEAST_FIELDS_BEFORE, LEAST_FIELDS_AFTER = 6, 3
MOST_MOUNTINFO_BYTES = 1 << 20


@dataclass(frozen=True)
class Mount:
    """A line of /proc/self/mountinfo (proc(5)).

    Attributes:
        device: "major:minor". read_only: of the mount or of the file system below it.
    """

    point: str
    device: str
    kind: str
    source: str
    read_only: bool


@dataclass(frozen=True)
class MountReading:
    """A file system that we write on.

    Attributes:
        directories: ours on it. mount: None if it could not be found out.
        errors: that ext4 has counted since the last fsck; None: not ext4, or not told.
        problem: why something is None although it should be there; empty otherwise.
    """

    directories: tuple[str, ...]
    mount: Mount | None
    errors: int | None = None
    problem: str = ""


def parse_mountinfo(text: str) -> tuple[Mount, ...]:
    """All mounts, in the kernel's order; lines that are none are left out."""
    mounts = []
    for line in text.splitlines():
        before, _, after = line.partition(" - ")
        head, tail = before.split(" "), after.split(" ")
        if len(head) < LEAST_FIELDS_BEFORE or len(tail) < LEAST_FIELDS_AFTER:
            continue
        options = {*head[5].split(","), *tail[2].split(",")}
        mounts.append(Mount(_plain(head[4]), head[2], tail[0], _plain(tail[1]), "ro" in options))
    return tuple(mounts)


def mount_of(directory: str, mounts: Sequence[Mount]) -> Mount | None:
    """The mount that a directory is on: the longest mount point above it; of equal ones the last hides the others."""
    found: Mount | None = None
    for mount in mounts:
        if not PurePath(directory).is_relative_to(mount.point):
            continue
        if found is None or len(mount.point) >= len(found.point):
            found = mount
    return found


def sense_mounts(directories: Sequence[Path], roots: Roots, reader: DeadlineReader) -> tuple[MountReading, ...]:
    """One reading a file system that one of the directories is on."""
    names = [_real(directory, reader) for directory in directories]
    try:
        mounts = parse_mountinfo(reader.ask("mountinfo", lambda: _mountinfo(roots)))
    except Unreadable as error:
        return (MountReading(tuple(names), None, problem=f"mountinfo: {error}"),)
    grouped: dict[Mount | None, list[str]] = {}
    for name in names:
        grouped.setdefault(mount_of(name, mounts), []).append(name)
    return tuple(_reading(mount, tuple(group), roots, reader) for mount, group in grouped.items())


def _real(directory: Path, reader: DeadlineReader) -> str:
    """Without links; as it is called where its file system hangs."""
    try:
        return reader.ask(f"path of {directory}", lambda: os.path.realpath(directory))
    except Unreadable:
        return str(directory)


def _mountinfo(roots: Roots) -> str:
    with (roots.proc / "self/mountinfo").open("rb") as file:
        return file.read(MOST_MOUNTINFO_BYTES).decode("utf-8", "surrogateescape")


def _reading(mount: Mount | None, names: tuple[str, ...], roots: Roots, reader: DeadlineReader) -> MountReading:
    if mount is None:
        return MountReading(names, None, problem="no mount holds it")
    if mount.kind != "ext4":
        return MountReading(names, mount)
    # the source may be /dev/root, which is no name of a device: the number is
    block = roots.sys / "dev/block" / mount.device
    name = block.resolve().name if block.exists() else PurePath(mount.source).name
    try:
        errors = int(reader.text(roots.sys / "fs/ext4" / name / "errors_count"))
    except (Unreadable, ValueError) as error:
        return MountReading(names, mount, problem=f"errors_count of {name}: {error}")
    return MountReading(names, mount, errors)


def judge_mounts(readings: Sequence[MountReading]) -> tuple[Finding, ...]:
    """One finding a file system. No bound is needed: one error is one too many. ext4 counts errors in its superblock
    until fsck mends it, over any reboot, so a file system that ever had one stays unhealthy until then."""
    return tuple(_judge(reading) for reading in readings)


def _judge(reading: MountReading) -> Finding:
    mount = reading.mount
    if mount is None:
        part = f"mount{reading.directories[0]}" if reading.directories else "mount"
        return Finding(part, State.DEGRADED, reading.problem, {}, Repair.CHECK_STORAGE)
    part = f"mount{mount.point}"
    evidence: dict[str, Value] = {
        "read_only": mount.read_only,
        "file_system": mount.kind,
        "ext4_errors": reading.errors,
    }
    if mount.read_only:
        reason = f"{mount.source} is read-only, but {', '.join(reading.directories)} must be written"
        return Finding(part, State.UNHEALTHY, reason, evidence, Repair.CHECK_STORAGE)
    if reading.errors:
        reason = f"ext4 has counted {reading.errors} errors on {mount.source} since its last fsck"
        return Finding(part, State.UNHEALTHY, reason, evidence, Repair.CHECK_STORAGE)
    return Finding(part, State.HEALTHY, reading.problem, evidence)


def _plain(text: str) -> str:
    return _OCTAL.sub(lambda match: chr(int(match.group(1), 8)), text)
