"""Findings of the clock. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass

from guards.clock.agree import Agreement
from guards.clock.chrony import SourceState
from guards.clock.reading import ClockReading, PeerSkew
from guards.clock.verdict import Sync, Verdict
from guards.findings import Finding, Repair, State, Value
from guards.settings import ClockSettings


@dataclass(frozen=True)
class Bounds:
    """How far off is too far, in seconds.

    Attributes:
        degraded: largest offset that is fine. unhealthy: largest that leaves the box usable.
        inside: for this reason: the box is in a pipeline.
    """

    degraded: float
    unhealthy: float
    inside: bool

    @staticmethod
    def of(settings: ClockSettings, *, in_pipeline: bool) -> Bounds:
        """Those of a box."""
        milliseconds = settings.offset_milliseconds if in_pipeline else settings.loose_offset_milliseconds
        return Bounds(milliseconds / 1e3, max(milliseconds, settings.step_milliseconds) / 1e3, in_pipeline)


def clock_finding(
    verdict: Verdict, reading: ClockReading, bounds: Bounds, settings: ClockSettings, *, servers: int, box: str
) -> Finding:
    """The clock itself: who leads it, and how far it is off.

    Args:
        servers: how many time servers are configured. box: whom `fleet time push` is told.
    """
    evidence: dict[str, Value] = {
        "clock_state": verdict.sync.value,
        "keeper": verdict.keeper or None,
        "without_chrony_because": reading.chrony.reason or None,
        "source": verdict.source or None,
        "stratum": verdict.stratum,
        "leap": verdict.leap,
        "offset_milliseconds": _milliseconds(verdict.offset_seconds),
        "uncertainty_milliseconds": _milliseconds(verdict.uncertainty_seconds),
        "jitter_milliseconds": _milliseconds(verdict.jitter_seconds),
        "source_error_milliseconds": _milliseconds(verdict.error_seconds),
    }
    state, reason, repair = _of_sync(verdict, reading, settings, servers=servers, box=box)
    off_state, off_reason, off_repair = _of_offset(verdict, bounds)
    if off_state.severity > state.severity:
        state, reason, repair = off_state, off_reason, off_repair
    elif off_reason:
        reason = f"{reason}; {off_reason}"
    return Finding("clock", state, reason, evidence, repair)


def _of_sync(
    verdict: Verdict, reading: ClockReading, settings: ClockSettings, *, servers: int, box: str
) -> tuple[State, str, Repair]:
    reason = f"{verdict.sync.value}: {verdict.reason}"
    if verdict.sync is Sync.INSANE:
        return State.UNHEALTHY, f"{reason}; `fleet time push {box}` sets it", Repair.CORRECT_CLOCK
    if verdict.sync is Sync.SYNCHRONISED:
        return State.HEALTHY, reason, Repair.NONE
    if verdict.sync is Sync.FREE_RUNNING:
        return State.DEGRADED, reason, Repair.CHECK_TIME_SERVER
    if not servers and not reading.chrony.sources:
        return State.DEGRADED, reason, Repair.CHECK_TIME_SERVER  # as whoever runs the site wants it
    if reading.wall.boot_seconds < settings.settle_seconds:
        return State.INITIALISING, reason, Repair.NONE
    return State.UNHEALTHY, reason, Repair.CHECK_TIME_SERVER


def _of_offset(verdict: Verdict, bounds: Bounds) -> tuple[State, str, Repair]:
    offset = verdict.offset_seconds
    if offset is None:
        if bounds.inside and verdict.sync is Sync.SYNCHRONISED:
            return State.DEGRADED, "its offset can't be measured", Repair.CHECK_TIME_SERVER
        return State.HEALTHY, "", Repair.NONE
    sure = abs(offset) - (verdict.uncertainty_seconds or 0.0)
    words = f"the clock is {abs(offset) * 1e3:.3f} ms {'ahead' if offset > 0 else 'behind'}"
    allowed = f"at most {bounds.degraded * 1e3:g} ms {'inside a pipeline' if bounds.inside else 'are fine'}"
    if sure > bounds.unhealthy:
        return State.UNHEALTHY, f"{words}; {allowed}", Repair.CORRECT_CLOCK
    if sure > bounds.degraded:
        return State.DEGRADED, f"{words}; {allowed}", Repair.CORRECT_CLOCK
    if abs(offset) > bounds.degraded:
        unsure = (verdict.uncertainty_seconds or 0.0) * 1e3
        return State.DEGRADED, f"{words} ± {unsure:.3f} ms, too unsure to tell; {allowed}", Repair.CHECK_NETWORK
    return State.HEALTHY, "", Repair.NONE


def sources_finding(reading: ClockReading, agreement: Agreement, settings: ClockSettings, *, servers: int) -> Finding:
    """The time sources: who answers, who lies."""
    part = "time-sources"
    if reading.chrony.tracking is not None and reading.chrony.sources:
        sources = reading.chrony.sources
        silent = [each.name for each in sources if not each.reach]
        false = [each.name for each in sources if each.state is SourceState.FALSETICKER]
        usable, asked = len(sources) - len({*silent, *false}), len(sources)
        complaints = [*(f"{name}: silent" for name in silent), *(f"{name}: differs from the others" for name in false)]
    elif reading.sntp is not None:
        believed = 0 if agreement.best is None else len(reading.sntp.answers) - len(agreement.falsetickers)
        usable, asked = believed, len(reading.sntp.answers) + len(reading.sntp.failures)
        complaints = [f"{server}: {reason}" for server, reason in reading.sntp.failures]
        if agreement.best is not None:
            complaints += [f"{server}: differs from the others" for server in agreement.falsetickers]
        elif reading.sntp.answers:
            complaints.append(agreement.reason)
    elif servers:
        return Finding(part, State.HEALTHY, "chronyd knows the time without asking the site's servers")
    else:
        return Finding(part, State.UNSUPPORTED, "no time server is configured")
    evidence: dict[str, Value] = {"sources_number": asked, "usable_number": usable}
    if not complaints:
        return Finding(part, State.HEALTHY, "", evidence)
    settling = reading.wall.boot_seconds < settings.settle_seconds
    state = State.INITIALISING if settling else State.DEGRADED
    return Finding(part, state, "; ".join(complaints), evidence, Repair.CHECK_TIME_SERVER)


def drift_finding(verdict: Verdict, settings: ClockSettings) -> Finding:
    """How fast the clock runs away."""
    if verdict.drift_ppm is None or verdict.drift_resolution_ppm is None:
        if verdict.source and verdict.offset_seconds is not None:
            return Finding("drift", State.INITIALISING, "too few measurements yet")
        return Finding("drift", State.UNSUPPORTED, "nothing to measure it against")
    evidence: dict[str, Value] = {
        "drift_ppm": round(verdict.drift_ppm, 3),
        "drift_resolution_ppm": round(verdict.drift_resolution_ppm, 3),
    }
    if abs(verdict.drift_ppm) - verdict.drift_resolution_ppm > settings.drift_ppm:
        reason = f"the clock runs away by {verdict.drift_ppm:+.1f} ppm; at most {settings.drift_ppm:g} ppm are fine"
        return Finding("drift", State.DEGRADED, reason, evidence, Repair.CHECK_TIME_SERVER)
    return Finding("drift", State.HEALTHY, "", evidence)


def peers_finding(skews: Mapping[str, PeerSkew], why_none: str, bounds: Bounds) -> Finding:
    """What other boxes say: the median of them decides whose clock is odd, this box's or theirs."""
    if not skews:
        return Finding("peers", State.UNSUPPORTED, why_none or "no other box to compare with")
    middle = statistics.median(each.skew_seconds for each in skews.values())
    apart = {box: skew for box, skew in skews.items() if _apart(skew) > bounds.degraded}
    evidence: dict[str, Value] = {
        "boxes_number": len(skews),
        "apart_number": len(apart),
        "median_skew_milliseconds": _milliseconds(middle),
    }
    if not apart:
        return Finding("peers", State.HEALTHY, "", evidence)
    said = ", ".join(f"{box} {skew.skew_seconds * 1e3:+.3f} ms" for box, skew in sorted(apart.items()))
    same_way = max(
        sum(skew.skew_seconds > 0 for skew in apart.values()), sum(skew.skew_seconds < 0 for skew in apart.values())
    )
    if len(skews) == 1:
        return Finding("peers", State.DEGRADED, f"this clock or the other's is off: {said}", evidence)
    if 2 * same_way > len(skews):
        return Finding(
            "peers", State.DEGRADED, f"most boxes differ from this one: {said}", evidence, Repair.CHECK_TIME_SERVER
        )
    return Finding("peers", State.HEALTHY, f"others are off: {said}", evidence)


def _apart(skew: PeerSkew) -> float:
    return abs(skew.skew_seconds) - skew.uncertainty_seconds


def _milliseconds(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1e3, 6)
