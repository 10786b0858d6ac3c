"""What a sensor sits on, by the names that kernels give; and which of its values are to be believed. Pure.

Device facts behind the table:
- Raspberry Pi 4 and 5: one zone `cpu-thermal`; hwmon `rp1_adc` is the I/O chip's.
- Jetson Orin: `cpu-thermal`, `gpu-thermal`, `cv0…2-thermal`, `soc0…2-thermal`, `tj-thermal` (JetPack 5: `CPU-therm` or
  plain `CPU`); Thor the same with `soc012-thermal`, `soc345-thermal`. Zones of parts that are switched off answer
  EAGAIN or −256 °C: tj is the maximum over all that are on.
- Jetson Nano, Xavier: `PMIC-Die` is a constant 100 °C, `thermal-fan-est` an average, `AO-therm` and `PLL-therm`
  belong to parts that computing hardly heats.
- RK3588: `soc-thermal`, `bigcore0-thermal`, `littlecore-thermal`, `center-thermal`, `gpu-thermal`, `npu-thermal`.
- x86: `x86_pkg_temp` (the package), `acpitz` (the board's, often a constant), `pch_*`, `iwlwifi_*`, `INT3400 Thermal`,
  `SENn`; hwmon `coretemp`, `k10temp`, `zenpower`, `amdgpu`, `nvme`, `BAT0`.
"""

from __future__ import annotations

import math
import re

from guards.thermal.readings import Kind

# The first that matches the lower-case name counts.
_KINDS: tuple[tuple[re.Pattern[str], Kind], ...] = tuple(
    (re.compile(pattern), kind)
    for pattern, kind in (
        (r"pmic", Kind.PMIC),
        (r"bat|charg|usb|wifi|wlan|iwl|ath\d|mt79|modem|nvme|drivetemp|sdcard|pch|int3\d+|sen\d|fan", Kind.OTHER),
        (r"^tj", Kind.JUNCTION),
        (r"cpu|core|x86_pkg|k10temp|zenpower|cluster", Kind.CPU),
        (r"gpu|nouveau|i915|^xe$", Kind.GPU),
        (r"npu|^cv\d|dla|vpu|tpu", Kind.ACCELERATOR),
        (r"^soc|center|package", Kind.SOC),
        (r"acpitz|board|diode|lm75|tmp\d+", Kind.BOARD),
    )
)

# Outside of these no silicon works; drivers say −256, −128 or −125 °C, −32768 °C or 255 °C for "no answer".
COLDEST_CELSIUS = -40.0
HOTTEST_CELSIUS = 130.0
# A few drivers answer in whole degrees where the kernel's interface has thousandths.
LEAST_MILLIDEGREES = 150
MOST_CHARACTERS = 64  # of a number with its blanks; thousands of digits are no float any more
PMIC_PLACEHOLDER_CELSIUS = 100.0


def kind_of(name: str) -> Kind:
    """Of a zone's `type`, or a hwmon chip's `name`."""
    lowered = name.lower()
    return next((kind for pattern, kind in _KINDS if pattern.search(lowered)), Kind.OTHER)


def believe_millidegrees(text: str, kind: Kind) -> tuple[float | None, str]:
    """Degrees Celsius of a kernel file, or None and the reason."""
    try:
        raw = int(text) if len(text) <= MOST_CHARACTERS else None
    except ValueError:
        raw = None
    if raw is None:
        return None, f"{text.strip()[:20]!r} is no temperature" if text.strip() else "it says nothing"
    if 0 < abs(raw) < LEAST_MILLIDEGREES:
        return None, f"{raw} is not in thousandths of a degree"
    return believe(raw / 1000, kind)


def believe(celsius: float, kind: Kind) -> tuple[float | None, str]:
    """A plausible value as it is, else None and the reason.

    Boxes outdoors do freeze, so values below zero are believed. Exactly zero is what drivers without an answer say: a
    box that passes through it loses a reading or two, in which its limits are held.
    """
    if not math.isfinite(celsius):
        return None, "it is not a number"
    if celsius == 0:
        return None, "0 °C exactly is what a sensor without an answer says"
    if not COLDEST_CELSIUS < celsius < HOTTEST_CELSIUS:
        return None, f"{celsius:g} °C is not plausible"
    if kind is Kind.PMIC and celsius == PMIC_PLACEHOLDER_CELSIUS:
        return None, "100 °C exactly is this chip's placeholder"
    return celsius, ""
