"""A pipeline as decisions see it, read from what is remembered of its boxes and switches."""

from __future__ import annotations

from fleet.coordinator.context import Context
from fleet.coordinator.decide import BoxView, Situation, SwitchView
from fleet.coordinator.state import BoxState, members
from fleet.coordinator.switching import Switching
from fleet.planning.spec import PipelineSpec


def situation_of(
    spec: PipelineSpec, switching: Switching, context: Context, first_seen_at: float | None, now: float
) -> Situation:
    """The situation at a moment of the awake clock.

    Args:
        first_seen_at: when the first box was seen by this coordinator, or since no box was; None: none is.
    """
    views = {name: _view(context.boxes[name], context, now) for name in spec.boxes}
    switch, settle_seconds = switching.switch, context.config.timing.settle_seconds
    early = first_seen_at is None or now - first_seen_at < settle_seconds
    working = any(views[name].well and not views[name].condemned for name in members(switching.plan))
    return Situation(
        views,
        switching.plan,
        SwitchView(switch.record.plan, switch.record.planned, switch.failed) if switch else None,
        patient=early and not working,
        fenced=switching.fenced,
        retiring=switching.draining is not None,
        improvable=now >= switching.improve_after,
        calm=now >= switching.calm_after,
    )


def _view(box: BoxState, context: Context, now: float) -> BoxView:
    timing = context.config.timing
    well = box.verdict.kind == "alive" and box.peer is not None
    held_down = box.hold_down.remaining(now)
    away = 0.0 if well else now - box.condemned_at
    back_soon = box.out or bool(box.leaving)  # who is told to stop usually restarts
    return BoxView(
        well=well,
        condemned=bool(box.condemned),
        awaited=box.channel != "open" and now - box.channel_since < timing.redial_seconds,
        settled=box.well_since is not None and now - box.well_since >= timing.settle_seconds,
        held_down=held_down > 0,
        expected=back_soon and not box.record.drained and max(away, held_down) <= timing.prepare_seconds,
        drained=box.record.drained,
        leaving=bool(box.leaving),
        unfit=bool(box.unfit) and held_down > 0,
    )
