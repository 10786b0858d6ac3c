"""Throttle alerts of Jetsons: cooling devices `cpu-throttle-alert`, `gpu-throttle-alert` … of `/sys/class/thermal`.

Their state becomes 1 while the kernel lowers the clocks of that part for heat.
"""

from __future__ import annotations

from pathlib import Path

from guards.deadline import DeadlineReader, Unreadable
from guards.roots import Roots
from guards.thermal.readings import Seen, Throttle
from guards.thermal.sources.names import numbered, read_name

SUFFIX = "-throttle-alert"


class ThrottleAlerts:
    """Nothing on any other device."""

    def __init__(self, roots: Roots, reader: DeadlineReader) -> None:
        self._reader = reader
        devices = {
            path: read_name(path / "type") for path in numbered(roots.sys / "class" / "thermal", "cooling_device")
        }
        self._alerts = {path: name for path, name in devices.items() if name.endswith(SUFFIX)}

    def read(self) -> Seen:
        """All alerts that this board has."""
        return Seen(throttles=tuple(self._alert(path, name) for path, name in self._alerts.items()))

    def _alert(self, path: Path, name: str) -> Throttle:
        try:
            return Throttle(name, int(self._reader.text(path / "cur_state")) > 0)
        except (Unreadable, ValueError) as error:
            return Throttle(name, None, reason=str(error))
