"""From a pipeline's spec to plans and refusals: the parts that whole plans and merges share. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from fleet.planning.cost import MIB, BoxCost, CostTable, Load
from fleet.planning.plan import PipelinePlan, StagePlan
from fleet.planning.spec import PipelineSpec, Refusal
from fleet.planning.split import Range, covers, least_missing, split

NAMED_BOXES = 6
"""So many boxes are named in a reason, which is one line."""


def table_of(spec: PipelineSpec) -> CostTable:
    """Costs of the pipeline's model under the load that the pipeline promises."""
    return CostTable(spec.cost, Load(spec.max_sequences, spec.max_tokens_per_sequence))


def living_boxes(spec: PipelineSpec, boxes: Mapping[str, BoxCost], alive: Collection[str]) -> list[BoxCost]:
    """The pipeline's living boxes in ring order; boxes of other pipelines don't count."""
    return [boxes[name] for name in spec.boxes if name in alive]


def explicit_in_force(spec: PipelineSpec, alive: Collection[str]) -> bool:
    """Whether the inventory's own ranges hold: they are given, and every box that they name lives."""
    return spec.explicit is not None and all(name in alive for name in spec.explicit)


def same_model(spec: PipelineSpec, plan: PipelinePlan) -> bool:
    """Whether a plan was made for what the spec asks now: model, policy and load."""
    return (plan.model_digest, plan.policy, plan.max_sequences, plan.max_tokens_per_sequence, plan.layers) == (
        spec.model_digest,
        spec.policy,
        spec.max_sequences,
        spec.max_tokens_per_sequence,
        len(spec.cost.layers),
    )


def plan_of(spec: PipelineSpec, names: Sequence[str], ranges: Sequence[Range]) -> PipelinePlan:
    """The plan of contiguous and complete ranges, one a box in ring order; boxes with empty ranges are left out."""
    layers = len(spec.cost.layers)
    stages = tuple(
        StagePlan(
            box=name,
            start=start,
            end=end,
            embedding=start == 0,
            head=start == 0 if spec.cost.tied else end == layers,
        )
        for name, (start, end) in zip(names, ranges, strict=True)
        if start < end
    )
    return PipelinePlan(
        model=spec.model,
        model_digest=spec.model_digest,
        layers=layers,
        policy=spec.policy,
        max_sequences=spec.max_sequences,
        max_tokens_per_sequence=spec.max_tokens_per_sequence,
        stages=stages,
    )


def whole_plan(spec: PipelineSpec, boxes: Mapping[str, BoxCost], alive: Collection[str]) -> PipelinePlan | Refusal:
    """The best plan over the living boxes, whatever is served now.

    The inventory's ranges where it gives them and all their boxes live; else the split with the fastest slowest stage.

    Args:
        spec: of the pipeline.
        boxes: name → cost, at least for every box of the pipeline.
        alive: boxes that may hold layers.
    """
    table, living = table_of(spec), living_boxes(spec, boxes, alive)
    if spec.explicit is not None and explicit_in_force(spec, alive):
        names = [name for name in spec.boxes if name in spec.explicit]
        ranges = [spec.explicit[name] for name in names]
        if any(boxes[name].missing_bytes(table.needed_bytes(*span)) for name, span in zip(names, ranges, strict=True)):
            refusal = refusal_of(spec, table, [boxes[name] for name in names], ranges)
            return Refusal(refusal.missing_bytes, f"{refusal.reason}, under the inventory's own layer ranges")
        return plan_of(spec, names, ranges)
    if not fits(table, living):
        return refuse(spec, table, living)
    return plan_of(spec, [box.name for box in living], split(table, living))


def fits(table: CostTable, boxes: Sequence[BoxCost]) -> bool:
    """Whether any contiguous split over these boxes, in ring order, fits in memory."""
    return covers(table.layers, [table.on(box) for box in boxes], [None] * len(boxes))


def refuse(spec: PipelineSpec, table: CostTable, living: Sequence[BoxCost]) -> Refusal:
    """The refusal of boxes that no split fits: what the split lacks that lacks least over all boxes."""
    if not living:
        return Refusal({}, f"pipeline {spec.name}: none of its {len(spec.boxes)} boxes is there")
    return refusal_of(spec, table, living, least_missing(table, living))


def refusal_of(spec: PipelineSpec, table: CostTable, living: Sequence[BoxCost], ranges: Sequence[Range]) -> Refusal:
    """The refusal of given ranges, one a box, that do not fit."""
    missing = {
        box.name: lacking
        for box, span in zip(living, ranges, strict=True)
        if (lacking := box.missing_bytes(table.needed_bytes(*span)))
    }
    parts = [f"{name} lacks {mebibytes(size)} MiB" for name, size in missing.items()]
    if len(parts) > NAMED_BOXES:
        parts[NAMED_BOXES:] = [f"{len(parts) - NAMED_BOXES} more lack memory too"]
    lacking_boxes = ", ".join(parts)
    return Refusal(
        missing, f"pipeline {spec.name} does not fit on {len(living)} of {len(spec.boxes)} boxes: {lacking_boxes}"
    )


def mebibytes(size_bytes: int) -> int:
    """Whole MiB, rounded up: so much added is enough."""
    return -(-size_bytes // MIB)
