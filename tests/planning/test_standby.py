"""What boxes keep ready, what a site can't lose, and what two live epochs take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from hypothesis import assume, given, settings
from hypothesis import strategies as st

from fleet.planning.cost import MIB, PROCESS_BASE_BYTES, BoxCost
from fleet.planning.heal import merge, standby, transition_missing, unsurvivable, whole_plan
from fleet.planning.plan import PipelinePlan
from fleet.planning.spec import Holding, PipelineSpec, Refusal
from fleet.planning.whole import plan_of, table_of
from tests.planning.cases import by_name, roomy, sites, spec_of_boxes
from tests.planning.test_split import box, model

THREE = spec_of_boxes(["box1", "box2", "box3"], model())
EQUAL = by_name([box(f"box{index}") for index in range(1, 5)])
PLAN = plan_of(THREE, THREE.boxes, [(0, 4), (4, 17), (17, 30)])


def layers(*ranges: tuple[int, int]) -> tuple[int, ...]:
    return tuple(layer for start, end in ranges for layer in range(start, end))


def test_every_box_keeps_what_it_takes_over_at_any_single_loss() -> None:
    assert standby(THREE, PLAN, EQUAL, THREE.boxes) == {
        "box1": Holding(layers((4, 11))),  # its part of box2's range
        "box2": Holding(layers((0, 4), (17, 30)), head=True, embedding=True),  # box1's range, or box3's
        "box3": Holding(layers((11, 17))),
    }


def test_the_only_box_left_keeps_nothing_ready() -> None:
    alone = plan_of(THREE, ["box1"], [(0, 30)])
    assert standby(THREE, alone, EQUAL, ["box1"]) == {"box1": Holding()}
    assert unsurvivable(THREE, alone, EQUAL, ["box1"]) == ("box1",)


def test_a_spare_is_told_that_it_keeps_nothing_where_the_chain_has_room() -> None:
    spec = replace(THREE, boxes=("box1", "box2", "box3", "box4"))
    assert standby(spec, PLAN, EQUAL, spec.boxes)["box4"] == Holding()


def test_a_spare_keeps_ready_what_only_it_can_take_over() -> None:
    spec = spec_of_boxes(["box1", "spare", "box2"], model(head_mib=0, tied=False))
    boxes = by_name([roomy("box1", 15), box("spare"), roomy("box2", 15)])
    plan = plan_of(spec, ["box1", "box2"], [(0, 15), (15, 30)])
    assert standby(spec, plan, boxes, spec.boxes) == {
        "box1": Holding(),
        "spare": Holding(layers((0, 30)), head=True, embedding=True),
        "box2": Holding(),
    }


def test_nearest_layers_first_where_memory_is_short() -> None:
    # box2 serves 13 layers of 8.5 MiB with caches; a layer kept ready takes 7
    room = roomy("box2", 26, head_mib=54)
    tight = replace(room, memory_bytes=int((PROCESS_BASE_BYTES + (13 * 8.5 + 54 + 5 * 7) * MIB) * 4 / 3) + 8)
    # it takes over either four layers and the head, or thirteen layers: not all of that fits at once
    kept = standby(THREE, PLAN, {**EQUAL, "box2": room}, THREE.boxes)["box2"]
    assert kept == Holding(layers((0, 4), (17, 28)), head=True, embedding=True)
    kept = standby(THREE, PLAN, {**EQUAL, "box2": tight}, THREE.boxes)["box2"]
    assert kept == Holding((1, 2, 3, 17, 18), head=True, embedding=True)


def test_names_the_losses_that_no_plan_survives() -> None:
    boxes = {**EQUAL, "box1": roomy("box1", 12, head_mib=54), "box3": roomy("box3", 20)}
    # 30 layers: box2 has room for all; without it box1 and box3 hold 32; box1 without box2 is fine, but not alone
    assert unsurvivable(THREE, PLAN, boxes, THREE.boxes) == ()
    assert unsurvivable(THREE, PLAN, {**boxes, "box3": roomy("box3", 17)}, THREE.boxes) == ("box2",)
    two = merge(THREE, PLAN, boxes, ["box1", "box3"])
    assert isinstance(two, PipelinePlan)
    assert unsurvivable(THREE, two, boxes, ["box1", "box3"]) == ("box1", "box3")


def test_two_epochs_at_once_need_room_for_both() -> None:
    after = plan_of(THREE, ["box1", "box3"], [(0, 11), (11, 30)])
    assert transition_missing(THREE, PLAN, after, EQUAL) == {}
    # box1: 11 layers of 7 MiB, head, caches of 4 and of 11 layers (1.5 MiB each)
    needed = PROCESS_BASE_BYTES + int((11 * 7 + 54 + 15 * 1.5) * MIB)
    memory = -(-needed * 4 // 3)
    fits = {**EQUAL, "box1": replace(EQUAL["box1"], memory_bytes=memory)}
    short = {**EQUAL, "box1": replace(EQUAL["box1"], memory_bytes=memory - 100)}
    assert transition_missing(THREE, PLAN, after, fits) == {}
    assert transition_missing(THREE, PLAN, after, short) == {"box1": 100}
    assert not isinstance(merge(THREE, PLAN, short, ["box1", "box3"]), Refusal), "one epoch alone fits"


def test_a_new_box_needs_room_for_the_new_epoch_only() -> None:
    before = plan_of(THREE, ["box1", "box3"], [(0, 11), (11, 30)])
    boxes = {**EQUAL, "box2": roomy("box2", 12)}
    assert list(transition_missing(THREE, before, PLAN, boxes)) == ["box2"]
    assert transition_missing(THREE, before, PLAN, {**EQUAL, "box2": roomy("box2", 13)}) == {}


@settings(max_examples=100, deadline=None)
@given(sites(most_boxes=5, most_layers=12), st.integers(0, 10 * MIB))
def test_standby_is_what_merges_need_and_fits(site: tuple[PipelineSpec, dict[str, BoxCost]], converting: int) -> None:
    drawn, boxes = site
    head = replace(drawn.cost.head, converting=converting)
    spec = replace(drawn, cost=replace(drawn.cost, head=head))
    plan = whole_plan(spec, boxes, spec.boxes)
    assume(isinstance(plan, PipelinePlan))
    assert isinstance(plan, PipelinePlan)
    ready = standby(spec, plan, boxes, spec.boxes)
    assert list(ready) == list(spec.boxes)
    after = {lost: _merged(spec, plan, boxes, lost) for lost in spec.boxes}
    assert tuple(lost for lost in spec.boxes if plan.stage_of(lost) and after[lost] is None) == unsurvivable(
        spec, plan, boxes, spec.boxes
    )
    table = table_of(spec)
    for name, holding in ready.items():
        own = plan.stage_of(name)
        mine = (0, 0) if own is None else (own.start, own.end)
        wanted = set()
        for result in after.values():
            stage = None if result is None else result.stage_of(name)
            if stage is not None:
                wanted |= set(range(stage.start, stage.end)) - set(range(*mine))
        assert set(holding.layers) <= wanted
        if boxes[name].memory_bytes is None:
            assert set(holding.layers) == wanted
        size = _bytes(spec, holding.layers) + (spec.cost.head.held if holding.head else 0)
        assert table.stage(boxes[name], *mine, size).missing_bytes == 0


def _merged(spec: PipelineSpec, plan: PipelinePlan, boxes: dict[str, BoxCost], lost: str) -> PipelinePlan | None:
    result = merge(spec, plan, boxes, [name for name in spec.boxes if name != lost])
    return result if isinstance(result, PipelinePlan) else None


def _bytes(spec: PipelineSpec, held: Sequence[int]) -> int:
    return sum(spec.cost.layers[layer].held for layer in held)
