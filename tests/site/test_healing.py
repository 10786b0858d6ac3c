"""A box dies and its layers move to its neighbours: every open answer goes on, and again when it comes back."""

from __future__ import annotations

import time

import pytest

from tests.figures import note
from tests.lab.lab import LabBox
from tests.site import faults
from tests.site.commands import fleet
from tests.site.conftest import STAGE_BOXES
from tests.site.healing import Healing

pytestmark = pytest.mark.lab

FLAPS = 20
FLAP_DOWN_SECONDS = 1.2
FLAP_UP_SECONDS = 1.8
MOST_RE_PLANS = 2
MOST_GROWTH_BYTES = 24 << 20
"""Of a program's proportional set size over a minute of flapping: allocator and caches move by some MiB."""


@pytest.mark.parametrize("name", STAGE_BOXES)
def test_open_answers_survive_a_quiet_power_cut_and_the_return_of_the_box(heal: Healing, name: str) -> None:
    box, before = heal.box(name), heal.watch.last_event_id()
    run = heal.stream(fault=lambda: faults.cut_power_silently(box))
    heal.assert_equal(run, f"{name} loses power")
    assert heal.watch.wait_for_event("box-dead", before, box=name)
    heal.note_phases(heal.watch.wait_for_event("plan-serving", before), f"{name} loses power")
    left = heal.watch.layers()
    assert set(left) == set(STAGE_BOXES) - {name}
    assert sorted(layer for start, end in left.values() for layer in range(start, end)) == list(range(30))
    shown = fleet("status", "-i", heal.site.file, "-o", "json", expect=3).data["coordinator"]["plans"][0]
    assert shown["degraded"] and name not in shown["order"]

    back = heal.bring_back(name)
    heal.assert_equal(back, f"{name} comes back")
    assert set(heal.watch.layers()) == set(STAGE_BOXES)


def test_the_last_of_three_boxes_serves_the_whole_model(heal: Healing) -> None:
    def two_deaths() -> float:
        before = heal.watch.last_event_id()
        moment = faults.cut_power(heal.box("box1"))
        between = heal.watch.wait_for_event("plan-serving", before)["id"]
        faults.cut_power(heal.box("box2"))
        heal.watch.wait_for_event("plan-serving", between)
        return moment

    run = heal.stream(fault=two_deaths, until=heal.watch.is_ready)
    heal.assert_equal(run, "box1, then box2 lose power")
    assert heal.watch.layers() == {"box3": (0, 30)}
    heal.assert_equal(heal.bring_back("box1", "box2"), "both come back")


def test_a_second_box_that_dies_during_prepare_is_left_out_too(heal: Healing) -> None:
    before = heal.watch.last_event_id()

    def death_in_prepare() -> float:
        moment = faults.kill(heal.box("box1"))
        heal.watch.wait_for_event("plan-preparing", before)
        faults.kill(heal.box("box2"))
        return moment

    run = heal.stream(fault=death_in_prepare, until=heal.watch.is_whole)
    heal.assert_equal(run, "box1 is killed, box2 while the next plan is prepared")
    events = heal.watch.events(before)
    note("second death: " + ", ".join(event["kind"] for event in events))
    assert {event["box"] for event in events if event["kind"] == "box-dead"} == {"box1", "box2"}


def test_a_stopped_stage_that_goes_on_after_the_merge_corrupts_nothing(heal: Healing) -> None:
    box, before = heal.box("box2"), heal.watch.last_event_id()

    def stop_and_go_on() -> float:
        moment = faults.stop(box)
        heal.watch.wait_for_event("plan-serving", before)
        faults.go_on(box)
        return moment

    run = heal.stream(fault=stop_and_go_on, until=heal.watch.is_whole)
    heal.assert_equal(run, "box2 is stopped, merged away, and goes on")
    assert heal.watch.wait_for_event("box-dead", before, box="box2")
    assert set(heal.watch.layers()) == set(STAGE_BOXES)


def test_a_flapping_box_makes_two_plans_at_most_and_costs_no_memory(heal: Healing) -> None:
    box, before = heal.box("box2"), heal.watch.last_event_id()
    programs: list[tuple[LabBox, faults.ProgramName]] = [
        (heal.box("control"), "coordinator"),
        (heal.box("box1"), "stage"),
        (heal.box("box3"), "stage"),
    ]
    sizes: list[list[int]] = []

    def flap() -> float:
        moment = time.monotonic()
        for number in range(FLAPS):
            faults.cut_link(box)
            time.sleep(FLAP_DOWN_SECONDS)
            box.link_heal()
            time.sleep(FLAP_UP_SECONDS)
            if number in (FLAPS // 2, FLAPS - 1):  # merge and standby layers of the survivors are done by the first
                sizes.append([faults.pss_bytes(*program) for program in programs])
        return moment

    run = heal.stream(fault=flap, until=lambda: True)
    plans = len(heal.committed(before))
    heal.assert_equal(run, f"box2 is unplugged {FLAPS} times in a minute")
    growth = [after - first for first, after in zip(*sizes, strict=True)]
    mebibytes = ", ".join(
        f"{box.name} {size / 2**20:+.1f} MiB" for (box, _), size in zip(programs, growth, strict=True)
    )
    note(f"flapping: {plans} plans, memory {mebibytes}")
    assert plans <= MOST_RE_PLANS, heal.watch.report()
    assert max(growth) <= MOST_GROWTH_BYTES
    heal.watch.wait_whole()
    assert len(heal.committed(before)) <= plans + 1, "the return is one plan more"
