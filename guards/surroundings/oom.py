"""Kills for want of memory: what is newer than the box's boot and than what was already told.

The kernel counts kills in /proc/vmstat (since 4.13, the whole machine) and in our control group (memory.events, or
memory.oom_control of version 1); anyone may read those. Who was killed is told by the kernel's log only, which not
every service user may read. So counters are looked at in every round, and a tool reads the log when one has moved.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from guards.deadline import DeadlineReader, Unreadable
from guards.findings import Finding, Repair, State, Value
from guards.roots import Roots
from guards.settings import SurroundingsSettings
from guards.surroundings.kernel_log import KernelLine, Kmsg, NoKernelLog, read_by_tool

# "Out of memory: Killed process 812 (python) …", "Memory cgroup out of memory: Killed process …"; before Linux 5.0
# "Kill process 812 (python) score …", and "Killed process …" on a line of its own
KILL = re.compile(r"(?:[Oo]ut of memory|oom[-_ ]?kill\w*): Kill(?:ed)? process (\d+) \((.{1,64}?)\)")
# whoever writes the log may be a little later than the counter
LOOKS_AFTER_A_KILL = 2
MOST_KILLS = 100


@dataclass(frozen=True)
class Kill:
    """A line of the kernel's log. seconds: since boot."""

    seconds: float
    process: str


@dataclass(frozen=True)
class OomReading:
    """What a look at counters and log gives.

    Attributes:
        boot: the kernel's boot id; empty if it could not be read.
        machine, group: kills since boot on the machine, and in our control group since it was made; None: not told.
        kills: lines of kills in the log, of this boot, as far as they are new to this process; None: not readable.
        problem: why the log is not readable.
    """

    boot: str
    machine: int | None
    group: int | None
    kills: tuple[Kill, ...] | None
    problem: str = ""


@dataclass(frozen=True)
class OomMemory:
    """What has been told; it outlives the process.

    Attributes:
        boot: which boot the rest is of.
        told_seconds: kills in the log up to that time since boot have been told.
        machine, group: values of the counters that have been told.
        news: kills that were told, the last `MOST_KILLS`, as lines for people. news_seconds: running clock of the last.
    """

    boot: str = ""
    told_seconds: float = 0.0
    machine: int = 0
    group: int = 0
    news: tuple[str, ...] = ()
    news_seconds: float = 0.0


def acknowledged(memory: OomMemory) -> OomMemory:
    """A person has seen the news: they are no more. What comes later is news again."""
    return replace(memory, news=())


class OomSensor:
    """Keeps the log open between looks."""

    def __init__(
        self,
        roots: Roots,
        reader: DeadlineReader,
        settings: SurroundingsSettings,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._roots, self._reader, self._settings, self._monotonic = roots, reader, settings, monotonic
        self._kmsg = Kmsg(roots)
        self._counters: tuple[int | None, int | None] | None = None
        self._looks_left = LOOKS_AFTER_A_KILL
        self._tool_at = float("-inf")

    def sense(self) -> OomReading:
        """One look."""
        machine, group = self._vmstat(), self._group()
        if (machine, group) != self._counters:
            self._counters, self._looks_left = (machine, group), LOOKS_AFTER_A_KILL
        kills, problem = self._kills()
        return OomReading(self._boot(), machine, group, kills, problem)

    def _kills(self) -> tuple[tuple[Kill, ...] | None, str]:
        try:
            return find_kills(self._kmsg.lines()), ""
        except OSError:
            pass
        now = self._monotonic()
        if self._looks_left <= 0 and now - self._tool_at < self._settings.kernel_log_period_seconds:
            return (), ""
        self._looks_left -= 1
        self._tool_at = now
        try:
            return find_kills(read_by_tool(self._roots, self._settings.tool_seconds)), ""
        except NoKernelLog as error:
            return None, str(error)

    def _boot(self) -> str:
        try:
            return self._reader.text(self._roots.proc / "sys/kernel/random/boot_id").strip()
        except Unreadable:
            return ""

    def _vmstat(self) -> int | None:
        try:
            return named_number((self._roots.proc / "vmstat").read_text(encoding="ascii"), "oom_kill")
        except (OSError, ValueError):
            return None

    def _group(self) -> int | None:
        for file in group_files(self._roots):
            try:
                return named_number(self._reader.text(file), "oom_kill")
            except (Unreadable, ValueError):
                continue
        return None


def group_files(roots: Roots) -> tuple[Path, ...]:
    """Where the counter of our control group may be: version 2, then version 1, then what a container sees as its
    root."""
    try:
        lines = (roots.proc / "self/cgroup").read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError:
        return ()
    base = roots.sys / "fs/cgroup"
    files = []
    for line in lines:
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        own = path.strip("/")
        if number == "0" and not controllers:
            files += [base / own / "memory.events", base / "memory.events"]
        elif "memory" in controllers.split(","):
            files += [base / "memory" / own / "memory.oom_control", base / "memory/memory.oom_control"]
    return tuple(files)


def named_number(text: str, name: str) -> int:
    """The number of a "name number" line.

    Raises:
        ValueError: no such line.
    """
    for line in text.splitlines():
        words = line.split()
        if len(words) == 2 and words[0] == name:
            return int(words[1])
    raise ValueError(f"no {name}")


def find_kills(lines: tuple[KernelLine, ...]) -> tuple[Kill, ...]:
    """Lines that tell of a kill."""
    matches = ((line, KILL.search(line.text)) for line in lines)
    return tuple(Kill(line.seconds, f"{m.group(2)} ({m.group(1)})") for line, m in matches if m is not None)


def judge_oom(
    reading: OomReading, memory: OomMemory, settings: SurroundingsSettings, now_seconds: float
) -> tuple[tuple[Finding, ...], OomMemory]:
    """One finding: degraded while a kill is news, that is for `oom_shown_seconds`, or until it is acknowledged."""
    if reading.boot != memory.boot:
        # another boot: its counters and its log begin at 0; what was news stays so
        memory = replace(memory, boot=reading.boot, told_seconds=0.0, machine=0, group=0)
    fresh = tuple(kill for kill in reading.kills or () if kill.seconds > memory.told_seconds)
    machine, group = _more(reading.machine, memory.machine), _more(reading.group, memory.group)
    news = [f"{kill.process} at {kill.seconds:.0f} s after boot" for kill in fresh]
    if not news and reading.kills is None and machine:
        news.append(f"{machine} somewhere on this machine ({reading.problem})")
    if not news and group:
        news.append(f"{group} in this service")
    later = replace(
        memory,
        told_seconds=max([memory.told_seconds, *(kill.seconds for kill in fresh)]),
        machine=memory.machine if reading.machine is None else reading.machine,
        group=memory.group if reading.group is None else reading.group,
        news=(*memory.news, *news)[-MOST_KILLS:],
        news_seconds=now_seconds if news else memory.news_seconds,
    )
    if later.news and now_seconds - later.news_seconds >= settings.oom_shown_seconds:
        later = acknowledged(later)
    return (_finding(reading, later),), later


def _finding(reading: OomReading, memory: OomMemory) -> Finding:
    evidence: dict[str, Value] = {
        "kills_on_machine_since_boot": reading.machine,
        "kills_in_service": reading.group,
        "kills_not_acknowledged": len(memory.news),
    }
    if memory.news:
        reason = f"killed for want of memory: {memory.news[-1]}"
        return Finding("oom", State.DEGRADED, reason, evidence, Repair.FREE_MEMORY)
    if reading.kills is None and reading.machine is None and reading.group is None:
        return Finding("oom", State.UNSUPPORTED, reading.problem, evidence)
    return Finding("oom", State.HEALTHY, "", evidence)


def _more(value: int | None, told: int) -> int:
    """How many are new; a counter below what was told has begun anew."""
    if value is None:
        return 0
    return value - told if value >= told else value
