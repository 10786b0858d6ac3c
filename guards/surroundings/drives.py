"""Drives: temperature and health of SSDs and disks by smartctl, of NVMe by hwmon too, wear of eMMC by sysfs."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from guards.deadline import DeadlineReader, Unreadable
from guards.findings import Finding, Repair, State, Value
from guards.roots import Roots
from guards.settings import SurroundingsSettings
from guards.tools import ToolFailed, ToolMissing, run_tool

LARGEST_NUMBER = 2**63  # what is larger no drive counts
DRIVE = re.compile(r"sd[a-z]+|nvme\d+n\d+|mmcblk\d+")
# Bits of smartctl's exit status (smartctl(8)).
BAD_COMMAND_LINE, OPEN_FAILED, COMMAND_FAILED = 1 << 0, 1 << 1, 1 << 2
FAILING, PREFAIL_NOW = 1 << 3, 1 << 4
# Bits 5 to 7 speak of the past (an attribute once below its threshold, entries in logs of errors and self-tests): they
# stay for ever and ask for nothing.
# Drives are specified for −40 … 85 °C at most; what is far outside, or exactly 0, comes from a board without a sensor.
LEAST_CELSIUS, MOST_CELSIUS = -40.0, 125.0
# JEDEC eMMC 5.0, EXT_CSD: life time in steps of 10 % (1: 0–10 % used … 10: 90–100 %, 11: exceeded), reserve blocks
# 1 normal, 2: 80 % used, 3: 90 % used.
EMMC_STEP_PERCENT, EMMC_EXCEEDED = 10.0, 11
EMMC_RESERVE_WARNING, EMMC_RESERVE_URGENT = 2, 3


@dataclass(frozen=True)
class Drive:
    """What a drive tells. None: it does not tell, or could not be asked.

    Attributes:
        celsius: temperature. passed: its own verdict.
        warnings: what smartctl's exit status and the NVMe log complain about, one line each.
        used_percent: of its rated or estimated life.
        reserve: of an eMMC: 1 normal, 2 warning, 3 urgent.
        problem: why nothing, or only a part, could be measured; empty otherwise.
        absent: nothing of this kind can be measured here, and nobody could change that.
    """

    name: str
    celsius: float | None = None
    passed: bool | None = None
    warnings: tuple[str, ...] = ()
    used_percent: float | None = None
    reserve: int | None = None
    problem: str = ""
    absent: bool = False


def sense_drives(roots: Roots, reader: DeadlineReader, settings: SurroundingsSettings) -> tuple[Drive, ...]:
    """All drives but removable ones; loop devices and memory are none. Takes a process a drive."""
    try:
        names = sorted(each.name for each in (roots.sys / "block").iterdir())
    except OSError:
        return ()
    return tuple(
        _emmc(name, roots, reader) if name.startswith("mmcblk") else _smart(name, roots, reader, settings)
        for name in names
        if DRIVE.fullmatch(name) and not _removable(roots.sys / "block" / name, reader)
    )


def _removable(block: Path, reader: DeadlineReader) -> bool:
    """A stick or card reader, as the kernel says; an SSD behind USB is not."""
    try:
        return reader.text(block / "removable").strip() == "1"
    except Unreadable:
        return False


def _smart(name: str, roots: Roots, reader: DeadlineReader, settings: SurroundingsSettings) -> Drive:
    celsius = _hwmon_celsius(roots.sys / "block" / name / "device", reader)
    device = str(roots.dev / name)
    try:
        answer = run_tool(roots, "smartctl", "-j", "-A", "-H", "-i", device, deadline_seconds=settings.tool_seconds)
    except ToolMissing:
        return Drive(name, celsius, problem="smartctl is not installed", absent=celsius is None)
    except ToolFailed as error:
        return Drive(name, celsius, problem=str(error))
    drive = parse_smart(name, answer.code, answer.text)
    return drive if drive.celsius is not None else _with_celsius(drive, celsius)


def _with_celsius(drive: Drive, celsius: float | None) -> Drive:
    if celsius is None:
        return drive
    return dataclasses.replace(drive, celsius=celsius, absent=False)


def parse_smart(name: str, code: int, text: str) -> Drive:
    """What `smartctl -j -A -H -i` says of a drive.

    Args:
        code: its exit status, a bit mask.
    """
    try:
        answer = json.loads(text)
    except (ValueError, RecursionError):
        # before version 7.0 there is no -j
        return Drive(name, problem="smartctl answers no JSON: version 7.0 or later is needed")
    if not isinstance(answer, dict):
        return Drive(name, problem="smartctl answers no JSON object")
    if code & (BAD_COMMAND_LINE | OPEN_FAILED):
        return _unopened(name, answer)
    log = _section(answer, "nvme_smart_health_information_log")
    warnings = []
    if code & FAILING:
        warnings.append("the drive says that it is failing")
    if code & PREFAIL_NOW:
        warnings.append("a pre-fail attribute is at its threshold")
    if critical := _number(log, "critical_warning"):
        warnings.append(f"NVMe critical warning 0x{int(critical):02x}")
    passed = _section(answer, "smart_status").get("passed")
    celsius = plausible_celsius(_number(_section(answer, "temperature"), "current"))
    problem = "a SMART command failed" if code & COMMAND_FAILED and passed is None else ""
    absent = celsius is None and passed is None and not code & COMMAND_FAILED
    used = _number(log, "percentage_used")
    return Drive(
        name,
        celsius,
        passed if isinstance(passed, bool) else None,
        tuple(warnings),
        used,
        problem="the drive tells neither temperature nor health" if absent else problem,
        absent=absent,
    )


def _unopened(name: str, answer: Mapping[str, Any]) -> Drive:
    messages = _section(answer, "smartctl").get("messages")
    listed = messages if isinstance(messages, list) else []
    texts = [str(each.get("string", "")) for each in listed if isinstance(each, dict)]
    text = "; ".join(filter(None, texts))[:200] or "smartctl could not open the drive"
    # a USB bridge or card reader that passes nothing on is no fault; a missing permission is
    unknown = any(word in text for word in ("Unknown USB bridge", "Unsupported USB bridge", "Unable to detect device"))
    return Drive(name, problem=text, absent=unknown)


def _hwmon_celsius(device: Path, reader: DeadlineReader) -> float | None:
    """By the kernel's own drivers nvme and drivetemp, which need no rights; millidegrees in their files."""
    for file in (*device.glob("hwmon*/temp1_input"), *device.glob("hwmon/hwmon*/temp1_input")):
        try:
            return plausible_celsius(int(reader.text(file)) / 1000.0)
        except (Unreadable, ValueError, OverflowError):
            continue
    return None


def _emmc(name: str, roots: Roots, reader: DeadlineReader) -> Drive:
    device = roots.sys / "block" / name / "device"
    try:
        used = max(int(word, 16) for word in reader.text(device / "life_time").split())
        reserve = int(reader.text(device / "pre_eol_info"), 16)
    except (Unreadable, ValueError):
        return Drive(name, problem="SD cards tell neither temperature nor wear", absent=True)
    if not used:
        return Drive(name, reserve=reserve or None, problem="the eMMC tells no life time", absent=True)
    exceeded = ("its estimated life is over",) if used >= EMMC_EXCEEDED else ()
    return Drive(name, None, None, exceeded, used * EMMC_STEP_PERCENT, reserve or None)


def judge_drives(drives: Sequence[Drive], settings: SurroundingsSettings) -> tuple[Finding, ...]:
    """One finding a drive."""
    return tuple(_judge(drive, settings) for drive in drives)


def _judge(drive: Drive, settings: SurroundingsSettings) -> Finding:
    part = f"drive/{drive.name}"
    evidence: dict[str, Value] = {
        "temperature_celsius": drive.celsius,
        "passed": drive.passed,
        "used_percent": drive.used_percent,
    }
    if drive.passed is False or drive.warnings or drive.reserve == EMMC_RESERVE_URGENT:
        reason = "; ".join(drive.warnings) or "the drive is at the end of its life"
        return Finding(part, State.UNHEALTHY, reason, evidence, Repair.CHECK_STORAGE)
    if drive.celsius is not None and drive.celsius > settings.drive_celsius:
        reason = f"{drive.celsius:.0f} °C, bound {settings.drive_celsius:g} °C"
        return Finding(part, State.DEGRADED, reason, evidence, Repair.CHECK_COOLING)
    if drive.used_percent is not None and drive.used_percent > settings.emmc_used_percent:
        reason = f"{drive.used_percent:.0f} % of its life used, bound {settings.emmc_used_percent:g} %"
        return Finding(part, State.DEGRADED, reason, evidence, Repair.CHECK_STORAGE)
    if drive.reserve == EMMC_RESERVE_WARNING:
        return Finding(part, State.DEGRADED, "80 % of the reserve blocks are used", evidence, Repair.CHECK_STORAGE)
    if drive.absent:
        return Finding(part, State.UNSUPPORTED, drive.problem, evidence)
    if drive.problem and drive.celsius is None and drive.passed is None:
        return Finding(part, State.DEGRADED, drive.problem, evidence, Repair.CHECK_SENSOR)
    return Finding(part, State.HEALTHY, drive.problem, evidence)


def plausible_celsius(celsius: float | None) -> float | None:
    """A temperature that a drive can have; None for the values of drives without a sensor."""
    if celsius is None or celsius == 0 or not LEAST_CELSIUS <= celsius <= MOST_CELSIUS:
        return None
    return float(celsius)


def _section(answer: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = answer.get(key)
    return value if isinstance(value, dict) else {}


def _number(section: Mapping[str, Any], key: str) -> float | None:
    value = section.get(key)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) <= LARGEST_NUMBER:
        return None  # NaN is not below any bound
    return float(value)
