"""What the thermal guard remembers from round to round, and over reboots."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from guards.thermal.latch import Latch
from guards.thermal.throttling import ThrottlingMemory


@dataclass(frozen=True)
class ThermalMemory:
    """All of it.

    Attributes:
        max_sequences: the stage's batch limit without guards, as it said last; None: it never answered.
        first_seconds: of the first round of this process.
        drilled: a drill showed a temperature in the last round.
    """

    latch: Latch = field(default_factory=Latch)
    throttling: ThrottlingMemory = field(default_factory=ThrottlingMemory)
    max_sequences: int | None = None
    first_seconds: float | None = None
    drilled: bool = False


def memory_to_json(memory: ThermalMemory) -> dict[str, Any]:
    """Latch and dwell. What the filter follows begins anew, since nobody knows how hot a box is after a reboot."""
    return {
        "level": memory.latch.level,
        "switched_seconds": memory.latch.switched_seconds,
        "switched_celsius": memory.latch.switched_celsius,
        "max_sequences": memory.max_sequences,
        "cool_megahertz": dict(memory.throttling.cool_megahertz),
        "drilled": memory.drilled,
    }


def memory_from_json(data: Mapping[str, Any]) -> ThermalMemory:
    """The reverse.

    Raises:
        ValueError, KeyError, TypeError: not what `memory_to_json` writes.
    """
    level, most = int(data["level"]), data["max_sequences"]
    if level < 0 or (most is not None and int(most) < 1):
        raise ValueError("no level or batch limit is negative")
    latch = Latch(level, _finite(data["switched_seconds"]), _finite(data["switched_celsius"]))
    cool = {str(name): float(value) for name, value in data["cool_megahertz"].items()}
    most = None if most is None else int(most)
    return ThermalMemory(latch, ThrottlingMemory(cool_megahertz=cool), most, drilled=data.get("drilled") is True)


def _finite(value: Any) -> float | None:
    if value is None:
        return None
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(f"{number} is no time or temperature")
    return number
