"""The planned target: when a whole new plan is worth the move. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from fleet.planning.cost import BoxCost, CostTable
from fleet.planning.plan import PipelinePlan
from fleet.planning.spec import PipelineSpec, Refusal
from fleet.planning.whole import explicit_in_force, living_boxes, same_model, table_of, whole_plan

WORTH_PERCENT = 10
"""A stage counts as relieved when it is so much faster than the slowest is now. Measured seconds that are 5 % off
either way move a comparison of two boxes by 1.05 / 0.95, which is less: noise alone moves no layer."""


def resplit(
    spec: PipelineSpec, plan: PipelinePlan, boxes: Mapping[str, BoxCost], alive: Collection[str]
) -> PipelinePlan | None:
    """The whole plan over the living boxes if it is worth a planned switch, else None.

    It is worth it when a box of the plan must be left, when a stage does not fit its box (any more), when the spec asks
    for another model or load, when the inventory's own ranges can hold again, or when layers can be taken off every
    slowest stage (see `_relieves`): a box that came back, or one that turned out to be much faster.

    Args:
        spec: of the pipeline.
        plan: that serves now.
        boxes: name → cost, at least for every box of the pipeline.
        alive: boxes that may hold layers; a drained box is not among them.

    Returns:
        None too when no whole plan fits, or when it is the plan that serves.
    """
    target = whole_plan(spec, boxes, alive)
    if isinstance(target, Refusal) or (same_model(spec, plan) and target.stages == plan.stages):
        return None
    table = table_of(spec)
    if (
        not same_model(spec, plan)
        or explicit_in_force(spec, alive)
        or any(stage.box not in alive or stage.box not in spec.boxes for stage in plan.stages)
        or any(table.stage(boxes[stage.box], stage.start, stage.end).missing_bytes for stage in plan.stages)
        or _relieves(spec, table, plan, boxes, alive)
    ):
        return target
    return None


def _relieves(
    spec: PipelineSpec, table: CostTable, plan: PipelinePlan, boxes: Mapping[str, BoxCost], alive: Collection[str]
) -> bool:
    """Whether some split makes every slowest stage faster without making another one about as slow.

    Every stage of that split must take `WORTH_PERCENT` less than the slowest stage does now, or less than the same box
    takes now with the head where it is (one box compared with itself, so its measured seconds may be off as they like).
    A plan that was the best for slightly other seconds has no such split. A returned box that takes one layer off the
    slowest stage does, however slow it is itself, as long as it stays below that stage.
    """
    slowest = max(table.on(boxes[stage.box]).picoseconds(stage.start, stage.end) for stage in plan.stages)
    clearly = slowest * (100 - WORTH_PERCENT) // 100
    layers, end = table.layers, 0
    for box in living_boxes(spec, boxes, alive):
        on_box, start = table.on(box), end
        end = on_box.reach(start, clearly)
        stage = plan.stage_of(box.name)
        if stage is not None:
            further = on_box.reach(start, on_box.picoseconds(stage.start, stage.end) - 1)
            if not spec.cost.tied and not stage.head:
                further = min(further, layers - 1)
            if start < further and table.has_head(start, further) == stage.head:
                end = max(end, further)
        if end == layers:
            return True
    return False
