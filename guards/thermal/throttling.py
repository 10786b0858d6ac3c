"""Throttling that happens all the same: whether, and what it costs. Pure.

Two kinds of evidence. The hardware's word (throttle bits, NVML's reasons) counts at once, and moves the latch. A clock
below what the box ran at when it was cool counts only on a hot, busy box, as idle boxes lower their clocks by
themselves; it is reported and moves nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from guards.findings import Finding, Repair, State, Value
from guards.settings import ThermalSettings
from guards.thermal.readings import ThermalReading

PART = "throttling"
WINDOW_ROUNDS = 15
"""A stage that waits for its neighbours lets the clock drop in between; the highest of these rounds is its clock."""
RATE_GAIN = 0.1
"""Of the running mean of tokens/s, per round."""


@dataclass(frozen=True)
class ThrottlingMemory:
    """What it compares with.

    Attributes:
        recent_megahertz: by clock, the last rounds in which the stage was busy.
        cool_megahertz: by clock, what it ran at when it last was cool and busy.
        tokens_per_second: running mean while busy and not throttled; None: not known.
        since_seconds: since when it throttles; None: it does not.
    """

    recent_megahertz: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    cool_megahertz: Mapping[str, float] = field(default_factory=dict)
    tokens_per_second: float | None = None
    since_seconds: float | None = None


def judge_throttling(
    reading: ThermalReading, memory: ThrottlingMemory, now_seconds: float, settings: ThermalSettings
) -> tuple[Finding, ThrottlingMemory]:
    """The finding, and what to remember."""
    busy = reading.stage is not None and reading.stage.busy
    hottest = reading.hottest
    cool = hottest is not None and (hottest.celsius or 0.0) < settings.low_celsius
    recent = _remembered(reading, memory, busy=busy)
    peaks = {name: max(values) for name, values in recent.items() if len(values) == WINDOW_ROUNDS}
    cool_peaks = {**memory.cool_megahertz, **peaks} if busy and cool else memory.cool_megahertz
    lost = None if cool or not busy else _lost_percent(reading, peaks, cool_peaks)
    throttled = reading.throttled or (lost is not None and lost > settings.clock_lost_percent)
    rate = reading.stage.tokens_per_second if reading.stage is not None and busy else None
    mean = memory.tokens_per_second
    if rate and not throttled:
        mean = rate if mean is None else mean + RATE_GAIN * (rate - mean)
    since = (memory.since_seconds if memory.since_seconds is not None else now_seconds) if throttled else None
    kept = ThrottlingMemory(recent, cool_peaks, mean, since)
    evidence = _evidence(reading, lost, rate if throttled else None, mean if throttled else None)
    if since is not None:
        return _throttled(reading, lost, now_seconds - since, evidence), kept
    if not reading.clocks and all(each.heat is None for each in reading.throttles):
        reason = "; ".join(f"{each.name}: {each.reason}" for each in reading.throttles)
        return Finding(
            PART, State.UNSUPPORTED, reason or "this box tells neither clocks nor throttling", evidence
        ), kept
    return Finding(PART, State.HEALTHY, "not throttled", evidence), kept


def _remembered(reading: ThermalReading, memory: ThrottlingMemory, *, busy: bool) -> Mapping[str, tuple[float, ...]]:
    """The last busy rounds of each clock that is there."""
    before = memory.recent_megahertz
    if not busy:
        return before
    return {each.name: (*before.get(each.name, ()), each.megahertz)[-WINDOW_ROUNDS:] for each in reading.clocks}


def _lost_percent(reading: ThermalReading, peaks: Mapping[str, float], cool: Mapping[str, float]) -> float | None:
    """Largest share of any clock that is lost: to what it ran at while cool, else to what is allowed; None: unknown."""
    lost = []
    for clock in reading.clocks:
        nominal = cool.get(clock.name, clock.allowed_megahertz)
        if nominal and clock.name in peaks:
            lost.append(max(0.0, 100 * (1 - peaks[clock.name] / nominal)))
    return max(lost, default=None)


def _evidence(
    reading: ThermalReading, lost: float | None, rate: float | None, before: float | None
) -> dict[str, Value]:
    since_boot = [each.heat_since_boot for each in reading.throttles if each.heat_since_boot is not None]
    evidence: dict[str, Value] = {
        "clock_lost_percent": None if lost is None else round(lost, 1),
        "throttled_since_boot": any(since_boot) if since_boot else None,
        "tokens_per_second": rate,
        "tokens_per_second_before": None if before is None else round(before, 1),
    }
    for clock in reading.clocks:
        evidence[f"{clock.name}_megahertz"] = round(clock.megahertz)
    return evidence


def _throttled(reading: ThermalReading, lost: float | None, seconds: float, evidence: dict[str, Value]) -> Finding:
    by = [each.name for each in reading.throttles if each.heat]
    reason = f"the hardware throttles for heat ({', '.join(by)})" if by else "the clock is lower than on a cool box"
    reason += f" for {seconds:.0f} s"
    if lost:
        reason += f": {lost:.0f} % of the clock lost"
    if (rate := evidence["tokens_per_second"]) is not None and evidence["tokens_per_second_before"] is not None:
        reason += f", {rate:.1f} tokens/s after {evidence['tokens_per_second_before']}"
    return Finding(PART, State.DEGRADED, reason, evidence, Repair.CHECK_COOLING)
