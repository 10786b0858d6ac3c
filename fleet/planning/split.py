"""The exact contiguous split of decoder layers over boxes in ring order, by dynamic programming."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from fleet.planning.cost import BoxCost, CostTable

INFINITE = float("inf")
Range = tuple[int, int]
Measure = tuple[int, float, float]


def measure(table: CostTable, boxes: Sequence[BoxCost], ranges: Sequence[Range]) -> Measure:
    """How good a split is; smaller is better.

    Args:
        table: costs of the model under its load.
        boxes: in ring order.
        ranges: one [start, end) a box; empty for a spare.

    Returns:
        (bytes missing over all boxes, seconds of the slowest stage, seconds of all stages), compared in this order.
    """
    costs = [table.stage(box, *span) for box, span in zip(boxes, ranges, strict=True)]
    return (
        sum(cost.missing_bytes for cost in costs),
        max((cost.seconds for cost in costs), default=0.0),
        sum(cost.seconds for cost in costs),
    )


def split(table: CostTable, boxes: Sequence[BoxCost]) -> list[Range]:
    """The best contiguous and complete split; a box may stay spare (empty range).

    Minimises `measure`: first missing memory (0 when it fits at all), then the slowest stage, then the sum. Under
    that order the best split need not be made of best parts, so there are two passes: the least bottleneck of the
    splits that fit, then the least sum that keeps to it. 60 boxes and 128 layers take about 0.3 s: costs never shrink
    as a range grows, so each pass leaves off where a longer range is ruled out too.

    Args:
        table: costs of the model under its load.
        boxes: in ring order, at least one.

    Returns:
        One [start, end) a box, in ring order. If no split fits, the one that lacks least, which tells what to add.
    """
    bottleneck = _least_bottleneck(table, boxes)

    def seconds(box: BoxCost, start: int, end: int) -> float:
        cost = table.stage(box, start, end)
        return INFINITE if cost.missing_bytes or cost.seconds > bottleneck else cost.seconds

    def missing(box: BoxCost, start: int, end: int) -> float:
        return table.stage(box, start, end).missing_bytes

    return _least_sum(table.layers, boxes, missing if bottleneck == INFINITE else seconds)


def _least_bottleneck(table: CostTable, boxes: Sequence[BoxCost]) -> float:
    """Seconds of the slowest stage in the split that fits and has the fastest slowest stage; infinite if none fits."""
    layers = table.layers
    best = [0.0] + [INFINITE] * layers  # of layers [0, end) on the boxes so far
    for box in boxes:
        following = list(best)  # a spare box changes nothing
        for start in range(layers):
            if best[start] == INFINITE:
                continue
            for end in range(start + 1, layers + 1):
                cost = table.stage(box, start, end)
                if cost.missing_bytes or cost.seconds >= following[layers]:
                    break
                following[end] = min(following[end], max(best[start], cost.seconds))
        best = following
    return best[layers]


def _least_sum(layers: int, boxes: Sequence[BoxCost], value: Callable[[BoxCost, int, int], float]) -> list[Range]:
    """The split with the least sum of values; ties take the earlier box. Values never shrink as a range grows."""
    best = [0.0] + [INFINITE] * layers
    choices: list[list[int]] = []  # choices[box][end] = where the box's range starts; end itself for a spare
    for box in boxes:
        following, starts = list(best), list(range(layers + 1))
        for start in range(layers):
            for end in range(start + 1, layers + 1):
                candidate = best[start] + value(box, start, end)
                if candidate >= following[layers]:
                    break
                if candidate < following[end]:
                    following[end], starts[end] = candidate, start
        best = following
        choices.append(starts)
    ranges: list[Range] = []
    end = layers
    for starts in reversed(choices):
        start = starts[end]
        ranges.append((start, end))
        end = start
    return ranges[::-1]
