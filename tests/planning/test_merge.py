"""A merge moves the fewest layers: tables of the usual cases, brute force and rules on drawn ones."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from fleet.planning.cost import MIB, BoxCost
from fleet.planning.heal import merge, moved_layers, whole_plan
from fleet.planning.plan import PipelinePlan
from fleet.planning.spec import PipelineSpec, Refusal
from fleet.planning.split import Range
from fleet.planning.whole import plan_of
from tests.planning.cases import (
    by_name,
    every_plan,
    fewest_moved,
    is_whole,
    predicted,
    ranges_of,
    roomy,
    sites,
    spec_of_boxes,
)
from tests.planning.test_split import box, model

THREE = spec_of_boxes(["box1", "box2", "box3"], model())  # 30 layers of 7 MiB, tied head of 54 MiB (7.7 layers)
FOUR = spec_of_boxes(["box1", "box2", "box3", "box4"], model(head_mib=0, tied=False))
EQUAL = by_name([box(f"box{index}") for index in range(1, 6)])


def even(spec: PipelineSpec, *cuts: int) -> PipelinePlan:
    """The plan whose first boxes' ranges end at the cuts."""
    bounds = [0, *cuts, len(spec.cost.layers)]
    ranges = list(pairwise(bounds))
    return plan_of(spec, spec.boxes[: len(ranges)], ranges)


def merged(
    spec: PipelineSpec, plan: PipelinePlan, boxes: dict[str, BoxCost], alive: set[str] | list[str]
) -> PipelinePlan:
    result = merge(spec, plan, boxes, alive)
    assert isinstance(result, PipelinePlan), result
    return result


@pytest.mark.parametrize(
    ("alive", "expected"),
    [
        # box2 takes the head too: 13 layers, 4 moved, all it can get
        ({"box2", "box3"}, {"box2": (0, 17), "box3": (17, 30)}),
        # 13 layers between box1 (4 and a head of 7.7) and box3 (13): 11.7 + 7 = 18.7 against 13 + 6 = 19
        ({"box1", "box3"}, {"box1": (0, 11), "box3": (11, 30)}),
        ({"box1", "box2"}, {"box1": (0, 4), "box2": (4, 30)}),
        ({"box1"}, {"box1": (0, 30)}),
        ({"box2"}, {"box2": (0, 30)}),
        ({"box3"}, {"box3": (0, 30)}),
        ({"box1", "box2", "box3"}, {"box1": (0, 4), "box2": (4, 17), "box3": (17, 30)}),
    ],
)
def test_three_equal_boxes_lose_any(alive: set[str], expected: dict[str, Range]) -> None:
    plan = even(THREE, 4, 17)
    after = merged(THREE, plan, EQUAL, alive)
    assert ranges_of(after) == expected
    assert is_whole(after, THREE.cost)
    assert moved_layers(plan, after) == sum(stage.end - stage.start for stage in plan.stages if stage.box not in alive)


def test_two_of_three_lost_one_after_the_other() -> None:
    first = merged(THREE, even(THREE, 4, 17), EQUAL, {"box1", "box3"})
    assert ranges_of(merged(THREE, first, EQUAL, {"box3"})) == {"box3": (0, 30)}


@pytest.mark.parametrize(
    ("alive", "expected"),
    [
        ({"box1", "box4"}, {"box1": (0, 15), "box4": (15, 30)}),  # adjacent deaths: one gap, shared
        ({"box2", "box3"}, {"box2": (0, 15), "box3": (15, 30)}),  # both ends
        ({"box2", "box4"}, {"box2": (0, 15), "box4": (15, 30)}),  # box2 must take the front, box4 all the rest
        ({"box4"}, {"box4": (0, 30)}),
    ],
)
def test_several_die_at_once(alive: set[str], expected: dict[str, Range]) -> None:
    plan = even(FOUR, 8, 15, 22)
    after = merged(FOUR, plan, EQUAL, alive)
    assert ranges_of(after) == expected
    assert moved_layers(plan, after) == sum(stage.end - stage.start for stage in plan.stages if stage.box not in alive)


def test_a_slow_neighbour_gets_less() -> None:
    boxes = {**EQUAL, "box1": box("box1", speed=3e9)}
    after = merged(FOUR, even(FOUR, 5, 15, 23), boxes, {"box1", "box3", "box4"})
    first, second = after.stages[0], after.stages[1]
    assert first.end - first.start < 8 and second.end - second.start > 10


def test_a_neighbour_that_is_full_leaves_all_to_the_other() -> None:
    boxes = {**EQUAL, "box1": roomy("box1", 8)}
    plan = even(FOUR, 8, 15, 22)
    after = merged(FOUR, plan, boxes, {"box1", "box3", "box4"})
    assert ranges_of(after) == {"box1": (0, 8), "box3": (8, 22), "box4": (22, 30)}


def test_layers_spill_along_the_chain_only_as_far_as_memory_demands() -> None:
    boxes = {**EQUAL, "box1": roomy("box1", 8), "box3": roomy("box3", 10)}
    plan = even(FOUR, 8, 15, 22)
    after = merged(FOUR, plan, boxes, {"box1", "box3", "box4"})
    assert ranges_of(after) == {"box1": (0, 8), "box3": (8, 18), "box4": (18, 30)}
    assert moved_layers(plan, after) == 7 + 4, "the dead box's layers, and what box3 passes on"


def test_the_new_first_box_needs_room_for_the_head() -> None:
    head_mib = 54
    boxes = {**EQUAL, "box2": roomy("box2", 14, head_mib=head_mib)}
    plan = even(THREE, 4, 17)
    after = merged(THREE, plan, boxes, {"box2", "box3"})
    assert ranges_of(after) == {"box2": (0, 14), "box3": (14, 30)}
    assert after.stages[0].head


def test_a_spare_takes_over_where_the_chain_has_no_room() -> None:
    spec = spec_of_boxes(["box1", "spare", "box2", "box3"], model(head_mib=0, tied=False))
    boxes = by_name([roomy("box1", 10), box("spare"), roomy("box2", 10), roomy("box3", 10)])
    plan = plan_of(spec, ["box1", "box2", "box3"], [(0, 10), (10, 20), (20, 30)])
    after = merged(spec, plan, boxes, {"box1", "spare", "box3"})
    assert ranges_of(after) == {"box1": (0, 10), "spare": (10, 20), "box3": (20, 30)}
    assert ranges_of(merged(spec, plan, boxes, {"spare"})) == {"spare": (0, 30)}


def test_what_does_not_fit_is_refused_with_the_missing_mebibytes() -> None:
    boxes = by_name([roomy(f"box{index}", 10) for index in range(1, 4)])
    spec = spec_of_boxes(["box1", "box2", "box3"], model(head_mib=0, tied=False))
    refusal = merge(spec, even(spec, 10, 20), boxes, {"box1", "box3"})
    assert isinstance(refusal, Refusal)
    # ten layers of 8.5 MiB, and a quarter of what is added stays in reserve
    assert sum(refusal.missing_bytes.values()) == pytest.approx(85 * MIB * 4 / 3, abs=64)
    assert refusal.reason.startswith("pipeline main does not fit on 2 of 3 boxes: box")
    assert "lacks" in refusal.reason and "MiB" in refusal.reason


def test_the_reason_of_a_refusal_stays_one_short_line() -> None:
    names = [f"box{index}" for index in range(40)]
    spec = spec_of_boxes(names, model(head_mib=0, layer_mib=100))
    refusal = whole_plan(spec, by_name([roomy(name, 0) for name in names]), names)
    assert isinstance(refusal, Refusal)
    assert refusal.reason.count("lacks") <= 6 and len(refusal.reason) < 250 and "\n" not in refusal.reason
    assert len(refusal.missing_bytes) > 6 and refusal.reason.endswith("more lack memory too")


def test_no_box_left_is_refused_in_words() -> None:
    refusal = merge(THREE, even(THREE, 4, 17), EQUAL, set())
    assert refusal == Refusal({}, "pipeline main: none of its 3 boxes is there")


def test_a_plan_for_another_model_has_nothing_to_keep() -> None:
    other = replace(even(THREE, 4, 17), model_digest="11" * 32)
    assert merge(THREE, other, EQUAL, {"box1", "box3"}) == whole_plan(THREE, EQUAL, {"box1", "box3"})


def test_a_box_that_left_the_pipeline_counts_as_dead() -> None:
    plan = even(THREE, 4, 17)
    smaller = replace(THREE, boxes=("box1", "box3"))
    assert ranges_of(merged(smaller, plan, EQUAL, {"box1", "box2", "box3"})) == {"box1": (0, 11), "box3": (11, 30)}


@st.composite
def losses(
    draw: st.DrawFn, *, most_mib: int | None = None
) -> tuple[PipelineSpec, dict[str, BoxCost], PipelinePlan, list[str]]:
    """A site with any plan on it (the best one or not), and who lives; every box at most so large."""
    spec, boxes = draw(sites())
    if most_mib is not None:
        sizes = st.integers(300, most_mib)
        boxes = {name: replace(one, memory_bytes=draw(sizes) * MIB) for name, one in boxes.items()}
    layers, count = len(spec.cost.layers), len(spec.boxes)
    cuts = sorted(draw(st.lists(st.integers(0, layers), min_size=count - 1, max_size=count - 1)))
    bounds = [0, *cuts, layers]
    plan = plan_of(spec, spec.boxes, list(pairwise(bounds)))
    lost = draw(st.sampled_from([stage.box for stage in plan.stages]))
    others = [name for name in spec.boxes if name != lost]
    return spec, boxes, plan, draw(st.lists(st.sampled_from(others), unique=True)) if others else []


@settings(max_examples=150, deadline=None)
@given(losses())
def test_merge_is_the_best_of_all(
    drawn: tuple[PipelineSpec, dict[str, BoxCost], PipelinePlan, list[str]],
) -> None:
    spec, boxes, plan, alive = drawn
    after = merge(spec, plan, boxes, alive)
    assert merge(spec, plan, boxes, set(alive)) == after, "the same answer each time"
    left = [boxes[stage.box] for stage in plan.stages if stage.box in alive]
    living = [boxes[name] for name in spec.boxes if name in alive]
    best = (fewest_moved(spec, plan, left) if left else None) or (fewest_moved(spec, plan, living) if living else None)
    if best is None:
        assert isinstance(after, Refusal)
        if living:
            least = min(missing for (missing, _, _), _ in every_plan(spec, living))
            assert sum(after.missing_bytes.values()) == least > 0
        return
    assert isinstance(after, PipelinePlan)
    assert is_whole(after, spec.cost)
    assert {stage.box for stage in after.stages} <= set(alive)
    missing, slowest, total = predicted(spec, after, boxes)
    assert missing == 0
    assert (moved_layers(plan, after), slowest) == best[:2]
    assert total == pytest.approx(best[2], rel=1e-9)


@st.composite
def tight_losses(draw: st.DrawFn) -> tuple[PipelineSpec, dict[str, BoxCost], PipelinePlan, str]:
    """Boxes that have room for a few layers more than they hold, so that layers spill far along the chain."""
    count, tied = draw(st.integers(3, 5)), draw(st.booleans())
    sizes = draw(st.lists(st.integers(1, 4), min_size=count, max_size=count))
    spec = spec_of_boxes([f"box{index}" for index in range(count)], model(sum(sizes), tied=tied, head_mib=10))
    bounds = [sum(sizes[:index]) for index in range(count + 1)]
    plan = plan_of(spec, spec.boxes, list(pairwise(bounds)))
    rooms = [size + draw(st.integers(0, 3)) for size in sizes]
    boxes = by_name([roomy(name, room, head_mib=10) for name, room in zip(spec.boxes, rooms, strict=True)])
    return spec, boxes, plan, draw(st.sampled_from(spec.boxes))


@settings(max_examples=100, deadline=None)
@given(tight_losses())
def test_spills_are_the_best_of_all(drawn: tuple[PipelineSpec, dict[str, BoxCost], PipelinePlan, str]) -> None:
    spec, boxes, plan, lost = drawn
    alive = [name for name in spec.boxes if name != lost]
    after = merge(spec, plan, boxes, alive)
    best = fewest_moved(spec, plan, [boxes[name] for name in alive])
    if best is None:
        assert isinstance(after, Refusal)
        return
    assert isinstance(after, PipelinePlan) and is_whole(after, spec.cost)
    missing, slowest, total = predicted(spec, after, boxes)
    assert (missing, moved_layers(plan, after), slowest) == (0, *best[:2])
    assert total == pytest.approx(best[2], rel=1e-9)


@settings(max_examples=100, deadline=None)
@given(losses(most_mib=600))
def test_a_refusal_is_honest(drawn: tuple[PipelineSpec, dict[str, BoxCost], PipelinePlan, list[str]]) -> None:
    spec, boxes, plan, alive = drawn
    refusal = merge(spec, plan, boxes, alive)
    assume(isinstance(refusal, Refusal) and alive)
    assert isinstance(refusal, Refusal)
    added = {
        name: replace(one, memory_bytes=(one.memory_bytes or 0) + refusal.missing_bytes.get(name, 0))
        for name, one in boxes.items()
    }
    assert isinstance(merge(spec, plan, added, alive), PipelinePlan), "so much memory added is enough"
    assert set(refusal.missing_bytes) <= set(alive) and min(refusal.missing_bytes.values()) > 0


@settings(max_examples=100, deadline=None)
@given(sites(most_boxes=6, most_layers=20, memory=False), st.data())
def test_without_memory_limits_exactly_the_dead_range_moves_and_survivors_keep_all(
    site: tuple[PipelineSpec, dict[str, BoxCost]], data: st.DataObject
) -> None:
    spec, boxes = site
    plan = whole_plan(spec, boxes, spec.boxes)
    assert isinstance(plan, PipelinePlan)
    dead = data.draw(st.lists(st.sampled_from([stage.box for stage in plan.stages]), unique=True, min_size=1))
    alive = [name for name in spec.boxes if name not in dead]
    left = [stage for stage in plan.stages if stage.box in alive]
    assume(left)
    after = merged(spec, plan, boxes, alive)
    assert moved_layers(plan, after) == sum(stage.end - stage.start for stage in plan.stages if stage.box in dead)
    for stage in left:
        now = after.stage_of(stage.box)
        assert now is not None and now.start <= stage.start and now.end >= stage.end
