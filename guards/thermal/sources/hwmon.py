"""Chips of the kernel's hardware monitoring: `/sys/class/hwmon`, on x86 the better source."""

from __future__ import annotations

import re
from pathlib import Path

from guards.deadline import DeadlineReader, Unreadable
from guards.roots import Roots
from guards.thermal.kinds import believe_millidegrees, kind_of
from guards.thermal.readings import Kind, Seen, Zone
from guards.thermal.sources.names import numbered, read_name

_INPUT = re.compile(r"temp(\d+)_input")
# Of AMD's k10temp: on some models 10 to 27 °C above the die, for fan control only; Tdie beside it is the die.
OFFSET_LABEL, TRUE_LABEL = "tctl", "tdie"
# Of amdgpu: the video memory, which has a limit of its own.
MEMORY_LABEL = "mem"


class HardwareMonitors:
    """Temperatures of chips by their driver's name."""

    def __init__(self, roots: Roots, reader: DeadlineReader) -> None:
        self._directory = roots.sys / "class" / "hwmon"
        self._zones = roots.sys / "class" / "thermal"
        self._reader = reader

    def read(self) -> Seen:
        """All chips that computing may heat. The kernel shows each thermal zone here once more, under the zone's type
        with `_` for `-`; those are left to the zones' source."""
        doubles = {read_name(zone / "type").replace("-", "_") for zone in numbered(self._zones, "thermal_zone")}
        zones: list[Zone] = []
        for chip in numbered(self._directory, "hwmon"):
            name = read_name(chip / "name")
            kind = kind_of(name)
            if kind is not Kind.OTHER and name not in doubles:
                zones += self._chip(chip, name, kind)
        return Seen(zones=tuple(zones))

    def _chip(self, chip: Path, name: str, kind: Kind) -> list[Zone]:
        try:
            inputs = sorted(int(match.group(1)) for entry in chip.iterdir() if (match := _INPUT.fullmatch(entry.name)))
        except OSError:
            return []
        labels = {number: read_name(chip / f"temp{number}_label").lower() for number in inputs}
        if TRUE_LABEL in labels.values():
            labels = {number: label for number, label in labels.items() if label != OFFSET_LABEL}
        return [
            self._input(chip / f"temp{number}_input", f"{chip.name}/{name}/{label or f'temp{number}'}", kind)
            for number, label in labels.items()
            if label != MEMORY_LABEL
        ]

    def _input(self, path: Path, name: str, kind: Kind) -> Zone:
        try:
            celsius, reason = believe_millidegrees(self._reader.text(path), kind)
        except Unreadable as error:
            return Zone(name, kind, None, str(error))
        return Zone(name, kind, celsius, reason)
