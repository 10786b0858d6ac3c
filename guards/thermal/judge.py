"""What the thermal guard makes of a reading. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from guards.findings import Action, Decision, Finding, Repair, State, Value
from guards.settings import ThermalSettings
from guards.thermal.latch import Latch, step
from guards.thermal.levels import Level, ladder
from guards.thermal.memory import ThermalMemory
from guards.thermal.readings import Kind, ThermalReading, Zone
from guards.thermal.stage import StageReading
from guards.thermal.throttling import judge_throttling

STAGE = "stage"


def decide(
    reading: ThermalReading, memory: ThermalMemory, now_seconds: float, settings: ThermalSettings
) -> Decision[ThermalMemory]:
    """Findings, the orders that bring the stage to the latch's level, and what to remember."""
    stage = reading.stage
    if memory.first_seconds is None:
        memory = replace(memory, first_seconds=now_seconds)
    if stage is not None and stage.max_batch_sequences is not None:
        if memory.max_sequences is None:
            adopted = _level_of(stage, _rungs(stage.max_batch_sequences, settings))
            memory = replace(memory, latch=memory.latch._replace(level=adopted))
        memory = replace(memory, max_sequences=stage.max_batch_sequences)
    if memory.drilled and not reading.drilled and not reading.counted:
        # nothing here will ever say that it is cool again: what a drill has limited must not outlive it
        memory = replace(memory, latch=Latch())
    memory = replace(memory, drilled=reading.drilled)
    rungs = _rungs(memory.max_sequences, settings)
    hottest = reading.hottest
    celsius = None if hottest is None else hottest.celsius
    latch = step(
        memory.latch,
        celsius,
        throttled=reading.throttled,
        bottom=len(rungs) - 1,
        now_seconds=now_seconds,
        settings=settings,
    )
    throttling, throttling_memory = judge_throttling(reading, memory.throttling, now_seconds, settings)
    memory = replace(memory, latch=latch, throttling=throttling_memory)
    findings = (
        _temperature(reading, hottest, memory, now_seconds, settings),
        _limit(memory, rungs, celsius, settings),
        throttling,
        _sensors(reading),
        *(_pmic(zone, settings) for zone in reading.zones if zone.kind is Kind.PMIC and zone.celsius is not None),
    )
    actions = () if stage is None or memory.max_sequences is None else _orders(stage, rungs[latch.level], celsius)
    return Decision(findings, actions, memory)


def _rungs(max_sequences: int | None, settings: ThermalSettings) -> tuple[Level, ...]:
    """Only the full one while no stage has said what its limit is."""
    if max_sequences is None:
        return (Level(1, 100.0),)
    return ladder(max_sequences, settings.least_duty_percent, settings.step_percent)


def _level_of(stage: StageReading, rungs: tuple[Level, ...]) -> int:
    """Where a stage stands that a guard without a memory finds: its limits stay, and rise as it is cool."""
    sequences = stage.batch_limit_sequences or rungs[0].sequences
    duty = rungs[0].duty_percent if stage.duty_limit_percent is None else stage.duty_limit_percent
    fits = (index for index, rung in enumerate(rungs) if rung.sequences <= sequences and rung.duty_percent <= duty)
    return next(fits, len(rungs) - 1)


def _orders(stage: StageReading, wanted: Level, celsius: float | None) -> tuple[Action, ...]:
    """What brings a stage there that stands elsewhere, be it that it was restarted. Nothing for a limit it has not."""
    because = "temperature unknown" if celsius is None else f"{celsius:.1f} °C"
    orders = []
    if stage.batch_limit_sequences is not None and stage.batch_limit_sequences != wanted.sequences:
        orders.append(
            Action(
                Repair.LIMIT_BATCH,
                STAGE,
                f"{because}: batch limit {stage.batch_limit_sequences} → {wanted.sequences}",
                {"sequences": wanted.sequences},
            )
        )
    if stage.duty_limit_percent is not None and abs(stage.duty_limit_percent - wanted.duty_percent) > 0.05:
        orders.append(
            Action(
                Repair.LIMIT_DUTY,
                STAGE,
                f"{because}: duty cycle {stage.duty_limit_percent:g} → {wanted.duty_percent:g} %",
                {"duty_percent": wanted.duty_percent},
            )
        )
    return tuple(orders)


def _temperature(
    reading: ThermalReading, hottest: Zone | None, memory: ThermalMemory, now_seconds: float, settings: ThermalSettings
) -> Finding:
    part = "temperature"
    if hottest is None or hottest.celsius is None:
        since = _unknown_since(memory.latch, memory, now_seconds)
        evidence: dict[str, Value] = {"celsius": None, "unknown_seconds": round(now_seconds - since, 1)}
        if now_seconds - since < settings.unknown_seconds:
            return Finding(part, State.INITIALISING, "no temperature yet; limits are held", evidence)
        if not reading.counted:
            return Finding(part, State.UNSUPPORTED, "this box has no sensor near its chips", evidence)
        reason = f"no temperature for {now_seconds - since:.0f} s; limits are held"
        return Finding(part, State.DEGRADED, reason, evidence, Repair.CHECK_SENSOR)
    evidence = {"celsius": hottest.celsius, "zone": hottest.name}
    seen = f"{hottest.celsius:.1f} °C at {hottest.name}"
    if hottest.celsius >= settings.critical_celsius:
        reason = f"{seen}, at or above {settings.critical_celsius:g}"
        return Finding(part, State.UNHEALTHY, reason, evidence, Repair.CHECK_COOLING)
    if hottest.celsius > settings.high_celsius:
        return Finding(part, State.DEGRADED, f"{seen}, above {settings.high_celsius:g}", evidence, Repair.LIMIT_BATCH)
    return Finding(part, State.HEALTHY, seen, evidence)


def _unknown_since(latch: Latch, memory: ThermalMemory, now_seconds: float) -> float:
    if latch.seen_seconds is not None:
        return latch.seen_seconds
    return now_seconds if memory.first_seconds is None else memory.first_seconds


def _limit(
    memory: ThermalMemory, rungs: tuple[Level, ...], celsius: float | None, settings: ThermalSettings
) -> Finding:
    part, level = "limit", memory.latch.level
    if memory.max_sequences is None:
        return Finding(part, State.UNSUPPORTED, "no stage has answered yet, so there is nothing to limit")
    full, rung = rungs[0], rungs[level]
    evidence: dict[str, Value] = {
        "level": level,
        "levels": len(rungs),
        "batch_limit_sequences": rung.sequences,
        "duty_limit_percent": rung.duty_percent,
    }
    if level == 0:
        return Finding(part, State.HEALTHY, "no limit", evidence)
    reason = f"batch limit {rung.sequences} of {full.sequences}, duty cycle {rung.duty_percent:g} %"
    if level == len(rungs) - 1 and celsius is not None and celsius > settings.high_celsius:
        reason = f"{reason}, the least, and still {celsius:.1f} °C"
        return Finding(part, State.UNHEALTHY, reason, evidence, Repair.CHECK_COOLING)
    return Finding(part, State.DEGRADED, reason, evidence, Repair.LIMIT_BATCH)


def _sensors(reading: ThermalReading) -> Finding:
    """Parts that are switched off have zones that can't be read, so one good one is enough."""
    counted = reading.counted
    silent = [zone for zone in counted if zone.celsius is None]
    evidence: Mapping[str, Value] = {"zones": len(counted), "unreadable_zones": len(silent)}
    reason = "; ".join(f"{zone.name}: {zone.reason}" for zone in silent)
    if not counted:
        return Finding("sensors", State.UNSUPPORTED, "none on or near the chips", evidence)
    if len(silent) == len(counted):
        return Finding("sensors", State.DEGRADED, reason, evidence, Repair.CHECK_SENSOR)
    return Finding("sensors", State.HEALTHY, reason, evidence)


def _pmic(zone: Zone, settings: ThermalSettings) -> Finding:
    celsius, part = zone.celsius or 0.0, f"pmic/{zone.name}"
    evidence: Mapping[str, Value] = {"celsius": celsius}
    if celsius > settings.pmic_celsius:
        reason = f"{celsius:.1f} °C, above {settings.pmic_celsius:g}"
        return Finding(part, State.UNHEALTHY, reason, evidence, Repair.CHECK_COOLING)
    return Finding(part, State.HEALTHY, f"{celsius:.1f} °C", evidence)
