"""Space and inodes of file systems, and which of them our logs fill."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from guards.deadline import DeadlineReader, Unreadable
from guards.findings import Finding, Repair, State, Value
from guards.settings import SurroundingsSettings


@dataclass(frozen=True)
class Space:
    """Of the file system below a directory.

    Attributes:
        device: of the file system (st_dev); two directories with the same one share it. None: could not be asked.
        used_percent: of what the service user may use, as `df` counts: used ÷ (used + available).
        inodes_percent: None where the file system counts none (btrfs, vfat).
        problem: why the figures are None; empty otherwise.
    """

    directory: str
    device: int | None
    used_percent: float | None
    free_bytes: int | None
    inodes_percent: float | None
    problem: str = ""


def sense_space(directories: Sequence[Path], reader: DeadlineReader) -> tuple[Space, ...]:
    """Ask each; a file system that hangs (a drive in trouble, a network mount) costs its own figures only."""
    return tuple(_space(directory, reader) for directory in directories)


def _space(directory: Path, reader: DeadlineReader) -> Space:
    try:
        return reader.ask(f"space of {directory}", lambda: measure(directory))
    except Unreadable as error:
        return Space(str(directory), None, None, None, None, str(error))


def measure(directory: Path) -> Space:
    """Ask the file system below a directory.

    Raises:
        OSError: it can't be asked.
    """
    device = directory.stat().st_dev
    answer = os.statvfs(directory)
    used = answer.f_blocks - answer.f_bfree
    usable = used + answer.f_bavail
    inodes = 100.0 * (answer.f_files - answer.f_ffree) / answer.f_files if answer.f_files else None
    percent = 100.0 * used / usable if usable else None
    problem = "" if usable else "the file system tells no size"
    return Space(str(directory), device, percent, answer.f_bavail * answer.f_frsize, inodes, problem)


def judge_space(spaces: Sequence[Space], settings: SurroundingsSettings) -> tuple[Finding, ...]:
    """One finding a directory."""
    return tuple(_judge(space, settings) for space in spaces)


def is_full(space: Space, settings: SurroundingsSettings) -> bool:
    """Whether room must be made."""
    return space.used_percent is not None and space.used_percent > settings.disk_full_percent


def _judge(space: Space, settings: SurroundingsSettings) -> Finding:
    part = f"disk{space.directory}"
    evidence: dict[str, Value] = {
        "used_percent": space.used_percent,
        "free_bytes": space.free_bytes,
        "inodes_percent": space.inodes_percent,
    }
    if space.used_percent is None:
        return Finding(part, State.DEGRADED, space.problem, evidence, Repair.CHECK_STORAGE)
    used = f"{space.used_percent:.1f} % used"
    if is_full(space, settings):
        reason = f"{used}, full above {settings.disk_full_percent:g} %"
        return Finding(part, State.UNHEALTHY, reason, evidence, Repair.DROP_OLD_LOGS)
    if space.inodes_percent is not None and space.inodes_percent > settings.inodes_percent:
        reason = f"{space.inodes_percent:.1f} % of the inodes used, bound {settings.inodes_percent:g} %"
        return Finding(part, State.DEGRADED, reason, evidence, Repair.CHECK_STORAGE)
    if space.used_percent > settings.disk_percent:
        reason = f"{used}, bound {settings.disk_percent:g} %"
        return Finding(part, State.DEGRADED, reason, evidence, Repair.CHECK_STORAGE)
    return Finding(part, State.HEALTHY, used, evidence)
