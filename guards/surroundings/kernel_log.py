"""The kernel's log of this boot, by what a service user may read: /dev/kmsg, dmesg or the journal."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass

from guards.roots import Roots
from guards.tools import ToolFailed, ToolMissing, run_tool

# The kernel's records are at most 1 KiB of text and their prefix; 8 KiB is what it gives at once.
RECORD_BYTES = 8192
# A log buffer of 1 MiB has some 10 000 records; more are read in the next round.
MOST_RECORDS = 20_000
# "[12345.678901] text" of dmesg and of `journalctl -o short-monotonic`, which puts host and source in between
_STAMPED = re.compile(r"\[ *(\d+\.\d+)\] (.*)")


@dataclass(frozen=True)
class KernelLine:
    """A line.

    Attributes:
        seconds: since boot, by the kernel's own clock, which no time server moves.
    """

    seconds: float
    text: str


class NoKernelLog(Exception):
    """Nothing that this user may read; the message says what was tried."""


class Kmsg:
    """/dev/kmsg, kept open: every read brings only what is new, and no process is started."""

    def __init__(self, roots: Roots) -> None:
        self._path = roots.dev / "kmsg"
        self._descriptor: int | None = None

    def lines(self) -> tuple[KernelLine, ...]:
        """What came since the last call; everything the first time.

        Raises:
            OSError: it is not there (containers), or needs CAP_SYSLOG (`kernel.dmesg_restrict`).
        """
        if self._descriptor is None:
            self._descriptor = os.open(self._path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        found = []
        for _ in range(MOST_RECORDS):
            try:
                record = os.read(self._descriptor, RECORD_BYTES)
            except BlockingIOError:
                break
            except BrokenPipeError:
                continue  # overwritten before it was read; the next read goes on behind the gap
            if not record:
                break
            line = parse_record(record.decode("utf-8", "replace"))
            if line is not None:
                found.append(line)
        return tuple(found)


def parse_record(record: str) -> KernelLine | None:
    """A record of /dev/kmsg: `priority,sequence,microseconds,flags;text`, then lines of a dictionary. None for what
    user space wrote: only the kernel has facility 0 (Documentation/ABI/testing/dev-kmsg)."""
    prefix, separator, rest = record.partition(";")
    fields = prefix.split(",")
    try:
        if not separator or int(fields[0]) >> 3 != 0:
            return None
        return KernelLine(int(fields[2]) / 1e6, rest.split("\n", 1)[0])
    except (ValueError, IndexError, OverflowError):
        return None


def parse_stamped(text: str) -> tuple[KernelLine, ...]:
    """Lines of dmesg or journalctl; what carries no time since boot is left out."""
    matches = (_STAMPED.match(line) for line in text.splitlines())
    return tuple(KernelLine(float(match.group(1)), match.group(2)) for match in matches if match is not None)


def read_by_tool(roots: Roots, deadline_seconds: float) -> tuple[KernelLine, ...]:
    """All lines of this boot.

    Raises:
        NoKernelLog: neither tool may.
    """
    tried = []
    for argv in (
        ("dmesg",),
        ("journalctl", "--dmesg", "--boot", "--quiet", "--no-pager", "--output=short-monotonic", "--lines=10000"),
    ):
        try:
            answer = run_tool(roots, *argv, deadline_seconds=deadline_seconds)
        except (ToolMissing, ToolFailed) as error:
            tried.append(f"{argv[0]}: {error}")
            continue
        if answer.code == 0 and answer.text:
            return parse_stamped(answer.text)
        tried.append(answer.error or f"{argv[0]}: nothing, exit {answer.code}")
    raise NoKernelLog("; ".join(tried))
