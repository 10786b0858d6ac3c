"""How the clock stands, from everything that says something of it. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum

from guards.clock.agree import Agreement
from guards.clock.chrony import ChronyReading, Tracking
from guards.clock.limits import TimeLimits
from guards.clock.reading import ClockReading
from guards.clock.samples import Sample, best_sample, drift, jitter_seconds
from guards.settings import ClockSettings


class Sync(str, Enum):
    """Who leads the clock."""

    SYNCHRONISED = "synchronised"  # something on the box keeps it to a source
    FREE_RUNNING = "free-running"  # it runs on its own, or its source does
    UNSYNCHRONISED = "unsynchronised"  # nothing says what time it is
    INSANE = "insane"  # it can't be that time


@dataclass(frozen=True)
class Verdict:
    """How the clock stands. None: not known.

    Attributes:
        keeper: what keeps the clock: "chrony", "timesyncd", "daemon" (one that the kernel knows of), "".
        source: what it was measured against.
        offset_seconds: positive: ahead; true to `uncertainty_seconds`.
        jitter_seconds: of its measurements (chrony: long-term RMS offset).
        error_seconds: how far the source itself may be off true time.
        drift_ppm: how fast it would run (chrony) or does run (SNTP) away from the source, positive: fast, true to
            `drift_resolution_ppm`.
        reason: for the state.
    """

    sync: Sync
    reason: str
    keeper: str = ""
    source: str = ""
    offset_seconds: float | None = None
    uncertainty_seconds: float | None = None
    jitter_seconds: float | None = None
    error_seconds: float | None = None
    drift_ppm: float | None = None
    drift_resolution_ppm: float | None = None
    stratum: int | None = None
    leap: str | None = None


def verdict_of(
    reading: ClockReading,
    agreement: Agreement,
    samples: Sequence[Sample],
    limits: TimeLimits,
    settings: ClockSettings,
) -> Verdict:
    """How the clock stands.

    Args:
        agreement: of the time servers in this round. samples: of the best of them, this round's included.
    """
    tracking = reading.chrony.tracking
    told = agreement.best is not None and not agreement.best.free_running
    if tracking is not None and tracking.synchronised and not (tracking.free_running and told):
        verdict = _by_chrony(reading.chrony, tracking, settings)
    else:
        verdict = _by_servers(reading, agreement, samples, settings)
    if limits.sane(reading.wall.unix_seconds):
        return verdict
    when = "before this release was built" if reading.wall.unix_seconds < limits.floor_seconds else "far in the future"
    return replace(verdict, sync=Sync.INSANE, reason=f"the clock says a time {when}")


def _by_chrony(chrony: ChronyReading, tracking: Tracking, settings: ClockSettings) -> Verdict:
    known = Verdict(
        Sync.SYNCHRONISED,
        f"chronyd follows {tracking.name or tracking.reference}",
        keeper="chrony",
        source=tracking.name or tracking.reference,
        offset_seconds=tracking.offset_seconds,
        uncertainty_seconds=0.0,  # chronyd has filtered: it is its own bound for what it can tell
        jitter_seconds=tracking.rms_offset_seconds,
        error_seconds=tracking.root_delay_seconds / 2 + tracking.root_dispersion_seconds,
        drift_ppm=tracking.frequency_ppm,
        drift_resolution_ppm=abs(tracking.skew_ppm),  # printed negative for a moment after a burst
        stratum=tracking.stratum,
        leap=tracking.leap,
    )
    if tracking.free_running:
        # it compares itself with itself: the offset of 0 and the drift of 0 are none
        return replace(
            known,
            sync=Sync.FREE_RUNNING,
            reason=f"chronyd has no source and hands out its own clock as stratum {tracking.stratum}",
            offset_seconds=None,
            uncertainty_seconds=None,
            jitter_seconds=None,
            error_seconds=None,
            drift_ppm=None,
            drift_resolution_ppm=None,
        )
    if not chrony.sources:
        return replace(known, sync=Sync.FREE_RUNNING, reason="chronyd has no source; its time was set by hand")
    if not chrony.reachable:
        return replace(
            known, sync=Sync.FREE_RUNNING, reason="none of chronyd's sources has answered any of its last eight polls"
        )
    if tracking.stratum > settings.local_stratum:  # one more than its server's
        return replace(
            known,
            sync=Sync.FREE_RUNNING,
            reason=f"time server {known.source} has stratum {tracking.stratum - 1}: it has no source itself",
        )
    return known


def _by_servers(
    reading: ClockReading, agreement: Agreement, samples: Sequence[Sample], settings: ClockSettings
) -> Verdict:
    tracking = reading.chrony.tracking
    keeper = _keeper(reading)
    newest = samples[-1] if samples else None
    if newest is None or reading.wall.boot_seconds - newest.boot_seconds > settings.silent_seconds:
        return _unmeasured(reading, keeper, agreement.reason, settings)
    best, run_away = best_sample(samples), drift(samples)
    known = Verdict(
        Sync.SYNCHRONISED,
        f"kept by {keeper}, measured against {newest.server}",
        keeper=keeper,
        source=newest.server,
        offset_seconds=best.offset_seconds,
        uncertainty_seconds=best.uncertainty_seconds,
        jitter_seconds=jitter_seconds(samples),
        drift_ppm=run_away.ppm if run_away else None,
        drift_resolution_ppm=run_away.resolution_ppm if run_away else None,
    )
    if agreement.best is not None:
        known = replace(
            known,
            error_seconds=agreement.best.distance_seconds,
            stratum=agreement.best.stratum,
            leap=str(agreement.best.leap),
        )
        if agreement.best.free_running:
            return replace(known, sync=Sync.FREE_RUNNING, reason=f"time server {newest.server} has no source itself")
    if not keeper:
        why = "chronyd is not synchronised" if tracking is not None else "nothing on this box corrects the clock"
        return replace(known, sync=Sync.FREE_RUNNING, reason=f"{why}; measured against {newest.server}")
    return known


def _keeper(reading: ClockReading) -> str:
    if reading.timesyncd_seconds_ago is not None:
        return "timesyncd"
    if reading.kernel_synchronised and reading.chrony.tracking is None:
        return "daemon"
    return ""


def _unmeasured(reading: ClockReading, keeper: str, complaint: str, settings: ClockSettings) -> Verdict:
    """Nobody says what the offset is."""
    ago = reading.timesyncd_seconds_ago
    if keeper == "timesyncd" and ago is not None and ago > settings.timesyncd_seconds:
        return Verdict(Sync.FREE_RUNNING, f"timesyncd has not set the clock for {ago:.0f} s", keeper)
    if keeper:
        return Verdict(Sync.SYNCHRONISED, f"kept by {keeper}; its offset is not known", keeper)
    chrony = reading.chrony
    reasons = ["chronyd is not synchronised" if chrony.tracking is not None else chrony.reason, complaint]
    if reading.sntp is None:
        reasons[1] = "no time server is configured"
    stratum = chrony.tracking.stratum if chrony.tracking is not None else None
    leap = chrony.tracking.leap if chrony.tracking is not None else None
    return Verdict(Sync.UNSYNCHRONISED, "; ".join(each for each in reasons if each), stratum=stratum, leap=leap)
