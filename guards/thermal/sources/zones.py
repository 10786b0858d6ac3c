"""Thermal zones of the kernel: `/sys/class/thermal/thermal_zone*`, on every board with a device tree, and on x86."""

from __future__ import annotations

from pathlib import Path

from guards.deadline import DeadlineReader, Unreadable
from guards.roots import Roots
from guards.thermal.kinds import believe_millidegrees, kind_of
from guards.thermal.readings import Kind, Seen, Zone
from guards.thermal.sources.names import numbered, read_name


class ThermalZones:
    """Zones by their type; numbers change from boot to boot."""

    def __init__(self, roots: Roots, reader: DeadlineReader) -> None:
        self._directory = roots.sys / "class" / "thermal"
        self._reader = reader

    def read(self) -> Seen:
        """All zones that computing may heat, and those with a limit of their own."""
        zones = [self._zone(path) for path in numbered(self._directory, "thermal_zone")]
        return Seen(zones=tuple(zone for zone in zones if zone.kind is not Kind.OTHER))

    def _zone(self, path: Path) -> Zone:
        type_name = read_name(path / "type")
        name, kind = f"{path.name}/{type_name}", kind_of(type_name)
        if kind is Kind.OTHER:
            return Zone(name, kind, None)
        try:
            celsius, reason = believe_millidegrees(self._reader.text(path / "temp"), kind)
        except Unreadable as error:
            return Zone(name, kind, None, str(error))
        return Zone(name, kind, celsius, reason)
