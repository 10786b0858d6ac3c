"""Taking a box out of its pipeline and back: what the coordinator's documents say about it, and the wait for it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from fleet.errors import ExitCode, FleetError
from fleet.observe.coordinator import Coordinator, RefusedOrder
from fleet.observe.health import Answer
from fleet.observe.site_view import coordinator_view, integer, mapping, text

POLL_SECONDS = 0.5
QUIET_SECONDS = 5.0
"""After so long without news a line says what is being waited for."""
OUT_STATES = ("dead", "hung", "never-seen")
"""A box in one of these can't come back by an order."""
Order = Literal["drain", "undrain"]


@dataclass(frozen=True)
class Span:
    """Decoder layers [start, end) of a box; equal for none."""

    box: str
    start: int
    end: int

    def __str__(self) -> str:
        return f"{self.box} ({self.start}-{self.end - 1})"


@dataclass(frozen=True)
class Outcome:
    """What an order led to.

    Attributes:
        box: that was drained or undrained. state: of it now. reason: why, in the coordinator's words.
        changed: False if it was so already. finished: False with --no-wait.
        seconds: from the order to its end. spans: who took the box's layers; after an undrain, its own.
    """

    box: str
    state: str
    reason: str
    changed: bool
    finished: bool
    seconds: float
    spans: tuple[Span, ...]


def spans_of(document: Mapping[str, Any], box: str) -> tuple[Span, ...]:
    """Stages of the pipeline that a box belongs to, as `/v1/site` names them; empty if it belongs to none."""
    pipeline = text(mapping(mapping(document.get("boxes")).get(box)).get("pipeline")) or ""
    entry = mapping(mapping(document.get("pipelines")).get(pipeline))
    found = []
    stages = entry.get("stages")
    for stage in stages if isinstance(stages, list) else []:
        name, layers = text(mapping(stage).get("box")), mapping(stage).get("layers")
        if name and isinstance(layers, list) and len(layers) == 2 and all(type(layer) is int for layer in layers):
            found.append(Span(name, *layers))
    return tuple(found)


def span_of(document: Mapping[str, Any], box: str) -> Span | None:
    """What a box serves; None if nothing."""
    return next((span for span in spans_of(document, box) if span.box == box and span.start < span.end), None)


def taken_by(before: Span | None, after: Mapping[str, Any]) -> tuple[Span, ...]:
    """Who serves the layers now that a box served before."""
    if before is None:
        return ()
    overlaps = (
        Span(span.box, max(span.start, before.start), min(span.end, before.end))
        for span in spans_of(after, before.box)
        if span.box != before.box
    )
    return tuple(span for span in overlaps if span.start < span.end)


def switching_to(document: Mapping[str, Any], pipeline: str) -> int | None:
    """The epoch that a pipeline switches to now; None if to none."""
    entry = mapping(mapping(document.get("pipelines")).get(pipeline))
    return integer(mapping(entry.get("switching")).get("epoch"))


def waits_for(document: Mapping[str, Any], box: str, order: Order) -> str | None:
    """What is still missing for an order to be carried out; None once it is.

    Raises:
        FleetError: an undrained box can't come back by itself.
    """
    entry = mapping(mapping(document.get("boxes")).get(box))
    state, reason = text(entry.get("state")) or "unknown", text(entry.get("reason")) or ""
    said = f"{box} is {state}" + (f" ({reason})" if reason else "")
    if order == "undrain" and state in OUT_STATES:
        raise FleetError(f"{said}: it takes part again once it is back", hint=f"look at the box {box}: is it on?")
    epoch = switching_to(document, text(entry.get("pipeline")) or "")
    if epoch is not None:
        return f"{said}; switching to epoch {epoch}"
    if order == "undrain":
        return None if state in ("serving", "standby") else said
    return said if state == "draining" or span_of(document, box) is not None else None


async def carry_out(
    coordinator: Coordinator, box: str, order: Order, *, wait: bool, seconds: float, report: Callable[[str], None]
) -> Outcome:
    """Give an order and (with `wait`) see it through.

    Args:
        seconds: longest wait; the coordinator goes on after it.
        report: takes a line whenever something new is waited for, or QUIET_SECONDS passed.

    Raises:
        FleetError: refused, unknown box, not reachable, or not done within `seconds`.
    """
    before = await coordinator.site()
    was = _state(before, box)
    changed = was in ("drained", "draining") if order == "undrain" else was not in ("drained", "draining")
    start = time.monotonic()
    try:
        answer = await coordinator.order(box, order)
    except RefusedOrder as error:
        raise _with_a_way_out(error, before, box) from None
    after: Mapping[str, Any] = before
    if wait:
        after = await _wait(coordinator, box, order, seconds, report)
    took = time.monotonic() - start
    state = _state(after, box) if wait else text(answer.get("state")) or was
    entry = mapping(mapping(after.get("boxes")).get(box)) if wait else answer
    own = span_of(after, box)
    spans = taken_by(span_of(before, box), after) if order == "drain" else ((own,) if own else ())
    return Outcome(box, state, text(entry.get("reason")) or "", changed, wait, took, spans if wait else ())


def _with_a_way_out(error: RefusedOrder, before: Mapping[str, Any], box: str) -> RefusedOrder:
    """The refusal of a drain; where other boxes are drained, the way out is to give one of them back."""
    rows = coordinator_view(Answer(dict(before))).members
    own = next((row.pipeline for row in rows if row.box == box), None)
    out = [row.box for row in rows if row.pipeline == own and row.state in ("drained", "draining")]
    if not out:
        return error
    message = f"{error.message}\n  drained already: {', '.join(out)}"
    return RefusedOrder(message, error.missing_mebibytes, f"fleet undrain {out[0]}, and then try again")


async def _wait(
    coordinator: Coordinator, box: str, order: Order, seconds: float, report: Callable[[str], None]
) -> Mapping[str, Any]:
    start = time.monotonic()
    said, said_at = "", start
    while True:
        waiting: str | None
        try:
            document = await coordinator.site()
            waiting = waits_for(document, box, order)
        except FleetError as error:
            if error.exit_code is not ExitCode.UNREACHABLE:
                raise
            waiting = error.message  # it may restart meanwhile; what it was told is in its log
        if waiting is None:
            return document
        now = time.monotonic()
        if now - start >= seconds:
            raise FleetError(f"not done after {seconds:.0f} s: {waiting}; it goes on by itself", hint=coordinator.hint)
        if waiting != said or now - said_at >= QUIET_SECONDS:
            said, said_at = waiting, now
            report(f"{now - start:.0f} of at most {seconds:.0f} s: {waiting}")
        await asyncio.sleep(POLL_SECONDS)


def outcome_line(outcome: Outcome, order: Order) -> str:
    """The outcome in words."""
    box, spans = outcome.box, ", ".join(str(span) for span in outcome.spans)
    if not outcome.finished:
        return f"{box} is {outcome.state}; the order stands, `fleet status` shows when it is carried out"
    if order == "undrain":
        does = f"serves layers {outcome.spans[0].start}-{outcome.spans[0].end - 1}" if spans else "stands by"
        if not outcome.changed:
            return f"{box} was not drained; it {does}"
        return f"{box} takes part again and {does}, after {outcome.seconds:.1f} s"
    if not outcome.changed:
        return f"{box} was drained already"
    what = f"its layers went to {spans}" if spans else "it served no layers"
    return f"{box} is drained: {what}, in {outcome.seconds:.1f} s; power it off, or give it back: fleet undrain {box}"


def _state(document: Mapping[str, Any], box: str) -> str:
    rows = coordinator_view(Answer(dict(document))).members
    return next((row.state for row in rows if row.box == box), "unknown")
