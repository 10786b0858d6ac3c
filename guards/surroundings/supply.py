"""Under-voltage of Raspberry Pis: live, and since boot."""

from __future__ import annotations

from dataclasses import dataclass

from guards.deadline import DeadlineReader, Unreadable
from guards.findings import Finding, Repair, State, Value
from guards.roots import Roots
from guards.thermal.throttled import parse_throttled

FIRMWARE_FILES = "devices/platform/soc*/*firmware/get_throttled"  # the Pi 5's bus has an address in its name
HWMON_NAME = "rpi_volt"


@dataclass(frozen=True)
class Supply:
    """Whether the voltage is too low.

    Attributes:
        low_now: None: could not be measured, or no such sensor.
        low_since_boot: at any time since boot, now included; None where only the live state is told.
        problem: why a sensor that is there did not answer; empty otherwise.
        absent: there is no such sensor.
    """

    low_now: bool | None
    low_since_boot: bool | None
    problem: str = ""
    absent: bool = False


def sense_supply(roots: Roots, reader: DeadlineReader) -> Supply:
    """The firmware's throttle word, else the alarm of the hwmon driver, which reads the same bit."""
    problem = ""
    for firmware in roots.sys.glob(FIRMWARE_FILES):
        try:
            bits = parse_throttled(reader.text(firmware))
            return Supply(bits.now.under_voltage, bits.since_boot.under_voltage)
        except (Unreadable, ValueError) as error:
            problem = f"get_throttled: {error}"
    for directory in sorted((roots.sys / "class/hwmon").glob("hwmon*")):
        try:
            if reader.text(directory / "name").strip() == HWMON_NAME:
                return Supply(int(reader.text(directory / "in0_lcrit_alarm")) != 0, None)
        except (Unreadable, ValueError) as error:
            problem = problem or f"{directory.name}: {error}"
    return Supply(None, None, problem, absent=not problem)


def judge_supply(supply: Supply) -> tuple[Finding, ...]:
    """One finding. The live bit decides; the one since boot only tells that it happened some time. The bound, about
    4.63 V, is the firmware's."""
    evidence: dict[str, Value] = {"under_voltage": supply.low_now, "under_voltage_since_boot": supply.low_since_boot}
    if supply.absent:
        return (Finding("supply", State.UNSUPPORTED, "no sensor", evidence),)
    if supply.low_now is None:
        return (Finding("supply", State.DEGRADED, supply.problem, evidence, Repair.CHECK_SENSOR),)
    if supply.low_now:
        return (Finding("supply", State.UNHEALTHY, "under-voltage", evidence, Repair.CHECK_POWER),)
    reason = "under-voltage since boot, not now" if supply.low_since_boot else ""
    return (Finding("supply", State.HEALTHY, reason, evidence),)
