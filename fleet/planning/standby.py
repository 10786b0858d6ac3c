"""What a site can lose, and what each box keeps ready for it. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from fleet.planning.cost import BoxCost, CostTable
from fleet.planning.merge import merged
from fleet.planning.plan import PipelinePlan, StagePlan
from fleet.planning.spec import Holding, PipelineSpec
from fleet.planning.split import Range
from fleet.planning.whole import fits, living_boxes, same_model, table_of


def standby(
    spec: PipelineSpec, plan: PipelinePlan, boxes: Mapping[str, BoxCost], alive: Collection[str]
) -> dict[str, Holding]:
    """What each living box would take over at any single loss, as far as its memory holds it beside its own stage.

    Args:
        spec: of the pipeline.
        plan: that serves now.
        boxes: name → cost, at least for every box of the pipeline.
        alive: boxes that may hold layers.

    Returns:
        Every living box of the pipeline → what it keeps ready, nothing where it would take over nothing. The head and
        the nearest layers come first when not all fit; what is left out is loaded when it is needed. The embedding
        takes no memory.
    """
    living = living_boxes(spec, boxes, alive)
    wanted = {box.name: Holding() for box in living}
    table = table_of(spec)
    losses = [stage.box for stage in plan.stages if stage.box in alive] if same_model(spec, plan) else []
    for lost in losses:
        after = merged(spec, table, plan, boxes, [box.name for box in living if box.name != lost])
        for stage in after.stages if after is not None else ():
            wanted[stage.box] = _united(wanted[stage.box], stage, plan.stage_of(stage.box))
    return {box.name: _as_memory_allows(table, box, _span(plan.stage_of(box.name)), wanted[box.name]) for box in living}


def unsurvivable(
    spec: PipelineSpec, plan: PipelinePlan, boxes: Mapping[str, BoxCost], alive: Collection[str]
) -> tuple[str, ...]:
    """The boxes of a plan whose single loss no plan survives, in ring order."""
    table, living = table_of(spec), living_boxes(spec, boxes, alive)
    return tuple(
        stage.box
        for stage in plan.stages
        if stage.box in alive and not fits(table, [box for box in living if box.name != stage.box])
    )


def transition_missing(
    spec: PipelineSpec, old: PipelinePlan, new: PipelinePlan, boxes: Mapping[str, BoxCost]
) -> dict[str, int]:
    """Bytes that each box lacks while two plans of one model live at once; boxes that lack nothing are left out.

    Weights of both ranges count once. Caches of both count in full: what is open under the old plan and what is
    admitted under the new one may each be the whole load.
    """
    table, missing = table_of(spec), {}
    for stage in new.stages:
        box, before = boxes[stage.box], old.stage_of(stage.box)
        if before is None:
            lacking = box.missing_bytes(table.needed_bytes(stage.start, stage.end))
        else:
            added = set(range(stage.start, stage.end)) - set(range(before.start, before.end))
            weights = sum(spec.cost.layers[layer].held for layer in added)
            weights += spec.cost.head.held if stage.head and not before.head else 0
            caches = (stage.end - stage.start) * table.kv_bytes_per_layer
            lacking = box.missing_bytes(table.needed_bytes(before.start, before.end, weights + caches))
        if lacking:
            missing[stage.box] = lacking
    return missing


def _span(stage: StagePlan | None) -> Range:
    return (0, 0) if stage is None else (stage.start, stage.end)


def _united(wanted: Holding, after: StagePlan, before: StagePlan | None) -> Holding:
    """What a box wants ready, with what one takeover adds to what it serves."""
    gained = set(range(after.start, after.end)) - set(range(*_span(before)))
    return Holding(
        layers=tuple(sorted(gained.union(wanted.layers))),
        head=wanted.head or (after.head and not (before is not None and before.head)),
        embedding=wanted.embedding or (after.embedding and not (before is not None and before.embedding)),
    )


def _as_memory_allows(table: CostTable, box: BoxCost, own: Range, wanted: Holding) -> Holding:
    """The most useful pieces that fit beside a box's own stage: the head, which takes longest to load, then nearest."""
    start, end = own

    def distance(layer: int) -> int:
        return max(start - layer, layer - end + 1) if start < end else 0

    pieces = [(1, distance(layer), layer, table.model.layers[layer].held) for layer in wanted.layers]
    if wanted.head:
        pieces.append((0, 0, 0, table.model.head.held))
    layers: list[int] = []
    head, size = False, 0
    for is_layer, _, layer, held in sorted(pieces):
        if box.missing_bytes(table.needed_bytes(start, end, size + held)):
            continue  # a smaller piece may still fit
        size += held
        if is_layer:
            layers.append(layer)
        else:
            head = True
    return Holding(tuple(sorted(layers)), head, wanted.embedding)
