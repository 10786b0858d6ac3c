"""The merge: what dead boxes held goes to the living with the fewest moved layers. Pure, exact."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from fleet.planning.cost import BoxCost, CostTable
from fleet.planning.plan import PipelinePlan
from fleet.planning.spec import PipelineSpec, Refusal
from fleet.planning.split import Range
from fleet.planning.whole import fits, living_boxes, plan_of, refuse, same_model, table_of, whole_plan

Value = tuple[int, int]  # (moved layers, picoseconds)


def merge(
    spec: PipelineSpec, plan: PipelinePlan, boxes: Mapping[str, BoxCost], alive: Collection[str]
) -> PipelinePlan | Refusal:
    """The plan after some boxes of a plan have gone: fewest moved layers, then the fastest slowest stage, then the sum.

    First over the boxes that the plan has left: their neighbours take the range, spilling along the chain only where
    memory demands. Then over every living box of the pipeline, spares too.

    Args:
        spec: of the pipeline.
        plan: that served until now. It is answered unchanged when all its boxes live.
        boxes: name → cost, at least for every box of the pipeline.
        alive: boxes that may hold layers.

    Returns:
        The plan, or what the split lacks that lacks least. A plan for another model or load than the spec's has
        nothing to keep: then the whole plan.
    """
    if not same_model(spec, plan):
        return whole_plan(spec, boxes, alive)
    table = table_of(spec)
    return merged(spec, table, plan, boxes, alive) or refuse(spec, table, living_boxes(spec, boxes, alive))


def merged(
    spec: PipelineSpec,
    table: CostTable,
    plan: PipelinePlan,
    boxes: Mapping[str, BoxCost],
    alive: Collection[str],
) -> PipelinePlan | None:
    """`merge` of a plan for the spec's own model, with costs that are there already; None if no plan fits."""
    left = [boxes[stage.box] for stage in plan.stages if stage.box in alive and stage.box in spec.boxes]
    if len(left) == len(plan.stages):
        return plan
    living = living_boxes(spec, boxes, alive)
    for chain in (left, living):
        if fits(table, chain):
            return plan_of(spec, [box.name for box in chain], _fewest_moved(table, plan, chain))
    return None


def moved_layers(old: PipelinePlan, new: PipelinePlan) -> int:
    """Layers whose holder changes."""
    kept = 0
    for stage in new.stages:
        before = old.stage_of(stage.box)
        if before is not None:
            kept += _overlap((stage.start, stage.end), (before.start, before.end))
    return new.layers - kept


@dataclass(frozen=True)
class _Chain:
    """Living boxes in ring order and what each holds now (an empty range: nothing)."""

    table: CostTable
    boxes: Sequence[BoxCost]
    held: Sequence[Range]


def _fewest_moved(table: CostTable, plan: PipelinePlan, boxes: Sequence[BoxCost]) -> list[Range]:
    """One range a box; some split fits.

    The search looks at cuts near where they are now. A cut that goes past d layers which living boxes hold moves d
    layers more than the dead boxes' own; so once a split is found that moves no more than `width` such layers, no
    better one lies outside the window of that width.
    """
    stages = [plan.stage_of(box.name) for box in boxes]
    chain = _Chain(table, boxes, [(0, 0) if stage is None else (stage.start, stage.end) for stage in stages])
    orphaned = table.layers - sum(end - start for start, end in chain.held)
    width = 0
    while True:
        windows = _windows(chain, width)
        found = _search(chain, windows, None, max)
        if found is not None:
            moved, bottleneck = found[0]
            if moved - orphaned <= width:
                break
            width = moved - orphaned
        else:
            width = max(1, 2 * width)
    # the least sum among the splits of that bottleneck is a second pass: the best split by both need not be made of
    # parts that are best by both
    within = _search(chain, windows, bottleneck, int.__add__)
    return found[1] if within is None else within[1]


def _windows(chain: _Chain, width: int) -> list[range]:
    """For each box the ends that its range may have: past at most `width` held layers from where the cut is now."""
    layers, boxes = chain.table.layers, range(len(chain.boxes))
    is_held = [0] * layers
    for start, end in chain.held:
        is_held[start:end] = [1] * (end - start)
    held_below = [0, *accumulate(is_held)]  # rises with the layer, by 0 or 1
    windows = []
    for index in boxes:
        before = max((end for start, end in chain.held[: index + 1] if start < end), default=0)
        after = min((start for start, end in chain.held[index + 1 :] if start < end), default=layers)
        low, high = min(before, after), max(before, after)
        first = bisect_left(held_below, held_below[low] - width)
        last = bisect_right(held_below, held_below[high] + width) - 1
        windows.append(range(first, last + 1))
    windows[-1] = range(layers, layers + 1)
    return windows


def _search(
    chain: _Chain, windows: Sequence[range], limit: int | None, combine: Callable[[int, int], int]
) -> tuple[Value, list[Range]] | None:
    """The split with the fewest moved layers, then the least of its times put together by `combine`.

    Both `max` and addition keep the order of pairs when another box is added, so best parts make the best whole.

    Args:
        chain: the boxes. windows: allowed ends of each.
        limit: most picoseconds of a stage.
        combine: of the times of stages.
    """
    best: dict[int, Value] = {0: (0, 0)}  # end of the boxes so far → value
    choices: list[dict[int, int]] = []
    for box, held, window in zip(chain.boxes, chain.held, windows, strict=True):
        on_box = chain.table.on(box)
        reaches = {start: on_box.reach(start, limit) for start in best}
        following: dict[int, Value] = {}
        starts: dict[int, int] = {}
        for end in window:
            for start, (moved, time) in best.items():  # ascending
                if start > end:
                    break
                if start == end:
                    value = (moved, time)
                elif reaches[start] < end:
                    continue
                else:
                    gained = end - start - _overlap((start, end), held)
                    value = (moved + gained, combine(time, on_box.picoseconds(start, end)))
                if end not in following or value < following[end]:
                    following[end], starts[end] = value, start
        best = following
        choices.append(starts)
    layers = chain.table.layers
    if layers not in best:
        return None
    ranges: list[Range] = []
    end = layers
    for chosen in reversed(choices):
        ranges.append((chosen[end], end))
        end = chosen[end]
    return best[layers], ranges[::-1]


def _overlap(one: Range, other: Range) -> int:
    return max(0, min(one[1], other[1]) - max(one[0], other[0]))
