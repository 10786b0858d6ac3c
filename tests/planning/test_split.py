"""The split is exact: compared with brute force on small cases, and by its rules on drawn ones."""

from __future__ import annotations

from itertools import combinations_with_replacement, pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from fleet.planning.cost import MIB, PROCESS_BASE_BYTES, BoxCost, CostTable, Load, ModelCost
from fleet.planning.split import Range, measure, split
from fleet.planning.weights import WeightBytes

LOAD = Load(max_sequences=4, max_tokens_per_sequence=256)


def model(layers: int = 30, *, layer_mib: int = 7, head_mib: int = 54, tied: bool = True) -> ModelCost:
    return ModelCost(
        layers=(WeightBytes(layer_mib * MIB, layer_mib * MIB, 0),) * layers,
        head=WeightBytes(head_mib * MIB, head_mib * MIB, 0),
        tied=tied,
        trial_bytes=0,
        kv_bytes_per_token=2 * 3 * 64 * 4,
        hidden_size=576,
    )


def box(name: str, *, speed: float = 9e9, memory_mib: int | None = None) -> BoxCost:
    memory = None if memory_mib is None else memory_mib * MIB
    return BoxCost(name, speed, memory, keep_free_bytes=0, link_bytes_per_second=125e6)


def even_ranges(layers: int, boxes: int) -> list[Range]:
    """The split by layer count alone, the first boxes taking the remainder; the yardstick of the tests."""
    share, rest = divmod(layers, boxes)
    bounds = [0]
    for index in range(boxes):
        bounds.append(bounds[-1] + share + (1 if index < rest else 0))
    return list(pairwise(bounds))


def every_split(layers: int, boxes: int) -> list[list[Range]]:
    cuts = combinations_with_replacement(range(layers + 1), boxes - 1)
    return [list(zip((0, *cut), (*cut, layers), strict=True)) for cut in cuts]


drawn_boxes = st.lists(
    st.builds(box, st.just("box"), speed=st.floats(1e8, 1e11), memory_mib=st.none() | st.integers(300, 2000)),
    min_size=1,
    max_size=4,
)
drawn_models = st.builds(
    model, st.integers(1, 8), layer_mib=st.integers(1, 200), head_mib=st.integers(0, 300), tied=st.booleans()
)


@settings(max_examples=100, deadline=None)
@given(drawn_models, drawn_boxes)
def test_split_is_contiguous_complete_and_optimal(drawn: ModelCost, boxes: list[BoxCost]) -> None:
    table = CostTable(drawn, LOAD)
    ranges = split(table, boxes)
    assert ranges[0][0] == 0 and ranges[-1][1] == table.layers
    assert all(left[1] == right[0] for left, right in pairwise(ranges))
    best = min(measure(table, boxes, candidate) for candidate in every_split(table.layers, len(boxes)))
    mine = measure(table, boxes, ranges)
    assert mine[0] == best[0], "least missing memory"
    if best[0] == 0:  # when it does not fit, only what is missing matters
        assert mine[1] <= best[1] and mine[2] <= best[2] * (1 + 1e-12)
        assert mine <= measure(table, boxes, even_ranges(table.layers, len(boxes)))


def test_equal_boxes_weigh_the_head() -> None:
    table = CostTable(model(), LOAD)
    boxes = [box("a"), box("b"), box("c")]
    # 54 MiB of head are worth 7.7 layers of 7 MiB: 37.7 layers' worth over three boxes
    assert split(table, boxes) == [(0, 4), (4, 17), (17, 30)]


def test_faster_box_takes_more_layers() -> None:
    ranges = split(CostTable(model(head_mib=0), LOAD), [box("jetson", speed=18e9), box("pi-1"), box("pi-2")])
    shares = [end - start for start, end in ranges]
    assert max(shares[1:]) == 8 and shares[0] in (15, 16)  # 7.5 layers a Pi would be even; 8 is the least bottleneck


def test_memory_moves_layers_to_the_box_that_has_it() -> None:
    small = PROCESS_BASE_BYTES // MIB + 80
    ranges = split(
        CostTable(model(tied=False, head_mib=0), LOAD), [box("small", memory_mib=small * 4 // 3), box("big")]
    )
    cost = CostTable(model(tied=False, head_mib=0), LOAD).stage(box("small", memory_mib=small * 4 // 3), *ranges[0])
    assert cost.missing_bytes == 0 and 0 < ranges[0][1] < 15


def test_more_boxes_than_layers_leaves_spares() -> None:
    ranges = split(CostTable(model(2), LOAD), [box(str(index)) for index in range(5)])
    assert sum(1 for start, end in ranges if start < end) <= 2
    assert ranges[-1][1] == 2


def test_what_does_not_fit_says_how_much_is_missing() -> None:
    table = CostTable(model(), LOAD)
    boxes = [box("a", memory_mib=500), box("b", memory_mib=500)]
    ranges = split(table, boxes)
    missing = [table.stage(b, *span).missing_bytes for b, span in zip(boxes, ranges, strict=True)]
    assert sum(missing) > 0
    assert sum(missing) == min(measure(table, boxes, candidate)[0] for candidate in every_split(30, 2))
