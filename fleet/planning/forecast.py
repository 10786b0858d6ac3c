"""What the planner expects of a plan: times, tokens per second and memory of each stage. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fleet.planning.cost import ROW_FRACTION, BoxCost, StageCost
from fleet.planning.plan import PipelinePlan
from fleet.planning.spec import PipelineSpec
from fleet.planning.split import Range, measure
from fleet.planning.whole import table_of


@dataclass(frozen=True)
class StageForecast:
    """What the planner expects of one box: its range, its cost, and the memory it may use (None: not known)."""

    box: str
    span: Range
    cost: StageCost
    usable_bytes: int | None


@dataclass(frozen=True)
class PipelineForecast:
    """What the planner expects of a pipeline, from nominal figures until measured ones replace them.

    Attributes:
        stages: one a box, spares too, in ring order.
        tokens_per_second_single: of one request alone. tokens_per_second_full: of all `max_sequences` together.
        bottleneck: the box whose stage takes longest.
    """

    stages: tuple[StageForecast, ...]
    tokens_per_second_single: float
    tokens_per_second_full: float
    bottleneck: str


def forecast_ranges(spec: PipelineSpec, boxes: Sequence[BoxCost], ranges: Sequence[Range]) -> PipelineForecast:
    """Predict what contiguous ranges do, one a box in ring order, whether they fit or not.

    With m = min(stages, sequences) micro-batches in flight, each of sequences / m rows, the ring completes one
    micro-batch every max(slowest stage, sum of stages / m).
    """
    table = table_of(spec)
    costs = [table.stage(box, *span) for box, span in zip(boxes, ranges, strict=True)]
    _, slowest, total = measure(table, boxes, ranges)
    in_flight = min(sum(1 for start, end in ranges if start < end), spec.max_sequences)
    rows = spec.max_sequences / in_flight
    return PipelineForecast(
        stages=tuple(
            StageForecast(box.name, span, cost, None if box.memory_bytes is None else int(box.usable_bytes))
            for box, span, cost in zip(boxes, ranges, costs, strict=True)
        ),
        tokens_per_second_single=1 / total,
        tokens_per_second_full=rows / (max(slowest, total / in_flight) * (1 + ROW_FRACTION * (rows - 1))),
        bottleneck=max(zip(costs, boxes, strict=True), key=lambda pair: pair[0].seconds)[1].name,
    )


def forecast_plan(
    spec: PipelineSpec, plan: PipelinePlan, boxes: Mapping[str, BoxCost], alive: Sequence[str]
) -> PipelineForecast:
    """Predict what a plan does; living boxes that it leaves out are shown as spares."""
    names = [name for name in spec.boxes if name in alive]
    stages = [plan.stage_of(name) for name in names]
    ranges = [(0, 0) if stage is None else (stage.start, stage.end) for stage in stages]
    return forecast_ranges(spec, [boxes[name] for name in names], ranges)
