"""What the sensors of a box say about its heat. Data only; None is "could not be read", with the reason beside it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from guards.thermal.stage import StageReading


class Kind(str, Enum):
    """What a sensor sits on."""

    JUNCTION = "junction"  # Jetson's tj: the hottest of all its on-die sensors
    CPU = "cpu"
    GPU = "gpu"
    SOC = "soc"
    ACCELERATOR = "accelerator"  # NPU, vision accelerators
    PMIC = "pmic"  # has limits of its own
    BOARD = "board"  # near the chip, not on it
    OTHER = "other"  # battery, charger, Wi-Fi, drive: not heated by computing, not ours to judge


DRILL = "drill"
"""What names of zones begin with that a drill shows (`sources/drill.py`)."""

ON_DIE = frozenset({Kind.JUNCTION, Kind.CPU, Kind.GPU, Kind.SOC, Kind.ACCELERATOR})
"""What computing heats, and what throttles."""


@dataclass(frozen=True)
class Zone:
    """One temperature sensor.

    Attributes:
        name: unique on the box, e.g. "thermal_zone0/cpu-thermal".
        celsius: None: not read, or not plausible; `reason` says why.
    """

    name: str
    kind: Kind
    celsius: float | None
    reason: str = ""


@dataclass(frozen=True)
class Clock:
    """One clock that heat may lower.

    Attributes:
        name: unique on the box, e.g. "cpu/policy0", "gpu0".
        megahertz: now. allowed_megahertz: the highest that is allowed, e.g. by the power mode; None: unknown.
    """

    name: str
    megahertz: float
    allowed_megahertz: float | None = None


@dataclass(frozen=True)
class Throttle:
    """What the hardware says of its own throttling.

    Attributes:
        name: unique on the box, e.g. "raspberry-pi", "gpu0".
        heat: it throttles for heat right now; None: can't be asked, `reason` says why.
        heat_since_boot: it did at some time since boot; None: not kept by this device.
        low_voltage: its supply is too low right now; None: not told by this device.
    """

    name: str
    heat: bool | None
    heat_since_boot: bool | None = None
    low_voltage: bool | None = None
    reason: str = ""


@dataclass(frozen=True)
class Seen:
    """What one source saw in one round."""

    zones: tuple[Zone, ...] = ()
    clocks: tuple[Clock, ...] = ()
    throttles: tuple[Throttle, ...] = ()


class Source(Protocol):
    """The one shape of all sources of `guards/thermal/sources/`."""

    def read(self) -> Seen:
        """Look. Nothing is raised for a faulty sensor: it is in what is returned, with its reason."""


@dataclass(frozen=True)
class ThermalReading:
    """A whole round.

    Attributes:
        stage: of this box; None: it does not answer.
    """

    zones: tuple[Zone, ...]
    clocks: tuple[Clock, ...]
    throttles: tuple[Throttle, ...]
    stage: StageReading | None

    @staticmethod
    def of(seen: Sequence[Seen], stage: StageReading | None) -> ThermalReading:
        """All sources together."""
        return ThermalReading(
            tuple(zone for each in seen for zone in each.zones),
            tuple(clock for each in seen for clock in each.clocks),
            tuple(throttle for each in seen for throttle in each.throttles),
            stage,
        )

    @property
    def counted(self) -> tuple[Zone, ...]:
        """Zones that the latch looks at: those on the die; on a box without any, those of the board."""
        on_die = tuple(zone for zone in self.zones if zone.kind in ON_DIE)
        return on_die or tuple(zone for zone in self.zones if zone.kind is Kind.BOARD)

    @property
    def hottest(self) -> Zone | None:
        """The hottest counted zone that could be read."""
        read = [zone for zone in self.counted if zone.celsius is not None]
        return max(read, key=lambda zone: zone.celsius or 0.0, default=None)

    @property
    def drilled(self) -> bool:
        """A drill shows a temperature."""
        return any(zone.name.partition("/")[0] == DRILL for zone in self.zones)

    @property
    def throttled(self) -> bool:
        """Some hardware says that it throttles for heat."""
        return any(throttle.heat for throttle in self.throttles)
