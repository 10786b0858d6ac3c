"""The state of a box as people see it, and since when."""

from __future__ import annotations

from fleet.coordinator.context import Context
from fleet.coordinator.state import BoxState, members
from fleet.coordinator.switching import Switching


def note_state(box: BoxState, switching: Switching, context: Context) -> None:
    """Remember when a box's state began; called whenever something may have changed, asked for or not."""
    state, _ = box_state(box, switching, context)
    if state != box.shown:
        box.shown, box.since = state, context.clock.now()


def box_state(box: BoxState, switching: Switching | None, context: Context) -> tuple[str, str]:
    """The state of a box as people see it, and why."""
    now = context.clock.now()
    if box.peer is None and not box.record.incarnation:
        return "never-seen", "it has never registered"
    if box.doomed:
        return box.doomed, box.condemned
    serves = switching is not None and box.name in members(switching.plan)
    held = serves or (
        switching is not None and switching.draining is not None and box.name in members(switching.draining.record.plan)
    )
    note = box.verdict.reason if box.verdict.kind != "alive" else f"it stops: {box.leaving}" if box.leaving else ""
    if box.record.drained:
        return ("draining" if held else "drained"), note or "asked by the operator"
    if serves:
        return "serving", note
    if box.peer is None:
        return "dead", note
    if left := box.hold_down.remaining(now):
        return "held-down", box.unfit or f"it died lately; may be taken back in {left:.0f} s"
    settle = context.config.timing.settle_seconds
    if box.well_since is None or now - box.well_since < settle:
        return "returning", note or f"well for less than {settle:g} s"
    return "standby", note
