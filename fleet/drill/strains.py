"""What a drill lays on a box so that its guards trip, and takes off again. Standard library only; runs on the box."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path
from typing import Any, Protocol

from fleet.provision.agent.errors import AgentError

STEP = "drill"
ZONE = ("drill", "thermal", "thermal_zone0")  # below the run directory; read by guards/thermal/sources/drill.py
ZONE_TYPE = "cpu-thermal"
MEBIBYTE = 1 << 20
LEAST_FREE_BYTES = 64 * MEBIBYTE
LARGEST_FILL_BYTES = 64 << 30  # on larger disks a drill would hold back too much, for too long
BEYOND_PERCENT = 1.0  # so much more than the guard's bound is filled
CLOCK_STEP_NANOSECONDS = 5_000_000_000


class Strain(Protocol):
    """Made before anything is changed.

    Raises:
        AgentError: (when it is made) the box can't be strained like that.
    """

    def make(self) -> str:
        """Begin. Returns what was done, in words."""

    def undo(self) -> None:
        """End; a second time, or without a beginning, it does nothing."""


class Heat:
    """A temperature that no chip has.

    Args:
        run_directory: of the guards. celsius: what the guard is to read.
    """

    def __init__(self, run_directory: str, celsius: float) -> None:
        self._zone = Path(run_directory).joinpath(*ZONE)
        self._celsius = celsius
        if not Path(run_directory).is_dir():
            raise AgentError(STEP, f"{run_directory} is missing: no guards run here", hint="fleet provision")

    def make(self) -> str:
        """See Strain."""
        for directory in (self._zone.parents[1], self._zone.parent, self._zone):
            directory.mkdir(mode=0o755, exist_ok=True)
            directory.chmod(0o755)  # whatever the umask: guards of another user read it, nobody else writes it
        self._write("type", ZONE_TYPE)
        self._write("temp", f"{self._celsius * 1000:.0f}")
        return f"its guards read {self._celsius:g} °C"

    def undo(self) -> None:
        """See Strain."""
        for name in ("temp", "type"):
            (self._zone / name).unlink(missing_ok=True)
        for directory in (self._zone, self._zone.parent, self._zone.parents[1]):
            with contextlib.suppress(FileNotFoundError):
                directory.rmdir()

    def _write(self, name: str, text: str) -> None:
        new = self._zone / f".{name}"
        new.write_text(text, encoding="ascii")
        new.chmod(0o644)
        new.replace(self._zone / name)


class FullDisk:
    """A file without a name fills a file system: whatever ends its last holder, a power cut too, gives the room back.

    Args:
        directory: on the file system. percent: above it the guard calls it full.
    """

    def __init__(self, directory: str, percent: float) -> None:
        answer = os.statvfs(directory)
        used, available = answer.f_blocks - answer.f_bfree, answer.f_bavail
        wanted = (min(percent + BEYOND_PERCENT, 100.0) / 100.0) * (used + available)
        self._bytes = int(wanted - used) * answer.f_frsize
        left = available * answer.f_frsize - self._bytes
        self._directory = directory
        if self._bytes <= 0:
            raise AgentError(STEP, f"the file system of {directory} is full already", hint="fleet guard status --all")
        if left < LEAST_FREE_BYTES:
            message = f"only {left // MEBIBYTE} MiB of {directory} would stay free, {LEAST_FREE_BYTES // MEBIBYTE} must"
            raise AgentError(STEP, message, hint="such a small file system can't be drilled")
        if self._bytes > LARGEST_FILL_BYTES:
            message = (
                f"{self._bytes >> 30} GiB of {directory} would be filled, at most {LARGEST_FILL_BYTES >> 30} may be"
            )
            raise AgentError(STEP, message, hint="drill a box with a smaller or a fuller disk")
        descriptor = os.open(directory, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
        self._file = os.fdopen(descriptor, "wb", buffering=0)

    def make(self) -> str:
        """See Strain."""
        os.posix_fallocate(self._file.fileno(), 0, self._bytes)
        return f"filled the file system of {self._directory} with {self._bytes // MEBIBYTE} MiB"

    def undo(self) -> None:
        """See Strain."""
        os.ftruncate(self._file.fileno(), 0)


class WrongClock:
    """The clock jumps ahead; it comes back by the monotonic time that passed, unless something else brought it back."""

    def __init__(self) -> None:
        self._ahead_of_monotonic = time.time_ns() - time.monotonic_ns()

    def make(self) -> str:
        """See Strain."""
        self._set(CLOCK_STEP_NANOSECONDS)
        return f"set its clock {CLOCK_STEP_NANOSECONDS / 1e9:g} s ahead"

    def undo(self) -> None:
        """See Strain."""
        ahead = time.time_ns() - time.monotonic_ns() - self._ahead_of_monotonic
        if ahead > CLOCK_STEP_NANOSECONDS // 2:  # less: a time daemon has set it back already
            self._set(0)

    def _set(self, ahead_nanoseconds: int) -> None:
        now = time.monotonic_ns() + self._ahead_of_monotonic
        try:
            time.clock_settime_ns(time.CLOCK_REALTIME, now + ahead_nanoseconds)
        except PermissionError as error:
            raise AgentError(STEP, "the clock of this box can't be set", hint="log in as root") from error


def strain_of(order: dict[str, Any]) -> Strain:
    """What an order asks for.

    Args:
        order: {"kind", and "run_directory", "celsius" for heat or "directory", "percent" for disk-full}.

    Raises:
        AgentError: not possible on this box.
    """
    kind = order["kind"]
    if kind == "heat":
        return Heat(order["run_directory"], float(order["celsius"]))
    if kind == "disk-full":
        return FullDisk(order["directory"], float(order["percent"]))
    if kind == "clock":
        return WrongClock()
    raise AgentError(STEP, f"not possible here: {kind}")
