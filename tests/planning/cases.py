"""Specs, boxes and brute force that the planner's tests share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise

from hypothesis import strategies as st

from fleet.planning.cost import MIB, PROCESS_BASE_BYTES, BoxCost, ModelCost
from fleet.planning.heal import moved_layers
from fleet.planning.plan import PipelinePlan
from fleet.planning.spec import PipelineSpec
from fleet.planning.split import Range, measure
from fleet.planning.whole import plan_of, table_of
from tests.planning.test_split import box, every_split, model


def spec_of_boxes(names: Sequence[str], cost: ModelCost, explicit: Mapping[str, Range] | None = None) -> PipelineSpec:
    return PipelineSpec(
        name="main",
        model="small",
        model_digest="00" * 32,
        policy="exact",
        max_sequences=4,
        max_tokens_per_sequence=256,
        boxes=tuple(names),
        explicit=explicit,
        cost=cost,
    )


def by_name(boxes: Sequence[BoxCost]) -> dict[str, BoxCost]:
    return {box.name: box for box in boxes}


def roomy(name: str, layers: float, *, layer_mib: float = 8.5, head_mib: float = 0) -> BoxCost:
    """A box whose memory holds so many layers of `layer_mib` (7 of weights, 1.5 of caches) and a head."""
    usable = PROCESS_BASE_BYTES + layers * layer_mib * MIB + head_mib * MIB
    return replace(box(name), memory_bytes=int(usable * 4 / 3) + 8)


def ranges_of(plan: PipelinePlan) -> dict[str, Range]:
    return {stage.box: (stage.start, stage.end) for stage in plan.stages}


def is_whole(plan: PipelinePlan, cost: ModelCost) -> bool:
    """Contiguous, complete, no empty stage, embedding and head in their places."""
    stages = plan.stages
    first, last = stages[0], stages[-1]
    return (
        first.start == 0
        and last.end == len(cost.layers) == plan.layers
        and all(left.end == right.start for left, right in pairwise(stages))
        and all(stage.start < stage.end for stage in stages)
        and [stage for stage in stages if stage.embedding] == [first]
        and [stage for stage in stages if stage.head] == [first if cost.tied else last]
    )


def every_plan(spec: PipelineSpec, boxes: Sequence[BoxCost]) -> list[tuple[tuple[int, float, float], PipelinePlan]]:
    """Every contiguous plan over the boxes with its measure."""
    table = table_of(spec)
    return [
        (measure(table, boxes, ranges), plan_of(spec, [one.name for one in boxes], ranges))
        for ranges in every_split(table.layers, len(boxes))
    ]


def fewest_moved(spec: PipelineSpec, plan: PipelinePlan, boxes: Sequence[BoxCost]) -> tuple[int, float, float] | None:
    """(moved layers, slowest stage, sum) of the best fitting plan, by brute force; None if none fits."""
    fitting = [
        (moved_layers(plan, candidate), slowest, total)
        for (missing, slowest, total), candidate in every_plan(spec, boxes)
        if not missing
    ]
    return min(fitting, default=None)


def predicted(spec: PipelineSpec, plan: PipelinePlan, boxes: Mapping[str, BoxCost]) -> tuple[int, float, float]:
    """The measure of a plan."""
    return measure(
        table_of(spec), [boxes[stage.box] for stage in plan.stages], [(stage.start, stage.end) for stage in plan.stages]
    )


@st.composite
def sites(
    draw: st.DrawFn, *, most_boxes: int = 5, most_layers: int = 8, memory: bool = True
) -> tuple[PipelineSpec, dict[str, BoxCost]]:
    """A small pipeline with boxes of drawn speed and memory."""
    cost = draw(
        st.builds(
            model,
            st.integers(1, most_layers),
            layer_mib=st.integers(1, 200),
            head_mib=st.integers(0, 300),
            tied=st.booleans(),
        )
    )
    count = draw(st.integers(1, most_boxes))
    sizes = st.none() | st.integers(300, 2500) if memory else st.none()
    boxes = [
        box(f"box{index}", speed=draw(st.floats(1e9, 1e11)), memory_mib=draw(sizes)) for index in range(1, count + 1)
    ]
    return spec_of_boxes([one.name for one in boxes], cost), by_name(boxes)
