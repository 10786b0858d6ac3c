"""The clock guard."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from guards.budgets import Budget
from guards.clock.agree import Agreement, agree
from guards.clock.chrony import ChronyReading, read_chrony
from guards.clock.correction import Method, correct, method_for
from guards.clock.judge import Bounds, clock_finding, drift_finding, peers_finding, sources_finding
from guards.clock.kernel import kernel_synchronised
from guards.clock.limits import TimeLimits
from guards.clock.reading import ClockReading, PeerClocks, PeerSkew
from guards.clock.samples import Sample, kept
from guards.clock.sntp import NTP_PORT, SntpReading, TimeServers
from guards.clock.steps import Step, explained, step_seen, steps_finding
from guards.clock.verdict import Verdict, verdict_of
from guards.clock.wall import WallReading, read_wall
from guards.findings import Action, Decision, Repair
from guards.guard import ActionFailed
from guards.roots import Roots
from guards.settings import DAY_SECONDS, ClockSettings, GuardSettings

BUDGET = "clock-correction"
TIMESYNCD_FILE = "systemd/timesync/synchronized"  # touched whenever timesyncd sets the clock (systemd-timesyncd(8))
DEADLINE_MARGIN_SECONDS = 2.0


def budgets(settings: GuardSettings) -> dict[str, Budget]:
    """What corrections of the clock may cost."""
    clock = settings.clock
    return {BUDGET: Budget(int(clock.corrections_per_day), DAY_SECONDS, clock.correction_apart_seconds)}


@dataclass(frozen=True)
class ClockMemory:
    """What the guard knows from earlier rounds. Only the two last mean anything after a reboot.

    Attributes:
        wall: both clocks at the last look.
        samples: measurements by SNTP of the server that is believed, oldest first.
        offset_seconds: at the last look; None: not known.
        step: the last one of the wall clock.
        set_at_seconds, asked_at_seconds: running clock, when chronyd was last told to set the clock; to measure anew.
    """

    wall: WallReading | None = None
    samples: tuple[Sample, ...] = ()
    offset_seconds: float | None = None
    step: Step | None = None
    set_at_seconds: float | None = None
    asked_at_seconds: float | None = None


class ClockGuard:
    """Watches the wall clock, and has chronyd correct it. Nothing that it finds keeps a stage from serving.

    Args:
        servers: the site's time servers, asked where no chronyd knows the time.
        build_unix_seconds: of this release; no clock is right that is before it.
        box: this box's name.
        in_pipeline: the tight bound holds.
        peers: second opinions; None: there are none.
        port: of the time servers.
    """

    name = "clock"

    def __init__(
        self,
        settings: GuardSettings,
        roots: Roots,
        *,
        servers: Sequence[str],
        build_unix_seconds: float,
        box: str,
        in_pipeline: bool,
        peers: PeerClocks | None = None,
        port: int = NTP_PORT,
    ) -> None:
        self._settings: ClockSettings = settings.clock
        self._roots, self._box, self._peers, self._server_count = roots, box, peers, len(servers)
        self._limits = TimeLimits(build_unix_seconds, self._settings.future_years)
        self._bounds = Bounds.of(self._settings, in_pipeline=in_pipeline)
        self._time_servers = TimeServers(servers, self._settings, self._limits, port=port)
        self.period_seconds = self._settings.period_seconds
        # chronyc, then names, then answers
        self.deadline_seconds = 3 * self._settings.query_seconds + DEADLINE_MARGIN_SECONDS

    def sense(self) -> ClockReading:
        """Look at the clocks, ask chronyd, and the time servers if it does not know."""
        wall = read_wall()
        chrony = read_chrony(self._roots, deadline_seconds=self._settings.query_seconds)
        skews, why_none = self._skews()
        return ClockReading(
            wall=wall,
            chrony=chrony,
            sntp=self._ask_servers(chrony),
            timesyncd_seconds_ago=self._timesyncd_seconds_ago(wall.unix_seconds),
            kernel_synchronised=kernel_synchronised(),
            skews=skews,
            skews_reason=why_none,
        )

    def decide(self, reading: ClockReading, memory: ClockMemory, now_seconds: float) -> Decision[ClockMemory]:
        """Judge."""
        agreement = agree(reading.sntp.answers if reading.sntp else ())
        seen = step_seen(memory.wall, reading.wall, memory.offset_seconds, self._settings)
        samples = _samples(memory, reading, agreement, stepped=seen is not None)
        verdict = verdict_of(reading, agreement, samples, self._limits, self._settings)
        step = seen or memory.step
        if step is not None:
            step = explained(step, reading, verdict)
        stepped, step = steps_finding(step, reading.wall, self._settings)
        clock = clock_finding(verdict, reading, self._bounds, self._settings, servers=self._server_count, box=self._box)
        method = method_for(
            verdict,
            reading,
            self._limits,
            self._settings,
            degraded_seconds=self._bounds.degraded,
            unexplained_step=step is not None and not step.explained,
        )
        if method is not None and not self._cooled_down(method, memory, now_seconds):
            method = None
        return Decision(
            findings=(
                clock,
                sources_finding(reading, agreement, self._settings, servers=self._server_count),
                stepped,
                drift_finding(verdict, self._settings),
                peers_finding(reading.skews, reading.skews_reason, self._bounds),
            ),
            actions=() if method is None else (_action(method, verdict, step),),
            memory=ClockMemory(
                wall=reading.wall,
                samples=samples,
                offset_seconds=verdict.offset_seconds,
                step=step,
                set_at_seconds=now_seconds if method is Method.MAKESTEP else memory.set_at_seconds,
                asked_at_seconds=now_seconds if method is Method.BURST else memory.asked_at_seconds,
            ),
        )

    def act(self, action: Action) -> str:
        """Have chronyd correct the clock.

        Raises:
            ActionFailed: it did not; the message says what a person does instead.
        """
        if action.repair is not Repair.CORRECT_CLOCK:
            raise ActionFailed(f"the clock guard does not know how to {action.repair.value}")
        try:
            method = Method(str(action.arguments.get("method")))
        except ValueError as error:
            raise ActionFailed(str(error)) from None
        return correct(self._roots, method, box=self._box, deadline_seconds=self._settings.query_seconds)

    def first_memory(self) -> ClockMemory:
        """Nothing."""
        return ClockMemory()

    def memory_to_json(self, memory: ClockMemory) -> Mapping[str, Any]:
        """The cool-downs of corrections: they change rarely, so that the store is not written every round."""
        return {"set_at_seconds": memory.set_at_seconds, "asked_at_seconds": memory.asked_at_seconds}

    def memory_from_json(self, data: Mapping[str, Any]) -> ClockMemory:
        """The reverse.

        Raises:
            ValueError, KeyError, TypeError: not what `memory_to_json` writes.
        """
        return ClockMemory(
            set_at_seconds=_time_or_none(data["set_at_seconds"]),
            asked_at_seconds=_time_or_none(data["asked_at_seconds"]),
        )

    def _cooled_down(self, method: Method, memory: ClockMemory, now_seconds: float) -> bool:
        last = memory.set_at_seconds if method is Method.MAKESTEP else memory.asked_at_seconds
        return last is None or now_seconds - last >= self._settings.correction_apart_seconds

    def _ask_servers(self, chrony: ChronyReading) -> SntpReading | None:
        tracking = chrony.tracking
        known = tracking is not None and tracking.synchronised and not tracking.free_running
        return None if known or not self._server_count else self._time_servers.ask()

    def _timesyncd_seconds_ago(self, unix_seconds: float) -> float | None:
        try:
            set_at = (self._roots.run / TIMESYNCD_FILE).stat().st_mtime
        except OSError:
            return None
        return max(0.0, unix_seconds - set_at)

    def _skews(self) -> tuple[Mapping[str, PeerSkew], str]:
        if self._peers is None:
            return {}, "no other box to compare with"
        try:
            return self._peers.skews(), "no heartbeat to compare with yet"
        except Exception as error:  # a second opinion; whatever ails it must not cost the first one
            return {}, f"heartbeats can't be compared: {type(error).__name__}: {str(error)[:100]}"


def _action(method: Method, verdict: Verdict, step: Step | None) -> Action:
    """Setting the clock is paid for; measuring anew is gentle."""
    offset = verdict.offset_seconds
    because = "its offset is not known" if offset is None else f"the clock is off by {offset * 1e3:+.3f} ms"
    if step is not None and not step.explained:
        because = f"somebody stepped the clock by {step.seconds:+.6f} s"
    arguments = {"method": method.value, "offset_milliseconds": None if offset is None else offset * 1e3}
    return Action(Repair.CORRECT_CLOCK, "clock", because, arguments, BUDGET if method is Method.MAKESTEP else "")


def _time_or_none(value: object) -> float | None:
    """What a cool-down was written as.

    Raises:
        ValueError: neither a time of the running clock nor None.
    """
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise ValueError(f"read {value!r}, expected seconds")
    return float(value)


def _samples(memory: ClockMemory, reading: ClockReading, agreement: Agreement, *, stepped: bool) -> tuple[Sample, ...]:
    """The measurements by SNTP, this round's included; what was measured before a step counts no more."""
    old = () if stepped else memory.samples
    best = agreement.best
    if best is None:
        return old
    new = Sample(best.server, reading.wall.boot_seconds, best.offset_seconds, best.uncertainty_seconds)
    return kept(old, new)
