"""Times and memory of stages: measured replaces nominal, standby weights count, what is missing is what to add."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fleet.planning.cost import MIB, PROCESS_BASE_BYTES, BoxCost, CostTable
from fleet.planning.heal import whole_plan
from fleet.planning.plan import PipelinePlan
from fleet.planning.split import measure, split
from tests.planning.cases import by_name, roomy, spec_of_boxes
from tests.planning.test_split import LOAD, box, even_ranges, model

WIRE_SECONDS = 576 * 4 / 125e6


def test_measured_seconds_replace_nominal_ones() -> None:
    table = CostTable(model(), LOAD)
    measured = box("a").measured(0, layer_seconds=0.002, head_seconds=0.01)
    assert table.stage(measured, 0, 3).seconds == pytest.approx(3 * 0.002 + 0.01 + WIRE_SECONDS)
    assert table.stage(measured, 3, 7).seconds == pytest.approx(4 * 0.002 + WIRE_SECONDS)


def test_a_box_that_has_not_measured_the_head_reckons_it_from_its_own_layers() -> None:
    table = CostTable(model(layer_mib=7, head_mib=54), LOAD)
    measured = box("a").measured(0, layer_seconds=0.007, head_seconds=None)
    assert table.stage(measured, 0, 1).seconds == pytest.approx(0.007 + 0.054 + WIRE_SECONDS)


def test_measured_memory_replaces_what_the_inventory_says() -> None:
    nominal = box("a", memory_mib=1000)
    assert nominal.measured(2000 * MIB, None, None).memory_bytes == 2000 * MIB
    assert nominal.measured(0, None, None) == nominal, "what is not measured stays"
    known = nominal.measured(0, 0.002, 0.01)
    assert known.measured(0, None, None) == known


def test_a_slow_box_by_measure_gets_fewer_layers() -> None:
    spec = spec_of_boxes(["a", "b"], model(head_mib=0))
    boxes = by_name([box("a").measured(0, 0.002, None), box("b").measured(0, 0.001, None)])
    plan = whole_plan(spec, boxes, spec.boxes)
    assert isinstance(plan, PipelinePlan)
    assert [(stage.start, stage.end) for stage in plan.stages] == [(0, 10), (10, 30)]


def test_standby_weights_count_beside_the_own_stage() -> None:
    cost = replace(model(tied=False, head_mib=0), kv_bytes_per_token=0)
    table = CostTable(cost, LOAD)
    alone = table.stage(box("a"), 0, 5)
    assert table.stage(box("a"), 0, 5, standby_bytes=14 * MIB).needed_bytes == alone.needed_bytes + 14 * MIB
    assert table.stage(box("a"), 5, 5).needed_bytes == 0
    assert table.stage(box("a"), 5, 5, standby_bytes=14 * MIB).needed_bytes == PROCESS_BASE_BYTES + 14 * MIB


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 1 << 45), st.none() | st.integers(1, 1 << 45), st.integers(0, 1 << 40))
def test_what_is_missing_is_what_to_add(needed: int, memory: int | None, keep_free: int) -> None:
    one = BoxCost("a", 1e9, memory, keep_free, 1e9)
    missing = one.missing_bytes(needed)
    if memory is None:
        assert missing == 0
        return
    assert replace(one, memory_bytes=memory + missing).missing_bytes(needed) == 0
    if missing:
        assert replace(one, memory_bytes=memory + missing - 1).missing_bytes(needed) == 1
        assert one.usable_bytes <= needed + 1
    else:
        assert one.usable_bytes >= needed - 1


def test_unequal_memory_is_filled_by_need_and_not_in_equal_parts() -> None:
    """192, 128 and 64 GB in the field: an equal split overfills the last (here in MiB above the process)."""
    spec = spec_of_boxes(["large", "middle", "small"], model(30, layer_mib=10, head_mib=0, tied=False))
    boxes = by_name([roomy(name, room, layer_mib=11.5) for name, room in (("large", 19), ("middle", 13), ("small", 6))])
    table, ring = CostTable(spec.cost, LOAD), list(boxes.values())
    assert measure(table, ring, even_ranges(30, 3))[0] > 0
    plan = whole_plan(spec, boxes, spec.boxes)
    assert isinstance(plan, PipelinePlan)
    assert [stage.end - stage.start for stage in plan.stages] == [12, 12, 6]
    assert all(table.stage(boxes[s.box], s.start, s.end).missing_bytes == 0 for s in plan.stages)


@pytest.mark.parametrize("count", [1, 2, 3, 5, 7, 11, 30, 31, 60])
@pytest.mark.parametrize("tied", [True, False])
def test_any_number_of_boxes_gets_a_whole_plan(count: int, tied: bool) -> None:
    """No power of two, no divisor of the layers, more boxes than layers."""
    names = [f"box{index}" for index in range(count)]
    table, ring = CostTable(model(tied=tied), LOAD), [box(name) for name in names]
    ranges = split(table, ring)
    assert ranges[0][0] == 0 and ranges[-1][1] == 30 and len(ranges) == count
    assert measure(table, ring, ranges) <= measure(table, ring, even_ranges(30, count))


def test_equal_boxes_get_the_same_plan_whatever_their_speed_is() -> None:
    """Times are whole picoseconds: ties are ties, on every machine and at every speed."""
    plans = {
        tuple(split(CostTable(model(), LOAD), [box(name, speed=speed) for name in "abcde"]))
        for speed in (1e9, 3e9, 7.7e9, 1.1e10)
    }
    assert len(plans) == 1
