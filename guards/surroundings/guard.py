"""The guard of the surroundings: looks at all things in turn, and makes room when a disk is full of our logs."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

from guards.budgets import Budget
from guards.deadline import DeadlineReader
from guards.findings import Action, Decision, Finding, Repair
from guards.guard import ActionFailed
from guards.roots import Roots
from guards.settings import DAY_SECONDS, SurroundingsSettings
from guards.surroundings.drives import Drive, judge_drives, sense_drives
from guards.surroundings.links import LinksMemory, LinksReading, Nominal, judge_links, sense_links
from guards.surroundings.logs import Logs, LogsMemory, drop_rotated, judge_logs, sense_logs
from guards.surroundings.mounts import MountReading, judge_mounts, sense_mounts
from guards.surroundings.oom import OomMemory, OomReading, OomSensor, judge_oom
from guards.surroundings.space import Space, is_full, judge_space, measure, sense_space
from guards.surroundings.supply import Supply, judge_supply, sense_supply
from guards.surroundings.units import Units, judge_units, sense_units

DROP_BUDGET = "log-drop"
# Tools with deadlines of their own and hanging file systems take their time; more than that is a hang of the guard.
DEADLINE_SECONDS = 120.0

ValueT = TypeVar("ValueT")


def budgets(settings: SurroundingsSettings) -> dict[str, Budget]:
    """What the actions of this guard are paid from."""
    drops = Budget(int(settings.log_drops_per_day), DAY_SECONDS, settings.log_drop_apart_seconds)
    return {DROP_BUDGET: drops}


@dataclass(frozen=True)
class SurroundingsReading:
    """All that was seen. Drives and units are as of their last look, which is less frequent."""

    spaces: tuple[Space, ...]
    mounts: tuple[MountReading, ...]
    drives: tuple[Drive, ...]
    links: LinksReading
    supply: Supply
    oom: OomReading
    units: Units
    logs: Logs


@dataclass(frozen=True)
class SurroundingsMemory:
    """Of those things whose judgement needs what was before."""

    links: LinksMemory = field(default_factory=LinksMemory)
    oom: OomMemory = field(default_factory=OomMemory)
    logs: LogsMemory = field(default_factory=LogsMemory)


class _Slow(Generic[ValueT]):
    """A look that is taken less often than the guard's period; in between it gives what it saw last."""

    def __init__(self, look: Callable[[], ValueT], period_seconds: float, monotonic: Callable[[], float]) -> None:
        self._look, self._period_seconds, self._monotonic = look, period_seconds, monotonic
        self._seen: tuple[float, ValueT] | None = None

    def value(self) -> ValueT:
        now = self._monotonic()
        if self._seen is None or now - self._seen[0] >= self._period_seconds:
            self._seen = (now, self._look())
        return self._seen[1]


class SurroundingsGuard:
    """Implements `guards.guard.Guard`.

    Args:
        directories: ours, that must be writable and have room. log_directory: of our programs' logs.
        data_link: what the link that inference runs over should be.
        monotonic: seconds that never go back; paces slow looks.
    """

    name = "surroundings"
    deadline_seconds = DEADLINE_SECONDS

    def __init__(
        self,
        settings: SurroundingsSettings,
        roots: Roots,
        *,
        directories: Sequence[Path],
        log_directory: Path,
        data_link: Nominal,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self.period_seconds = settings.period_seconds
        self._settings, self._roots = settings, roots
        self._directories = tuple(dict.fromkeys((*directories, log_directory)))
        self._log_directory, self._data_link = log_directory, data_link
        self._reader = DeadlineReader(settings.file_seconds, settings.quarantine_seconds)
        self._oom = OomSensor(roots, self._reader, settings, monotonic)
        self._drives = _Slow(
            lambda: sense_drives(roots, self._reader, settings), settings.drive_period_seconds, monotonic
        )
        self._units = _Slow(lambda: sense_units(roots, settings), settings.units_period_seconds, monotonic)

    def sense(self) -> SurroundingsReading:
        """Look at everything; what fails says so in its own reading."""
        self._reader.begin_round()
        return SurroundingsReading(
            spaces=sense_space(self._directories, self._reader),
            mounts=sense_mounts(self._directories, self._roots, self._reader),
            drives=self._drives.value(),
            links=sense_links(self._roots, self._reader),
            supply=sense_supply(self._roots, self._reader),
            oom=self._oom.sense(),
            units=self._units.value(),
            logs=sense_logs(self._log_directory, self._reader),
        )

    def decide(
        self, reading: SurroundingsReading, memory: SurroundingsMemory, now_seconds: float
    ) -> Decision[SurroundingsMemory]:
        """Judge each thing by itself."""
        settings = self._settings
        links, links_memory = judge_links(reading.links, memory.links, self._data_link, settings, now_seconds)
        oom, oom_memory = judge_oom(reading.oom, memory.oom, settings, now_seconds)
        logs, logs_memory = judge_logs(reading.logs, memory.logs, settings, now_seconds)
        findings: tuple[Finding, ...] = (
            *judge_space(reading.spaces, settings),
            *judge_mounts(reading.mounts),
            *judge_drives(reading.drives, settings),
            *links,
            *judge_supply(reading.supply),
            *oom,
            *judge_units(reading.units, settings),
            *logs,
        )
        return Decision(findings, self._drops(reading), SurroundingsMemory(links_memory, oom_memory, logs_memory))

    def _drops(self, reading: SurroundingsReading) -> tuple[Action, ...]:
        """Old logs go when the file system that they are on is full, and while there are any."""
        logs = reading.logs
        full = [space for space in reading.spaces if is_full(space, self._settings) and space.device == logs.device]
        if not full or not logs.rotated:
            return ()
        because = f"{full[0].directory}: {full[0].used_percent:.1f} % used, {logs.rotated} rotated logs"
        return (Action(Repair.DROP_OLD_LOGS, str(self._log_directory), because, {}, DROP_BUDGET),)

    def act(self, action: Action) -> str:
        """Make room.

        Raises:
            ActionFailed: nothing could be removed.
        """
        if action.repair is not Repair.DROP_OLD_LOGS:
            raise ActionFailed(f"this guard does not know {action.repair.value}")
        try:
            dropped = drop_rotated(
                self._log_directory, lambda: not is_full(measure(self._log_directory), self._settings)
            )
        except OSError as error:
            raise ActionFailed(f"{self._log_directory}: {error.strerror or error}") from None
        if not dropped:
            return "there was room again"
        return f"removed {', '.join(dropped)}"

    def first_memory(self) -> SurroundingsMemory:
        """Nothing seen yet."""
        return SurroundingsMemory()

    def memory_to_json(self, memory: SurroundingsMemory) -> Mapping[str, Any]:
        """Links that were up, and which kills have been told; windows begin anew."""
        oom = memory.oom
        return {
            "links_once_up": sorted(memory.links.once_up),
            "oom": {
                "boot": oom.boot,
                "told_seconds": oom.told_seconds,
                "machine": oom.machine,
                "group": oom.group,
                "news": list(oom.news),
                "news_seconds": oom.news_seconds,
            },
        }

    def memory_from_json(self, data: Mapping[str, Any]) -> SurroundingsMemory:
        """The reverse; see `guards.guard.Guard`."""
        oom = data["oom"]
        return SurroundingsMemory(
            links=LinksMemory(once_up=frozenset(str(name) for name in data["links_once_up"])),
            oom=OomMemory(
                str(oom["boot"]),
                float(oom["told_seconds"]),
                int(oom["machine"]),
                int(oom["group"]),
                tuple(str(each) for each in oom["news"]),
                float(oom["news_seconds"]),
            ),
        )
