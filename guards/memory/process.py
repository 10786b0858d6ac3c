"""Memory that a process holds on to, from the kernel. One small file a look, so it costs nothing.

RssAnon (anonymous pages in memory, proc_pid_status(5)) plus VmSwap (those that were swapped out: a leak on a box that
swaps leaves RssAnon). File-backed pages are left out on purpose: a mapped checkpoint becomes resident as it is touched,
for hours, and the kernel takes it back when memory is short. `smaps_rollup` has no better figure for a process that
shares no anonymous memory, and reading it walks all page tables under the lock that the process maps memory with. On
Linux ≥ 6.2 the figure may lag by a few dozen pages per core and thread, which is sample noise.
"""

from __future__ import annotations

from dataclasses import dataclass

from guards.roots import Roots

KIBIBYTE = 1024
START_FIELD = 22
"""Of /proc/PID/stat: when the process started, in clock ticks since boot (proc_pid_stat(5))."""


class Gone(Exception):
    """There is no such process any more."""


class Unreadable(Exception):
    """It is there, but its memory can't be read; the message says why."""


@dataclass(frozen=True)
class ProcessMemory:
    """A look at a process.

    Attributes:
        identity: boot, process id and start: the same id after a restart is another process.
        retained_bytes: resident anonymous memory and what of it is swapped out.
    """

    identity: str
    retained_bytes: int


def read_process(roots: Roots, pid: int) -> ProcessMemory:
    """What a process holds on to.

    Raises:
        Gone, Unreadable: see there.
    """
    directory = roots.proc / str(pid)
    try:
        stat = (directory / "stat").read_text(encoding="utf-8", errors="replace")
        status = (directory / "status").read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        raise Gone(f"no process {pid}") from None
    except OSError as error:
        raise Unreadable(f"process {pid}: {error.strerror or error}") from None
    # the name, in brackets, may hold spaces and brackets
    after_name = stat.rpartition(")")[2].split()
    if len(after_name) <= START_FIELD - 3 or after_name[0] in ("Z", "X"):
        raise Gone(f"process {pid} has ended")
    try:
        boot = (roots.proc / "sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except (OSError, ValueError):
        boot = ""  # id and start tell processes of one boot apart
    resident, swapped = _kilobytes(status, "RssAnon:"), _kilobytes(status, "VmSwap:")
    if resident is None:
        raise Unreadable(f"process {pid}: its status has no RssAnon")
    return ProcessMemory(f"{boot}/{pid}/{after_name[START_FIELD - 3]}", (resident + (swapped or 0)) * KIBIBYTE)


def _kilobytes(status: str, name: str) -> int | None:
    """A line of the status file."""
    for line in status.splitlines():
        if line.startswith(name):
            number = line[len(name) :].split()
            return int(number[0]) if number and number[0].isdigit() else None
    return None
