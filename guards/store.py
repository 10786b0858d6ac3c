"""What guards must not forget over reboots: one small JSON file, replaced as a whole."""

from __future__ import annotations

import contextlib
import json
import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from guards.budgets import Ledger

SCHEMA = 1
FILE_NAME = "guards.json"
MOST_BYTES = 4 * 1024 * 1024
FILE_MODE = 0o600
# O_NONBLOCK: a FIFO in the place of the new file is refused, then removed, instead of waited for.
FRESH_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
LONGEST_RUNNING_SECONDS = 100 * 366 * 86_400.0  # a century; what is beyond it was not written by us


@dataclass(frozen=True)
class Kept:
    """The contents.

    Attributes:
        running_seconds: of the running clock when it was written.
        ledger: what budgets have paid for.
        memories: name of a guard → what its `memory_to_json` gave.
    """

    running_seconds: float
    ledger: Ledger
    memories: Mapping[str, Mapping[str, Any]]


class DamagedStore(Exception):
    """The file is there, but it is not ours or not whole; the message says why."""


class Store:
    """Reads and replaces the file.

    Args:
        directory: that the service user may write.
    """

    def __init__(self, directory: Path) -> None:
        self.path = directory / FILE_NAME

    def load(self) -> Kept | None:
        """What was kept; None if nothing ever was.

        Raises:
            DamagedStore: see there. OSError: it can't be read.
        """
        try:
            # O_NONBLOCK: a FIFO in its place must not be waited for
            descriptor = os.open(self.path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except FileNotFoundError:
            return None
        try:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise DamagedStore(f"{self.path}: is no regular file")
            with os.fdopen(descriptor, "rb", closefd=False) as file:
                data = file.read(MOST_BYTES + 1)
        finally:
            os.close(descriptor)
        if len(data) > MOST_BYTES:
            raise DamagedStore(f"{self.path}: larger than {MOST_BYTES} bytes")
        try:
            return _parse(json.loads(data))
        except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError) as error:
            raise DamagedStore(f"{self.path}: {type(error).__name__}: {str(error)[:200]}") from None

    def set_aside(self) -> Path:
        """Move a damaged file out of the way, beside itself; the last such one is kept."""
        aside = self.path.with_suffix(".damaged")
        self.path.replace(aside)
        return aside

    def save(self, kept: Kept) -> None:
        """Durable when this returns: a power cut leaves the old contents or the new.

        Raises:
            OSError: the disk refuses; the old contents stay.
        """
        document = {
            "schema": SCHEMA,
            "running_seconds": kept.running_seconds,
            "ledger": kept.ledger.to_json(),
            "memories": kept.memories,
        }
        data = json.dumps(document, separators=(",", ":"), allow_nan=False).encode()
        fresh = self.path.with_suffix(".new")
        try:
            descriptor = os.open(fresh, FRESH_FLAGS, FILE_MODE)
            with os.fdopen(descriptor, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            fresh.replace(self.path)
        except OSError:
            with contextlib.suppress(OSError):
                fresh.unlink(missing_ok=True)  # half a file holds space that a full disk lacks
            raise
        directory = os.open(self.path.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)


def _parse(document: Any) -> Kept:
    if document["schema"] != SCHEMA:
        raise ValueError(f"schema: read {document['schema']!r}, this version knows {SCHEMA}")
    running_seconds = float(document["running_seconds"])
    if not 0 <= running_seconds <= LONGEST_RUNNING_SECONDS:  # NaN is in no interval
        raise ValueError(f"running_seconds: read {running_seconds}")
    memories = {str(name): dict(memory) for name, memory in document["memories"].items()}
    ledger = Ledger.from_json(document["ledger"])
    for name, times in ledger.spent.items():
        if not all(0 <= each <= running_seconds for each in times):
            raise ValueError(f"ledger of {name}: read times that have not been yet")
    return Kept(running_seconds, ledger, memories)
