"""The thermal guard: senses all sources, decides by the latch, orders the stage's limits. No restart is ever needed."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from guards.deadline import MOST_HANGS_A_ROUND, DeadlineReader
from guards.findings import Action, Decision, Repair
from guards.guard import ActionFailed
from guards.roots import Roots
from guards.settings import ThermalSettings
from guards.thermal import judge, memory
from guards.thermal.levels import ladder
from guards.thermal.memory import ThermalMemory
from guards.thermal.readings import Source, ThermalReading
from guards.thermal.sources.alerts import ThrottleAlerts
from guards.thermal.sources.cpufreq import CpuClocks
from guards.thermal.sources.devfreq import GpuClocks
from guards.thermal.sources.drill import DrillZones
from guards.thermal.sources.hwmon import HardwareMonitors
from guards.thermal.sources.nvml import NvmlGpus
from guards.thermal.sources.raspberry import TOOL_SECONDS, RaspberryPi
from guards.thermal.sources.zones import ThermalZones
from guards.thermal.stage import Stage, StageReading

STAGE_ANSWER_SECONDS = 5.0
"""What asking the stage and ordering its limits may take, each; its client has a deadline of its own."""


class ThermalGuard:
    """See `guards.guard.Guard`.

    Args:
        stage: of this box; None on a box without one, whose heat is told and not fought.
        run_directory: where drills lay their zones (`guards/thermal/sources/drill.py`); None: there are no drills.

    Raises:
        ValueError: settings that make no ladder of limits.
    """

    name = "thermal"

    def __init__(
        self, roots: Roots, settings: ThermalSettings, stage: Stage | None, run_directory: Path | None = None
    ) -> None:
        ladder(1, settings.least_duty_percent, settings.step_percent)
        self._settings = settings
        self._stage = stage
        self._reader = DeadlineReader(settings.zone_deadline_seconds, settings.zone_quarantine_seconds)
        self._sources: tuple[Source, ...] = (
            NvmlGpus(self._reader, settings.zone_quarantine_seconds),
            ThermalZones(roots, self._reader),
            HardwareMonitors(roots, self._reader),
            RaspberryPi(roots, self._reader),
            ThrottleAlerts(roots, self._reader),
            CpuClocks(roots, self._reader),
            GpuClocks(roots, self._reader),
            *(() if run_directory is None else (DrillZones(run_directory, self._reader),)),
        )
        self.period_seconds = settings.period_seconds
        self.deadline_seconds = (
            MOST_HANGS_A_ROUND * settings.zone_deadline_seconds + TOOL_SECONDS + 3 * STAGE_ANSWER_SECONDS
        )

    def sense(self) -> ThermalReading:
        """All sources, each sensor with its own deadline; then the stage."""
        self._reader.begin_round()
        seen = [source.read() for source in self._sources]
        document = None if self._stage is None else self._stage.health()
        return ThermalReading.of(seen, None if document is None else StageReading.of(document))

    def decide(self, reading: ThermalReading, memory: ThermalMemory, now_seconds: float) -> Decision[ThermalMemory]:
        """See `guards.thermal.judge`."""
        return judge.decide(reading, memory, now_seconds, self._settings)

    def act(self, action: Action) -> str:
        """Order a limit.

        Raises:
            ActionFailed: the stage does not obey, or it is no action of this guard.
        """
        if self._stage is None:
            raise ActionFailed("this box has no stage")
        if action.repair is Repair.LIMIT_BATCH:
            sequences = int(action.arguments["sequences"] or 0)
            self._stage.limit_batch(sequences)
            return f"batch limit {sequences}"
        if action.repair is Repair.LIMIT_DUTY:
            percent = float(action.arguments["duty_percent"] or 0)
            self._stage.limit_duty(percent)
            return f"duty cycle {percent:g} %"
        raise ActionFailed(f"the thermal guard does not do {action.repair.value}")

    def first_memory(self) -> ThermalMemory:
        """No limit known."""
        return ThermalMemory()

    def memory_to_json(self, kept: ThermalMemory) -> Mapping[str, Any]:
        """Latch and dwell."""
        return memory.memory_to_json(kept)

    def memory_from_json(self, data: Mapping[str, Any]) -> ThermalMemory:
        """The reverse.

        Raises:
            ValueError, KeyError, TypeError: see `guards.thermal.memory`.
        """
        return memory.memory_from_json(data)
