"""Clocks of real boxes: five seconds off is named and put right by hand; 1970 is named, and stops no answer."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from fleet.provision.unit import UNIT_NAME
from tests.figures import note
from tests.lab.lab import LabBox
from tests.site import faults
from tests.site.commands import fleet
from tests.site.guarding import LAB_TIME_SERVER, guarded_inventory
from tests.site.healing import Healing

pytestmark = pytest.mark.lab

SKEW_SECONDS = 5.0
NAMED_SECONDS = 60.0
CHRONY_CONFIGURATION = "/run/fleet-lab-chrony.conf"
CHRONY_PID = "/run/fleet-lab-chrony.pid"


@contextmanager
def time_server(box: LabBox) -> Iterator[None]:
    """A chronyd that hands out the box's own clock."""
    assert box.address == LAB_TIME_SERVER
    lines = f"local stratum 8\nallow\ncmdport 0\nbindcmdaddress /\npidfile {CHRONY_PID}\n"
    box.write_file(CHRONY_CONFIGURATION, lines)
    box.exec(["chronyd", "-x", "-f", CHRONY_CONFIGURATION])
    try:
        yield
    finally:
        box.exec(["sh", "-c", f"kill $(cat {CHRONY_PID})"])


@pytest.fixture(scope="module")
def clocked(healing: Healing, lab_inventory: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The site with a time server, and a box1 whose clock can be shifted in every program."""
    inventory = guarded_inventory(lab_inventory, tmp_path_factory.mktemp("clocked"), time_servers=[LAB_TIME_SERVER])
    fleet("provision", inventory)
    box = healing.box("box1")
    box.install_clock_shim()
    box.exec(["systemctl", "restart", UNIT_NAME])
    healing.watch.wait_whole()
    with time_server(healing.box("control")):
        yield inventory
    fleet("provision", lab_inventory)


def test_a_clock_that_is_off_is_named_and_put_right(heal: Healing, clocked: Path) -> None:
    box = heal.box("box1")
    heal.watch.wait(lambda: is_ahead(heal, 0.0), "the clock is measured", NAMED_SECONDS)
    began = time.monotonic()
    run = heal.stream(
        fault=lambda: box.clock_skew(SKEW_SECONDS),
        until=lambda: is_ahead(heal, SKEW_SECONDS),
    )
    note(f"a clock 5 s ahead is named after {time.monotonic() - began:.0f} s")
    heal.assert_equal(run, "box1's clock is 5 s ahead")
    pushed = fleet("time", "push", "box1", "--yes", "-o", "json", "-i", clocked)
    note(f"fleet time push: {pushed.data}")
    heal.watch.wait(lambda: is_ahead(heal, 0.0), "the clock is right again", NAMED_SECONDS)


def test_the_drill_of_the_clock_puts_it_right_again(heal: Healing, clocked: Path) -> None:
    heal.watch.wait(lambda: is_ahead(heal, 0.0), "the clock is measured", NAMED_SECONDS)
    answer = fleet("drill", "clock", "box1", "--yes", "-o", "json", "-i", clocked)
    note(f"drill clock: {answer.data['tripped']}, well again after {answer.data['back_after_seconds']:.0f} s")
    assert not answer.data["noticed"]
    assert is_ahead(heal, 0.0)


def test_a_clock_of_1970_is_insane_and_stops_no_answer(heal: Healing, clocked: Path) -> None:
    del clocked
    box, before = heal.box("box1"), heal.watch.last_event_id()
    pid = faults.need_pid(box, "stage")
    try:
        run = heal.stream(fault=lambda: box.clock_skew(-time.time()), until=lambda: "insane" in clock_reason(heal))
        heal.assert_equal(run, "box1 lives in 1970")
        assert faults.need_pid(box, "stage") == pid
        assert not heal.committed(before), "the clock moves no layers"
    finally:
        box.clock_skew(0.0)
    heal.watch.wait(lambda: "insane" not in clock_reason(heal), "the clock is sane again", NAMED_SECONDS)


def is_ahead(site: Healing, seconds: float) -> bool:
    """Whether box1's guard knows its clock to be so far ahead."""
    finding = site.watch.finding("box1", "clock", "clock")
    offset = None if finding is None else finding["evidence"].get("offset_milliseconds")
    return offset is not None and abs(float(offset) / 1e3 - seconds) < SKEW_SECONDS / 5


def clock_reason(site: Healing) -> str:
    """What box1's guard says of its clock."""
    finding = site.watch.finding("box1", "clock", "clock")
    return "" if finding is None else str(finding["reason"])
