"""The state of a box as people see it, and since when."""

from __future__ import annotations

from collections.abc import Iterable

from fleet.coordinator.context import Context
from fleet.coordinator.state import BoxState, members
from fleet.coordinator.switching import Switching


def note_states(boxes: Iterable[BoxState], switching: Switching, context: Context) -> None:
    """Remember when each box's state began; called whenever something may have changed, asked for or not."""
    serving, draining = _holders(switching)
    for box in boxes:
        state, _ = _state(box, context, serves=box.name in serving, drains=box.name in draining)
        if state != box.shown:
            box.shown, box.since = state, context.clock.now()


def box_state(box: BoxState, switching: Switching | None, context: Context) -> tuple[str, str]:
    """The state of a box as people see it, and why."""
    serving, draining = _holders(switching) if switching is not None else (frozenset[str](), frozenset[str]())
    return _state(box, context, serves=box.name in serving, drains=box.name in draining)


def _holders(switching: Switching) -> tuple[frozenset[str], frozenset[str]]:
    """Boxes of the plan that serves, and of the one before it while that drains."""
    draining = switching.draining
    return frozenset(members(switching.plan)), frozenset(members(draining.record.plan) if draining else ())


def _state(box: BoxState, context: Context, *, serves: bool, drains: bool) -> tuple[str, str]:
    now = context.clock.now()
    if box.peer is None and not box.record.incarnation:
        return "never-seen", "it has never registered"
    if box.doomed:
        return box.doomed, box.condemned
    note = box.verdict.reason if box.verdict.kind != "alive" else f"it stops: {box.leaving}" if box.leaving else ""
    if box.record.drained:
        return ("draining" if serves or drains else "drained"), note or "asked by the operator"
    if serves:
        return ("unheard" if box.verdict.kind == "waiting" else "serving"), note
    if box.peer is None:
        return "dead", note
    if left := box.hold_down.remaining(now):
        return "held-down", box.unfit or f"it died lately; may be taken back in {left:.0f} s"
    settle = context.config.timing.settle_seconds
    if box.well_since is None or now - box.well_since < settle:
        return "returning", note or f"well for less than {settle:g} s"
    return "standby", note
