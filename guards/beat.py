"""The guards' sign of life: when a round last ended, in a small file of the run directory, for who watches the guards.

`guards/parent.py` reads it. The file lies on a tmpfs and is replaced as a whole, never fsynced, by a thread of its own,
so that no disk can hold the sign back. Its seconds are of CLOCK_MONOTONIC, which all processes of a box share and no
time server moves; the process's id says whose sign it is, so that a file left behind says nothing.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import stat
import threading
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

log = logging.getLogger(__name__)

FILE_NAME = "guards.beat"
FILE_MODE = 0o600
MOST_BYTES = 4096
BEAT_SECONDS = 5.0
LONGEST_ALLOWED_SECONDS = 86_400.0


@dataclass(frozen=True)
class Beat:
    """A sign of life.

    Attributes:
        pid: of the guards.
        round_seconds: monotonic, when a guard's round last ended and the loop that watches the guards still went on.
        allowed_seconds: guards whose last round is longer ago hang.
    """

    pid: int
    round_seconds: float
    allowed_seconds: float


def read_beat(path: Path) -> Beat | None:
    """The last sign of life; None if there is none, or it is not one that `write_beat` writes. Never waits for a FIFO.

    Raises:
        Nothing: what can't be read says nothing.
    """
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        descriptor = os.open(path, flags)
    except OSError:
        return None
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            return None
        document = json.loads(os.read(descriptor, MOST_BYTES))
        pid, round_seconds = int(document["pid"]), float(document["round_seconds"])
        allowed_seconds = float(document["allowed_seconds"])
    except (OSError, ValueError, TypeError, KeyError, OverflowError, RecursionError):
        return None
    finally:
        os.close(descriptor)
    if pid <= 0 or not round_seconds >= 0 or not 0 < allowed_seconds <= LONGEST_ALLOWED_SECONDS:  # NaN is refused too
        return None
    return Beat(pid, round_seconds, allowed_seconds)


def write_beat(path: Path, beat: Beat) -> None:
    """Replace the last sign of life by this one.

    Raises:
        OSError: it can't be written.
    """
    fresh = path.with_suffix(".new")
    with contextlib.suppress(FileNotFoundError):
        fresh.unlink()
    descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, FILE_MODE)
    try:
        os.write(descriptor, json.dumps(asdict(beat)).encode())
    finally:
        os.close(descriptor)
    fresh.replace(path)


class Beating:
    """A thread that writes the sign of life every few seconds.

    Args:
        path: of the file.
        round_seconds: when a round last ended; see `Beat`. allowed_seconds: see there.
    """

    def __init__(self, path: Path, round_seconds: Callable[[], float], allowed_seconds: float) -> None:
        self._path, self._round_seconds, self._allowed_seconds = path, round_seconds, allowed_seconds
        self._stopping = threading.Event()
        self._trouble = ""

    def start(self) -> None:
        """Begin."""
        threading.Thread(target=self._run, name="beat", daemon=True).start()

    def stop(self) -> None:
        """Write no more."""
        self._stopping.set()

    def beat(self) -> None:
        """Write it once; what can't be written is told in the log once."""
        beat = Beat(os.getpid(), self._round_seconds(), self._allowed_seconds)
        try:
            write_beat(self._path, beat)
        except OSError as error:
            trouble = f"{self._path}: cannot be written: {error.strerror or error}; hung guards would not be noticed"
        else:
            trouble = ""
        if trouble and trouble != self._trouble:
            log.warning("%s", trouble)
        self._trouble = trouble

    def _run(self) -> None:
        self.beat()
        while not self._stopping.wait(BEAT_SECONDS):
            self.beat()
