"""A sensor for drills: `fleet drill heat` shows the guard a temperature that no chip has, on a live box.

Zones in the format of `/sys/class/thermal` below `<run directory>/drill/thermal`, e.g. `thermal_zone0/type` holding
`cpu-thermal` and `thermal_zone0/temp` holding thousandths of a degree, `86000`. The run directory is where
supervisord's socket lies. The zones take part in the maximum like those of the chips, as `drill/thermal_zone0/…`, so
they can make a box seem hotter, never cooler. Where there are none, this source sees nothing.

- Directories and files count only if root or the guards' own user owns them, and nobody else may write them: no other
  user of the box slows it down. Links and what is no regular file don't count either.
- A file that isn't written anew for `LONGEST_SECONDS` is left out: a drill that nobody ended ends by itself.
- Whoever writes `temp` replaces it (a new file, then rename), so that no half-written number is read.
"""

from __future__ import annotations

import contextlib
import os
import stat
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from guards.deadline import MOST_FILE_BYTES, DeadlineReader, Unreadable
from guards.thermal.kinds import believe_millidegrees, kind_of
from guards.thermal.readings import DRILL, Kind, Seen, Zone

DIRECTORIES = ("drill", "thermal")  # below the run directory
PREFIX = "thermal_zone"
MOST_ZONES = 16
LONGEST_SECONDS = 1800.0
WRITABLE_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH


@dataclass(frozen=True)
class _File:
    """A file's text, and what tells that it was written anew."""

    text: str
    version: tuple[int, int]  # inode, and time of its last change in ns


class DrillZones:
    """See the module.

    Args:
        run_directory: of the guards.
        reader: looks at the files on a thread of its own, whatever file system they lie on.
    """

    def __init__(self, run_directory: Path, reader: DeadlineReader) -> None:
        self._run_directory, self._reader = run_directory, reader
        self._since: dict[str, tuple[tuple[int, int], float]] = {}  # zone → version of its file, monotonic seconds

    def read(self) -> Seen:
        """The zones of a drill; one that can't be believed is there without a temperature, with the reason."""
        try:
            found = self._reader.ask(DRILL, self._look)
        except Unreadable as error:
            return Seen(zones=(Zone(DRILL, Kind.SOC, None, str(error)),))
        zones = tuple(self._zone(name, type_name, file) for name, type_name, file in found)
        there = {name for name, _, _ in found}
        self._since = {name: since for name, since in self._since.items() if name in there}
        return Seen(zones=zones)

    def _zone(self, name: str, type_name: str, file: _File) -> Zone:
        kind = kind_of(type_name)
        kind = Kind.SOC if kind is Kind.OTHER else kind  # whatever it is called, it is there to be judged
        shown, now = f"{DRILL}/{name}/{type_name}", time.monotonic()
        version, since = self._since.get(name, (None, now))
        if version != file.version:
            since = now
        self._since[name] = (file.version, since)
        if now - since > LONGEST_SECONDS:
            return Zone(shown, kind, None, f"a drill that nobody has ended for {LONGEST_SECONDS:g} s is over")
        celsius, reason = believe_millidegrees(file.text, kind)
        return Zone(shown, kind, celsius, reason)

    def _look(self) -> list[tuple[str, str, _File]]:
        """(zone, type, temperature's file) of each zone; OSError if something can't be read or is not to be trusted."""
        with contextlib.ExitStack() as opened:
            here = os.open(self._run_directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            opened.callback(os.close, here)
            for name in DIRECTORIES:
                try:
                    here = opened.enter_context(_directory(name, here))
                except FileNotFoundError:
                    return []
            names = sorted(name for name in os.listdir(here) if _is_zone(name))  # noqa: PTH208 - of a descriptor
            return [zone for name in names[:MOST_ZONES] if (zone := _zone_files(name, here)) is not None]


def _is_zone(name: str) -> bool:
    return name.startswith(PREFIX) and name[len(PREFIX) :].isascii() and name[len(PREFIX) :].isdecimal()


def _zone_files(name: str, parent: int) -> tuple[str, str, _File] | None:
    """None for a zone that vanishes meanwhile, or is not whole yet."""
    try:
        with _directory(name, parent) as directory:
            type_name = _file("type", directory).text.strip()[:60]
            return name, type_name, _file("temp", directory)
    except FileNotFoundError:
        return None


@contextlib.contextmanager
def _directory(name: str, parent: int) -> Iterator[int]:
    descriptor = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=parent)
    try:
        _trust(name, os.fstat(descriptor))
        yield descriptor
    finally:
        os.close(descriptor)


def _file(name: str, directory: int) -> _File:
    # O_NONBLOCK: a FIFO is not waited for
    descriptor = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=directory)
    try:
        about = os.fstat(descriptor)
        _trust(name, about)
        if not stat.S_ISREG(about.st_mode):
            raise OSError(f"{name} is no regular file")
        text = os.read(descriptor, MOST_FILE_BYTES).decode("utf-8", "replace")
        return _File(text, (about.st_ino, about.st_mtime_ns))
    finally:
        os.close(descriptor)


def _trust(name: str, about: os.stat_result) -> None:
    if about.st_uid not in (0, os.geteuid()):
        raise OSError(f"{name} belongs to user {about.st_uid}, not to root or the guards' own")
    if about.st_mode & WRITABLE_BY_OTHERS:
        raise OSError(f"{name} may be written by others")
