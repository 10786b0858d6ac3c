"""Our own logs: how fast they grow, and how room is made when their disk is full."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from guards.deadline import DeadlineReader, Unreadable
from guards.findings import Finding, Repair, State, Value
from guards.settings import HOUR_SECONDS, SurroundingsSettings
from guards.surroundings.window import Window

ROTATED = re.compile(r".+\.log\.(\d{1,6})")  # as supervisord and logging.handlers name them: stage.log.3
MOST_FILES = 10_000


@dataclass(frozen=True)
class Logs:
    """What lies in the directory of our logs.

    Attributes:
        sizes: bytes of each regular file, by its inode, which stays the same when supervisord renames it.
        device: of the file system. rotated: how many files may go.
        problem: why the figures are None; empty otherwise.
    """

    sizes: Mapping[int, int] | None
    device: int | None = None
    rotated: int = 0
    problem: str = ""


@dataclass(frozen=True)
class LogsMemory:
    """Sizes at the last look; bytes written, added up since the guard's start."""

    sizes: Mapping[int, int] | None = None
    written: float = 0.0
    window: Window = field(default_factory=Window)


def sense_logs(directory: Path, reader: DeadlineReader) -> Logs:
    """Look at the directory, not below it."""
    try:
        return reader.ask(f"logs in {directory}", lambda: _look(directory))
    except Unreadable as error:
        return Logs(None, problem=str(error))


def _look(directory: Path) -> Logs:
    sizes: dict[int, int] = {}
    rotated = 0
    with os.scandir(directory) as entries:
        for entry in entries:
            try:
                about = entry.stat(follow_symlinks=False)
            except FileNotFoundError:  # rotated away since
                continue
            if stat.S_ISREG(about.st_mode) and len(sizes) < MOST_FILES:
                sizes[about.st_ino] = about.st_size
                rotated += ROTATED.fullmatch(entry.name) is not None
    return Logs(sizes, directory.stat().st_dev, rotated)


def judge_logs(
    logs: Logs, memory: LogsMemory, settings: SurroundingsSettings, now_seconds: float
) -> tuple[tuple[Finding, ...], LogsMemory]:
    """One finding: what was written within the last hour. A file that came and went between two looks is not seen."""
    if logs.sizes is None:
        return (Finding("logs", State.DEGRADED, logs.problem, {}, Repair.CHECK_STORAGE),), memory
    before = memory.sizes
    grown = 0 if before is None else sum(max(0, size - before.get(inode, 0)) for inode, size in logs.sizes.items())
    written = memory.written + grown
    window = memory.window.added(now_seconds, written, HOUR_SECONDS)
    later = LogsMemory(logs.sizes, written, window)
    evidence: dict[str, Value] = {"bytes": sum(logs.sizes.values()), "bytes_per_hour": None}
    if window.seconds < settings.log_window_seconds:
        return (Finding("logs", State.INITIALISING, "not watched for long enough", evidence),), later
    rate = window.growth / window.seconds * HOUR_SECONDS
    evidence["bytes_per_hour"] = rate
    text = f"{rate / 1e6:.1f} MB/h"
    if rate > settings.log_mb_per_hour * 1e6:
        reason = f"{text}, bound {settings.log_mb_per_hour:g} MB/h"
        return (Finding("logs", State.DEGRADED, reason, evidence, Repair.CHECK_PROGRAM),), later
    return (Finding("logs", State.HEALTHY, text, evidence),), later


def drop_rotated(directory: Path, enough: Callable[[], bool]) -> list[str]:
    """Remove rotated logs, the oldest first (the highest number; of equal ones the least lately written), until there
    is enough room or none is left. Current logs, other files, links and other directories are never touched.

    Returns:
        Names of what was removed.

    Raises:
        OSError: the directory can't be read or is a link, or nothing could be removed.
    """
    here = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    dropped: list[str] = []
    refused: OSError | None = None
    try:
        for name in _oldest_first(here):
            if enough():
                break
            try:
                os.unlink(name, dir_fd=here)
            except OSError as error:  # one that can't go must not keep the others
                refused = error
            else:
                dropped.append(name)
    finally:
        os.close(here)
    if refused is not None and not dropped:
        raise refused
    return dropped


def _oldest_first(here: int) -> list[str]:
    found = []
    with os.scandir(here) as entries:
        for entry in entries:
            match = ROTATED.fullmatch(entry.name)
            if match is not None and entry.is_file(follow_symlinks=False):
                try:
                    written = entry.stat(follow_symlinks=False).st_mtime
                except FileNotFoundError:  # gone since
                    continue
                # by number first: it is right whatever a clock without battery wrote as time
                found.append((-int(match.group(1)), written, entry.name))
    return [name for _, _, name in sorted(found)]
