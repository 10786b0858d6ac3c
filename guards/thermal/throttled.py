"""The throttle bits of Raspberry Pis, for this guard (heat) and for that of the surroundings (supply). Pure.

Bits as in the documentation of `vcgencmd get_throttled`: 0–3 are live, 16–19 the same since boot. Live bits decide;
those since boot only tell that it happened some time.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

UNDER_VOLTAGE = 1 << 0
FREQUENCY_CAPPED = 1 << 1
THROTTLED = 1 << 2
SOFT_TEMPERATURE_LIMIT = 1 << 3
SINCE_BOOT_SHIFT = 16

_NUMBER = re.compile(r"(?:throttled=)?(?:0[xX])?([0-9a-fA-F]{1,8})")


@dataclass(frozen=True)
class Bits:
    """Half of the word: either what is so now, or what was so some time since boot."""

    under_voltage: bool
    frequency_capped: bool
    throttled: bool
    soft_temperature_limit: bool

    @property
    def heat(self) -> bool:
        """Slowed down for heat. The firmware caps and throttles for a low supply too: with one, only the soft limit,
        which is of temperature alone, speaks of heat."""
        return self.soft_temperature_limit or ((self.frequency_capped or self.throttled) and not self.under_voltage)


@dataclass(frozen=True)
class Throttled:
    """All of it."""

    now: Bits
    since_boot: Bits


def parse_throttled(text: str) -> Throttled:
    """From the file `get_throttled` of sysfs (bare hexadecimal) or the tool's answer (`throttled=0x50005`).

    Raises:
        ValueError: neither.
    """
    match = _NUMBER.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"{text.strip()[:40]!r} is no word of throttle bits")
    word = int(match.group(1), 16)
    return Throttled(_bits(word), _bits(word >> SINCE_BOOT_SHIFT))


def _bits(word: int) -> Bits:
    return Bits(
        under_voltage=bool(word & UNDER_VOLTAGE),
        frequency_capped=bool(word & FREQUENCY_CAPPED),
        throttled=bool(word & THROTTLED),
        soft_temperature_limit=bool(word & SOFT_TEMPERATURE_LIMIT),
    )
