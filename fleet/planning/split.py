"""The exact contiguous split of decoder layers over boxes in ring order, by dynamic programming."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from fleet.planning.cost import BoxCost, CostTable

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


def even_ranges(layers: int, boxes: int) -> list[Range]:
    """The split by layer count alone, the first boxes taking the remainder; the yardstick of the tests."""
    share, rest = divmod(layers, boxes)
    bounds = [0]
    for index in range(boxes):
        bounds.append(bounds[-1] + share + (1 if index < rest else 0))
    return list(pairwise(bounds))


def split(table: CostTable, boxes: Sequence[BoxCost]) -> list[Range]:
    """The best contiguous and complete split; a box may stay spare (empty range).

    Minimises `measure`: first missing memory (0 when it fits at all), then the slowest stage, then the sum. With
    prefix-optimal sub-solutions under the lexicographic order (sum, max, sum) the bottleneck must be known before
    the sum can be minimised: the first pass finds the least missing bytes, the second the least bottleneck among
    those, the third the least sum under both.

    Args:
        table: costs of the model under its load.
        boxes: in ring order, at least one.

    Returns:
        One [start, end) a box, in ring order.
    """
    layers = table.layers
    costs = [
        {(start, end): table.stage(box, start, end) for start in range(layers) for end in range(start + 1, layers + 1)}
        for box in boxes
    ]
    missing = [{span: float(cost.missing_bytes) for span, cost in per_box.items()} for per_box in costs]
    seconds = [{span: cost.seconds for span, cost in per_box.items()} for per_box in costs]

    least_missing, _ = _least_sum(missing, layers, allowed=None)
    if least_missing > 0:  # does not fit: the split that lacks least tells the user what to add
        return _least_sum(missing, layers, allowed=None)[1]
    fits: list[set[Range]] = [{span for span, value in per_box.items() if value == 0} for per_box in missing]
    bottleneck = _least_max(seconds, layers, fits)
    under = [{span for span in spans if seconds[index][span] <= bottleneck} for index, spans in enumerate(fits)]
    return _least_sum(seconds, layers, allowed=under)[1]


def _least_max(values: Sequence[dict[Range, float]], layers: int, allowed: Sequence[set[Range]]) -> float:
    """The least possible maximum over the ranges of a contiguous split made of allowed ranges."""
    infinite = float("inf")
    best = [0.0] + [infinite] * layers
    for per_box, spans in zip(values, allowed, strict=True):
        following = list(best)  # a spare box changes nothing
        for start, end in spans:
            candidate = max(best[start], per_box[start, end])
            following[end] = min(following[end], candidate)
        best = following
    return best[layers]


def _least_sum(
    values: Sequence[dict[Range, float]], layers: int, allowed: Sequence[set[Range]] | None
) -> tuple[float, list[Range]]:
    """The least possible sum over the ranges of a contiguous split, and that split; ties take the earlier box."""
    infinite = float("inf")
    best = [0.0] + [infinite] * layers
    choices: list[list[int]] = []  # choices[box][end] = where the box's range starts; end itself for a spare
    for index, per_box in enumerate(values):
        following, starts = list(best), list(range(layers + 1))
        for start, end in sorted(per_box if allowed is None else allowed[index]):
            candidate = best[start] + per_box[start, end]
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
    return best[layers], ranges[::-1]
