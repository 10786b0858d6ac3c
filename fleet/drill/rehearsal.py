"""A drill from beginning to end: reference round, break in mid-answer, verdict, and the wait for a whole site."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fleet.drill.breaking import Breaker
from fleet.drill.checks import standing_by, still_missing, switches
from fleet.drill.judge import StreamRun, StreamSpec, StreamVerdict, noticed, verdict
from fleet.drill.streams import Users
from fleet.errors import ExitCode, FleetError
from fleet.observe.coordinator import Coordinator, Event

POLL_SECONDS = 0.5
QUIET_SECONDS = 5.0
"""After so long without news a line says what is being waited for."""
STRIKE_TOKENS = 12
"""The box breaks once every stream has so many tokens: in mid-answer."""
LEAST_SECONDS = 3.0
"""A site counts as whole again after this at the earliest: a death takes a moment to be noticed."""
STANDBY_SECONDS = 20.0
"""A box that stands by for so long, with no switch under way, is not needed by the plan that is best now."""


@dataclass(frozen=True)
class Report:
    """What a drill found.

    Attributes:
        done: what was done to the box. streams: the verdicts. noticed: users noticed more than a pause.
        switches: plans that served since, the first is the answer to the break.
        whole_after_seconds: from the break until the box took part in a whole plan again; None: not in time.
        missing: what was still missing then, empty if nothing. events: of the coordinator, all since the break.
    """

    done: str
    streams: tuple[StreamVerdict, ...]
    noticed: bool
    switches: tuple[Event, ...]
    whole_after_seconds: float | None
    missing: str
    events: tuple[Event, ...]

    @property
    def exit_code(self) -> ExitCode:
        """0: nobody noticed more than a pause, and the site is whole again."""
        return ExitCode.FAILED if self.noticed or self.missing else ExitCode.OK


@dataclass(frozen=True)
class Rehearsal:
    """What a drill needs.

    Attributes:
        box, pipeline, policy: that are rehearsed. specs: the streams.
        lasts_seconds: how long the box stays broken; 0 if that ends by itself.
        longest_seconds: the wait for a whole site ends then. status: the command that shows more.
        report: takes a line of progress. on_text: takes the text of the first disturbed answer as it comes.
    """

    box: str
    pipeline: str
    policy: str
    specs: Sequence[StreamSpec]
    lasts_seconds: float
    longest_seconds: float
    status: str
    report: Callable[[str], None]
    on_text: Callable[[str], None]

    async def run(self, users: Users, coordinator: Coordinator, arm: Callable[[], Breaker]) -> Report:
        """Rehearse.

        Args:
            arm: connects to the box, in a thread; the box breaks when the breaker strikes.

        Raises:
            FleetError: the undisturbed round failed, or the box can't be broken; nothing was broken then.
        """
        self.report(f"reference: {len(self.specs)} answers without a disturbance")
        reference = await users.round(self.specs)
        self._judge_reference(reference)
        last = max((event.id for event in await coordinator.last_events(1)), default=0)
        breaker = await asyncio.to_thread(arm)
        try:
            return await self._disturb(users, coordinator, breaker, reference, last)
        except asyncio.CancelledError:  # Ctrl-C
            within = f" within {self.lasts_seconds:g} s" if self.lasts_seconds else ""
            self.report(f"{self.box} may still be broken; it heals itself{within}")
            raise

    async def _disturb(
        self, users: Users, coordinator: Coordinator, breaker: Breaker, reference: Sequence[StreamRun], last: int
    ) -> Report:
        """Break the box in mid-answer and see it back.

        Args:
            last: id of the last event before.
        """
        struck: list[tuple[float, str]] = []

        async def strike() -> None:
            at = time.monotonic()
            struck.append((at, await asyncio.to_thread(breaker.strike)))
            self.report(f"in mid-answer: {struck[0][1]}")

        with breaker:
            self.report(f"the same {len(self.specs)} answers again, and {self.box} breaks in the middle of them")
            disturbed = await users.round(self.specs, when_at=STRIKE_TOKENS, then=strike, on_text=self.on_text)
            at, done = struck[0]
            pairs = zip(self.specs, reference, disturbed, strict=True)
            verdicts = tuple(verdict(spec, before, after) for spec, before, after in pairs)
            missing = await self._until_whole(coordinator, at)
            took = time.monotonic() - at
        events = await coordinator.last_events(10_000, after=last)
        return Report(
            done=done,
            streams=verdicts,
            noticed=noticed(verdicts, self.policy),
            switches=switches(events, self.pipeline),
            whole_after_seconds=None if missing else took,
            missing=missing,
            events=tuple(events),
        )

    def _judge_reference(self, runs: Sequence[StreamRun]) -> None:
        for spec, run in zip(self.specs, runs, strict=True):
            if not run.completed:
                why = run.error or "it has no end"
                raise FleetError(f"{spec.name}: the undisturbed answer failed already: {why}", hint=self.status)

    async def _until_whole(self, coordinator: Coordinator, broken_at: float) -> str:
        """Wait for the box and its plan; what is missing when the time is up, empty if nothing."""
        said, said_at = "", time.monotonic()
        stands_by_since: float | None = None
        while True:
            missing, spare = await self._missing(coordinator)
            now = time.monotonic()
            stands_by_since = (stands_by_since or now) if spare else None
            unneeded = stands_by_since is not None and now - stands_by_since >= STANDBY_SECONDS
            since = now - broken_at
            if (missing is None or unneeded) and since >= max(self.lasts_seconds, LEAST_SECONDS):
                return ""
            waiting = missing or f"{self.box} is broken for {self.lasts_seconds:g} s"
            if since >= self.longest_seconds:
                return waiting
            if waiting != said or now - said_at >= QUIET_SECONDS:
                said, said_at = waiting, now
                self.report(f"{since:.0f} s after the break: {waiting}")
            await asyncio.sleep(POLL_SECONDS)

    async def _missing(self, coordinator: Coordinator) -> tuple[str | None, bool]:
        """What is missing, and whether it is only that the box stands by."""
        try:
            document: Mapping[str, Any] = await coordinator.site()
        except FleetError as error:
            if error.exit_code is not ExitCode.UNREACHABLE:
                raise
            return error.message, False
        missing = still_missing(document, self.box)
        return missing, missing == standing_by(self.box)
