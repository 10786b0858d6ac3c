"""Directories like `thermal_zone0`, `hwmon3`, `policy4`, and the files in them that only name things.

Names lie in the kernel's memory, and reading them asks no hardware: they need no deadline.
"""

from __future__ import annotations

from pathlib import Path

from guards.deadline import read_file


def numbered(directory: Path, prefix: str) -> list[Path]:
    """Entries called the prefix and a number, by number; empty if there is no such directory."""
    try:
        names = [entry.name for entry in directory.iterdir()]
    except OSError:
        return []
    numbers = sorted(
        int(name[len(prefix) :]) for name in names if name.startswith(prefix) and name[len(prefix) :].isdecimal()
    )
    return [directory / f"{prefix}{number}" for number in numbers]


def read_name(path: Path) -> str:
    """A name; empty if there is none."""
    try:
        return read_file(path).strip()
    except OSError:
        return ""
