"""The control box, the coordinator or the gateway dies: the ring goes on, and every answer can be had to its end."""

from __future__ import annotations

import time

import pytest

from tests.figures import note
from tests.site import faults
from tests.site.commands import fleet
from tests.site.conftest import STAGE_BOXES
from tests.site.healing import Healing
from tests.site.streams import Run

pytestmark = pytest.mark.lab

COORDINATOR_DOWN_SECONDS = 3.0


def rings_formed(heal: Healing) -> dict[str, float]:
    """Box → times that its ring closed."""
    return {box: heal.watch.metric(box, "fleet_stage_rings_formed") for box in STAGE_BOXES}


def assert_resumed(run: Run) -> None:
    """Every stream was torn off and asked for again."""
    assert [stream.prompt.name for stream in run.streams if not stream.resumed] == []


def test_control_box_loses_power_and_comes_back(heal: Healing) -> None:
    control, formed, epoch = heal.box("control"), rings_formed(heal), heal.watch.pipeline()["epoch"]

    def cut_and_back() -> float:
        moment = faults.cut_power(control)
        control.on(wait=False)
        return moment

    run = heal.stream(fault=cut_and_back, resumable=True)
    heal.assert_equal(run, "the control box loses power and comes back")
    assert_resumed(run)
    heal.watch.wait_whole()
    assert (rings_formed(heal), heal.watch.pipeline()["epoch"]) == (formed, epoch)
    assert fleet("status", "-i", heal.site.file, expect=None).code == 0


def test_killed_gateway_gives_exactly_the_rest(heal: Healing) -> None:
    formed = rings_formed(heal)
    run = heal.stream(fault=lambda: faults.kill(heal.box("control"), "gateway"), resumable=True)
    heal.assert_equal(run, "the gateway is killed")
    assert_resumed(run)
    assert rings_formed(heal) == formed


def test_killed_coordinator_changes_nothing_that_works(heal: Healing) -> None:
    formed, epoch, before = rings_formed(heal), heal.watch.pipeline()["epoch"], heal.watch.last_event_id()
    run = heal.stream(fault=lambda: faults.kill(heal.box("control"), "coordinator"))
    heal.assert_equal(run, "the coordinator is killed")
    heal.watch.wait_for_event("coordinator-started", before)
    heal.watch.wait_whole()
    assert (rings_formed(heal), heal.watch.pipeline()["epoch"]) == (formed, epoch)


@pytest.mark.parametrize("kind", ["plan-preparing", "plan-committed", "plan-serving"])
def test_coordinator_killed_in_the_middle_of_a_switch(heal: Healing, kind: str) -> None:
    before, epoch = heal.watch.last_event_id(), heal.watch.pipeline()["epoch"]

    def kill_both() -> float:
        moment = faults.kill(heal.box("box2"))
        heal.watch.wait_for_event(kind, before)
        faults.kill(heal.box("control"), "coordinator")
        return moment

    run = heal.stream(fault=kill_both, until=heal.watch.is_whole)
    heal.assert_equal(run, f"box2 is killed, the coordinator at {kind}")
    events = heal.watch.events(before)
    assert "coordinator-started" in [event["kind"] for event in events]
    assert heal.watch.pipeline()["epoch"] > epoch


def test_stage_dies_while_the_coordinator_is_down(heal: Healing) -> None:
    control, before = heal.box("control"), heal.watch.last_event_id()

    def die_without_coordinator() -> float:
        faults.supervisor(control, "stop", "coordinator")
        faults.cut_power(heal.box("box2"))
        time.sleep(COORDINATOR_DOWN_SECONDS)
        moment = time.monotonic()
        faults.supervisor(control, "start", "coordinator")
        return moment

    run = heal.stream(fault=die_without_coordinator)
    heal.assert_equal(run, "box2 loses power while the coordinator is down")
    back = float(run.fault_result)
    first = [min(moment for moment in stream.times if moment > back) for stream in run.open_at(back)]
    assert len(first) == len(run.streams), "every stream waited"
    note(f"recovery after the coordinator's start: last stream goes on after {max(first) - back:.2f} s")
    heal.note_phases(heal.watch.wait_for_event("plan-serving", before), "after the coordinator's start")
    heal.assert_equal(heal.bring_back("box2"), "box2 comes back")
