"""The planned target: worth a move or nothing, and never again right after it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from fleet.planning.cost import BoxCost
from fleet.planning.heal import merge, resplit, whole_plan
from fleet.planning.plan import PipelinePlan
from fleet.planning.spec import PipelineSpec, Refusal
from fleet.planning.split import measure
from fleet.planning.whole import plan_of, table_of
from tests.planning.cases import by_name, is_whole, predicted, ranges_of, roomy, sites, spec_of_boxes
from tests.planning.test_split import box, even_ranges, model

THREE = spec_of_boxes(["box1", "box2", "box3"], model())
EQUAL = by_name([box(f"box{index}") for index in range(1, 6)])
NOISE = 0.05


def best(spec: PipelineSpec, boxes: dict[str, BoxCost], alive: list[str] | tuple[str, ...]) -> PipelinePlan:
    plan = whole_plan(spec, boxes, alive)
    assert isinstance(plan, PipelinePlan), plan
    return plan


@pytest.mark.parametrize("lost", ["box1", "box2", "box3"])
def test_a_returned_box_gets_its_layers_back(lost: str) -> None:
    plan = best(THREE, EQUAL, THREE.boxes)
    merged = merge(THREE, plan, EQUAL, [name for name in THREE.boxes if name != lost])
    assert isinstance(merged, PipelinePlan)
    assert resplit(THREE, merged, EQUAL, THREE.boxes) == plan
    assert resplit(THREE, plan, EQUAL, THREE.boxes) is None


def test_a_drained_box_is_left() -> None:
    plan = best(THREE, EQUAL, THREE.boxes)
    target = resplit(THREE, plan, EQUAL, ["box1", "box3"])
    assert target == whole_plan(THREE, EQUAL, ["box1", "box3"])
    assert target is not None and target.stage_of("box2") is None


def test_nothing_fits_means_nothing_to_move_to() -> None:
    boxes = by_name([roomy(f"box{index}", 8, head_mib=54) for index in range(1, 4)])
    assert resplit(THREE, plan_of(THREE, THREE.boxes, [(0, 4), (4, 17), (17, 30)]), boxes, THREE.boxes) is None


def test_a_much_slower_returned_box_still_takes_work_off_the_slowest() -> None:
    boxes = {**EQUAL, "box3": box("box3", speed=1.5e9)}  # a sixth of the others
    merged = best(THREE, boxes, ["box1", "box2"])
    target = resplit(THREE, merged, boxes, THREE.boxes)
    assert target is not None
    stage = target.stage_of("box3")
    assert stage is not None and 0 < stage.end - stage.start < 6
    assert predicted(THREE, target, boxes)[1] < predicted(THREE, merged, boxes)[1]


def test_a_box_that_would_be_the_slowest_stage_itself_stays_spare() -> None:
    boxes = {**EQUAL, "box3": box("box3", speed=9e9 / 40)}
    merged = best(THREE, boxes, ["box1", "box2"])
    assert resplit(THREE, merged, boxes, THREE.boxes) is None


def test_a_small_gain_is_not_worth_a_move_and_a_large_one_is() -> None:
    spec = spec_of_boxes(["box1", "box2"], model(head_mib=0))
    plan = plan_of(spec, spec.boxes, [(0, 16), (16, 30)])  # 15 would be 6 % better
    assert resplit(spec, plan, EQUAL, spec.boxes) is None
    worse = plan_of(spec, spec.boxes, [(0, 17), (17, 30)])  # 12 % better
    target = resplit(spec, worse, EQUAL, spec.boxes)
    assert target is not None and ranges_of(target) == {"box1": (0, 15), "box2": (15, 30)}


def test_a_stage_that_no_longer_fits_its_box_is_moved() -> None:
    spec = spec_of_boxes(["box1", "box2"], model(head_mib=0))
    plan = plan_of(spec, spec.boxes, [(0, 15), (15, 30)])
    boxes = {**EQUAL, "box1": roomy("box1", 14)}
    target = resplit(spec, plan, boxes, spec.boxes)
    assert target is not None and ranges_of(target) == {"box1": (0, 14), "box2": (14, 30)}


def test_explicit_ranges_hold_while_all_their_boxes_live() -> None:
    explicit = {"box1": (0, 10), "box2": (10, 20), "box3": (20, 30)}
    spec = replace(THREE, explicit=explicit)
    plan = best(spec, EQUAL, spec.boxes)
    assert ranges_of(plan) == explicit and is_whole(plan, spec.cost)
    merged = merge(spec, plan, EQUAL, ["box1", "box3"])
    assert isinstance(merged, PipelinePlan)
    assert resplit(spec, merged, EQUAL, ["box1", "box3"]) is None or ranges_of(merged) != explicit
    assert resplit(spec, merged, EQUAL, spec.boxes) == plan
    assert resplit(spec, plan, EQUAL, spec.boxes) is None


def test_explicit_ranges_that_do_not_fit_are_refused_by_box() -> None:
    spec = replace(THREE, explicit={"box1": (0, 10), "box2": (10, 20), "box3": (20, 30)})
    refusal = whole_plan(spec, {**EQUAL, "box2": roomy("box2", 9)}, spec.boxes)
    assert isinstance(refusal, Refusal)
    assert list(refusal.missing_bytes) == ["box2"] and refusal.reason == (  # 8.5 MiB and its reserve
        "pipeline main does not fit on 3 of 3 boxes: box2 lacks 12 MiB, under the inventory's own layer ranges"
    )


def test_another_model_or_load_is_worth_a_plan() -> None:
    plan = best(THREE, EQUAL, THREE.boxes)
    other = replace(THREE, max_sequences=8)
    assert resplit(other, plan, EQUAL, THREE.boxes) == whole_plan(other, EQUAL, THREE.boxes)


@settings(max_examples=100, deadline=None)
@given(sites(most_boxes=8, most_layers=30), st.data())
def test_whole_plan_is_whole_and_never_worse_than_the_even_split(
    site: tuple[PipelineSpec, dict[str, BoxCost]], data: st.DataObject
) -> None:
    spec, boxes = site
    alive = data.draw(st.lists(st.sampled_from(spec.boxes), unique=True, min_size=1))
    plan = whole_plan(spec, boxes, alive)
    assert whole_plan(spec, boxes, set(alive)) == plan
    living = [boxes[name] for name in spec.boxes if name in alive]
    even = measure(table_of(spec), living, even_ranges(len(spec.cost.layers), len(living)))
    if isinstance(plan, Refusal):
        assert even[0] > 0
        return
    assert is_whole(plan, spec.cost) and {stage.box for stage in plan.stages} <= set(alive)
    mine = predicted(spec, plan, boxes)
    assert mine[0] == 0 and mine[:2] <= even[:2]


@settings(max_examples=150, deadline=None)
@given(sites(most_boxes=8, most_layers=30), st.data())
def test_resplit_never_moves_right_after_itself_even_with_noise(
    site: tuple[PipelineSpec, dict[str, BoxCost]], data: st.DataObject
) -> None:
    """Measured seconds, of layers and head apart, may be 5 % off either way."""
    spec, nominal = site
    seconds = st.floats(1e-4, 1e-1)
    boxes = {name: one.measured(0, data.draw(seconds), data.draw(st.none() | seconds)) for name, one in nominal.items()}
    first = data.draw(st.lists(st.sampled_from(spec.boxes), unique=True, min_size=1))
    started = whole_plan(spec, boxes, first)
    assume(isinstance(started, PipelinePlan))
    assert isinstance(started, PipelinePlan)
    moved = resplit(spec, started, boxes, spec.boxes) or whole_plan(spec, boxes, spec.boxes)
    assert isinstance(moved, PipelinePlan)
    assert resplit(spec, moved, boxes, spec.boxes) is None
    off = st.floats(1 - NOISE, 1 + NOISE)

    def noisy(seconds: float | None) -> float | None:
        return None if seconds is None else seconds * data.draw(off)

    later = {
        name: replace(one, layer_seconds=noisy(one.layer_seconds), head_seconds=noisy(one.head_seconds))
        for name, one in boxes.items()
    }
    assert resplit(spec, moved, later, spec.boxes) is None


@settings(max_examples=100, deadline=None)
@given(sites(most_boxes=8, most_layers=30), st.data())
def test_resplit_moves_only_to_something_better_or_off_a_dead_box(
    site: tuple[PipelineSpec, dict[str, BoxCost]], data: st.DataObject
) -> None:
    spec, boxes = site
    first = data.draw(st.lists(st.sampled_from(spec.boxes), unique=True, min_size=1))
    plan = whole_plan(spec, boxes, first)
    assume(isinstance(plan, PipelinePlan))
    assert isinstance(plan, PipelinePlan)
    alive = data.draw(st.lists(st.sampled_from(spec.boxes), unique=True, min_size=1))
    target = resplit(spec, plan, boxes, alive)
    if target is not None:
        assert {stage.box for stage in target.stages} <= set(alive)
        if all(stage.box in alive for stage in plan.stages):
            assert predicted(spec, target, boxes)[:2] < predicted(spec, plan, boxes)[:2]
