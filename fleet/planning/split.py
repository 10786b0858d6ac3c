"""The exact contiguous split of decoder layers over boxes in ring order."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from fleet.planning.cost import BoxCost, BoxTable, CostTable

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
    splits that fit, by halving (see `covers`), then the least sum that keeps to it. 60 boxes and 128 layers take
    some 20 ms.

    Args:
        table: costs of the model under its load.
        boxes: in ring order, at least one.

    Returns:
        One [start, end) a box, in ring order. If no split fits, the one that lacks least, which tells what to add.
    """
    tables = [table.on(box) for box in boxes]
    if not covers(table.layers, tables, [None] * len(tables)):
        return least_missing(table, boxes)
    return _least_sum(table, tables, _least_bottleneck(table, tables))


def covers(layers: int, tables: Sequence[BoxTable], limits: Sequence[int | None]) -> bool:
    """Whether some split fits in memory and keeps every stage within its limit of picoseconds (None: any time).

    A smaller range never costs more, so every layer before the furthest that can be reached is reached too, and the
    furthest is reached from the furthest of the boxes before: one walk along the ring decides.
    """
    end = 0
    for table, limit in zip(tables, limits, strict=True):
        end = table.reach(end, limit)
        if end == layers:
            return True
    return layers == 0


def _least_bottleneck(table: CostTable, tables: Sequence[BoxTable]) -> int:
    """Picoseconds of the slowest stage in the split that fits and has the fastest slowest stage; one fits."""
    low, high = -1, max(on_box.picoseconds(0, table.layers) + on_box.head for on_box in tables)
    while high - low > 1:
        middle = (low + high) // 2
        if covers(table.layers, tables, [middle] * len(tables)):
            high = middle
        else:
            low = middle
    return high


def _least_sum(table: CostTable, tables: Sequence[BoxTable], bottleneck: int) -> list[Range]:
    """The fitting split with the least sum of picoseconds of those whose stages keep to the bottleneck.

    A stage's time is work[end] - work[start] + constants, so the best start for each end is the least of
    best[start] - work[start] among the starts that reach the end: a sliding window, as reach never falls. Of equally
    good starts the earliest is taken.
    """
    layers, tied = table.layers, table.model.tied
    best: list[float] = [0, *[INFINITE] * layers]  # of layers [0, end) on the boxes so far; whole numbers
    choices: list[list[int]] = []  # choices[box][end] = where the box's range starts; end itself for a spare
    for on_box in tables:
        following, starts = list(best), list(range(layers + 1))
        window: deque[tuple[float, int, int]] = deque()  # (value, start, reach), values rising
        for end in range(1, layers + 1):
            start = end - 1
            if best[start] != INFINITE:
                value = best[start] - on_box.work[start] + (on_box.head if tied and start == 0 else 0)
                while window and window[-1][0] > value:
                    window.pop()
                window.append((value, start, on_box.reach(start, bottleneck)))
            while window and window[0][2] < end:
                window.popleft()
            if window:
                value, start, _ = window[0]
                candidate = value + on_box.work[end] + on_box.wire
                candidate += on_box.head if end == layers and not tied else 0
                if candidate < following[end]:
                    following[end], starts[end] = candidate, start
        best = following
        choices.append(starts)
    return _walk_back(layers, choices)


def least_missing(table: CostTable, boxes: Sequence[BoxCost]) -> list[Range]:
    """The split with the least sum of missing memory, where none fits: 0 when one does."""
    layers = table.layers
    needs = [[table.needed_bytes(start, max(start, end)) for end in range(layers + 1)] for start in range(layers)]
    best: list[float] = [0, *[INFINITE] * layers]
    choices: list[list[int]] = []
    for box in boxes:
        fits_until = table.on(box).fits_until
        following, starts = list(best), list(range(layers + 1))
        for start in range(layers):
            if best[start] == best[start + 1]:
                continue  # the later start does as well, and its ranges need less
            free, need = fits_until(start), needs[start]
            for end in range(start + 1, layers + 1):
                candidate = best[start] + (0 if end <= free else box.missing_bytes(need[end]))
                if candidate >= following[layers]:  # missing memory never shrinks as a range grows
                    break
                if candidate < following[end]:
                    following[end], starts[end] = candidate, start
        best = following
        choices.append(starts)
    return _walk_back(layers, choices)


def _walk_back(layers: int, choices: Sequence[Sequence[int]]) -> list[Range]:
    """Ranges from the chosen start of every (box, end)."""
    ranges: list[Range] = []
    end = layers
    for starts in reversed(choices):
        start = starts[end]
        ranges.append((start, end))
        end = start
    return ranges[::-1]
