"""What guards must not forget over reboots: one small JSON file, replaced as a whole."""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from guards.budgets import Ledger

SCHEMA = 1
FILE_NAME = "guards.json"
MOST_BYTES = 4 * 1024 * 1024
FILE_MODE = 0o600


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
            with self.path.open("rb") as file:
                data = file.read(MOST_BYTES + 1)
        except FileNotFoundError:
            return None
        if len(data) > MOST_BYTES:
            raise DamagedStore(f"{self.path}: larger than {MOST_BYTES} bytes")
        try:
            return _parse(json.loads(data))
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
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
            descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, FILE_MODE)
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
    if not (math.isfinite(running_seconds) and running_seconds >= 0):
        raise ValueError(f"running_seconds: read {running_seconds}")
    memories = {str(name): dict(memory) for name, memory in document["memories"].items()}
    return Kept(running_seconds, Ledger.from_json(document["ledger"]), memories)
