"""A drill for the guards of a box: they must trip, and be well again, while answers run that must not suffer."""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fleet.drill.breaking import Breaker, Strain
from fleet.drill.judge import StreamSpec, StreamVerdict, noticed, verdict
from fleet.drill.streams import Users
from fleet.errors import ExitCode, FleetError
from fleet.observe.guards import ask_guards
from fleet.observe.site_access import Endpoint
from fleet.observe.site_view import mapping

POLL_SECONDS = 1.0
BACK_SECONDS = 1200.0  # the limits of a stage come back step by step, each after its dwell
WORSE = ("degraded", "unhealthy")
GUARD_OF: dict[Strain, str] = {"heat": "thermal", "disk-full": "surroundings", "clock": "clock"}
PART_OF: dict[Strain, str] = {"heat": "limit", "disk-full": "disk", "clock": ""}
"""The part that must trip begins so: of heat not the temperature, but what is done about it."""


@dataclass(frozen=True)
class GuardReport:
    """What a drill found.

    Attributes:
        done: what was done to the box. streams: of the last round; noticed: users noticed more than a pause in any.
        tripped_after_seconds, back_after_seconds: since it was done, and since it was taken off; None: not in time.
        tripped: what the guard said, part by part.
    """

    done: str
    streams: tuple[StreamVerdict, ...]
    noticed: bool
    tripped_after_seconds: float | None
    back_after_seconds: float | None
    tripped: Mapping[str, str]

    @property
    def exit_code(self) -> ExitCode:
        """0: the guard tripped and is well again, and nobody noticed more than a pause."""
        well = None not in (self.tripped_after_seconds, self.back_after_seconds) and not self.noticed
        return ExitCode.OK if well else ExitCode.FAILED


@dataclass(frozen=True)
class Unwell:
    """A part that is not well: how bad (place in `WORSE`), and why."""

    severity: int
    reason: str


def unwell_parts(document: Mapping[str, Any], guard: str) -> dict[str, Unwell]:
    """Parts of a guard that are not well, by the document of `/v1/guards`."""
    findings = mapping(mapping(document.get("guards")).get(guard)).get("findings")
    found = [mapping(one) for one in (findings if isinstance(findings, list) else [])]
    return {
        str(one.get("part")): Unwell(WORSE.index(one["state"]), str(one.get("reason")))
        for one in found
        if one.get("state") in WORSE
    }


def worse_than(before: Mapping[str, Unwell], now: Mapping[str, Unwell]) -> dict[str, str]:
    """Parts that are worse than they were → the reason."""
    return {part: one.reason for part, one in now.items() if part not in before or one.severity > before[part].severity}


@dataclass(frozen=True)
class GuardDrill:
    """What it needs.

    Attributes:
        longest_seconds: the guard must have tripped by then; the box takes the strain off itself soon after.
    """

    kind: Strain
    box: str
    policy: str
    specs: Sequence[StreamSpec]
    longest_seconds: float
    guards: Endpoint
    context: ssl.SSLContext
    report: Callable[[str], None]

    async def run(self, users: Users, arm: Callable[[], Breaker]) -> GuardReport:
        """Rehearse.

        Raises:
            FleetError: no answer of the guards before the drill, the undisturbed round failed, or the box refuses.
        """
        before = await self._unwell()
        if before is None:
            raise FleetError(f"the guards of {self.box} do not answer", hint="fleet guard status")
        self.report(f"reference: {len(self.specs)} answers without a disturbance")
        reference = await users.round(self.specs)
        if not all(run.completed for run in reference):
            raise FleetError("the undisturbed answers failed already", hint="fleet status")
        breaker = await asyncio.to_thread(arm)
        ended = asyncio.Event()
        verdicts: list[tuple[StreamVerdict, ...]] = []

        async def serve() -> None:
            while not ended.is_set() or not verdicts:
                runs = await users.round(self.specs)
                pairs = zip(self.specs, reference, runs, strict=True)
                verdicts.append(tuple(verdict(spec, old, new) for spec, old, new in pairs))

        serving = asyncio.create_task(serve())
        try:
            with breaker:
                done = await asyncio.to_thread(breaker.strike)
                self.report(done)
                prefix = PART_OF[self.kind]
                tripped_at, tripped = await self._until(
                    lambda new: any(part.startswith(prefix) for part in new), before, self.longest_seconds
                )
                self.report(f"the guard says: {'; '.join(tripped.values()) or 'nothing'}")
                await asyncio.to_thread(breaker.heal)
            back_at, _ = await self._until(lambda new: not new, before, BACK_SECONDS)
            ended.set()
            await serving
        finally:
            serving.cancel()
            await asyncio.gather(serving, return_exceptions=True)
        any_noticed = any(noticed(one, self.policy) for one in verdicts)
        return GuardReport(done, verdicts[-1], any_noticed, tripped_at, back_at, tripped)

    async def _unwell(self) -> dict[str, Unwell] | None:
        """None without an answer."""
        (found,) = await ask_guards({self.box: self.guards}, self.context)
        return unwell_parts(mapping(found.answer.document), GUARD_OF[self.kind]) if found.guards else None

    async def _until(
        self, wanted: Callable[[Mapping[str, str]], bool], before: Mapping[str, Unwell], seconds: float
    ) -> tuple[float | None, dict[str, str]]:
        """Poll. Returns how long it took (None: it never was) and the parts that are worse than before the drill."""
        started, new = time.monotonic(), {}
        while time.monotonic() - started < seconds:
            unwell = await self._unwell()
            if unwell is not None:
                new = worse_than(before, unwell)
                if wanted(new):
                    return time.monotonic() - started, new
            await asyncio.sleep(POLL_SECONDS)
        return None, new
