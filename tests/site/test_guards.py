"""Guards of real boxes: each trips, acts gently, and recovers, while answers go on."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.figures import note
from tests.lab.lab import LabBox
from tests.site import faults
from tests.site.commands import fleet
from tests.site.guarding import guarded_inventory
from tests.site.healing import BACK_DEADLINE_SECONDS, Healing

pytestmark = pytest.mark.lab

HOT_CELSIUS, COOL_CELSIUS = 86.0, 55.0
ACT_SECONDS = 60.0
LEAK_BYTES_PER_SECOND = 1_000_000.0
LEAK_DEADLINE_SECONDS = 240.0
GUARD_KILLS = 10
OLD_LOG_BYTES = 400_000_000
LEFT_BYTES = 60_000_000
MEASURED_SECONDS = 30.0


@pytest.fixture(scope="module")
def short_guards(healing: Healing, lab_inventory: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Short guards on every box while these tests run; only the guards start anew for it. Gives the inventory."""
    stages = {name: faults.need_pid(healing.box(name), "stage") for name in healing.watch.boxes}
    inventory = guarded_inventory(lab_inventory, tmp_path_factory.mktemp("guarded"))
    fleet("provision", inventory)
    assert stages == {name: faults.need_pid(healing.box(name), "stage") for name in healing.watch.boxes}
    yield inventory
    fleet("provision", lab_inventory)


@pytest.fixture
def guarded(heal: Healing, short_guards: Path) -> Healing:
    """The site, whole, with short guards that have looked."""
    del short_guards
    for name in heal.watch.boxes:
        heal.watch.wait_for_finding(name, "liveness", "program/stage", "healthy", seconds=ACT_SECONDS)
    return heal


def limit_of(site: Healing, box: str) -> int:
    """Sequences in one micro-batch that a stage allows."""
    return int(site.watch.health(box)["batch_limit_sequences"])


def last_act(site: Healing, box: str) -> float:
    """When a box's guards did something last, by their own clock."""
    return max((float(event["running_seconds"]) for event in site.watch.guards(box)["events"]), default=0.0)


def has_done(site: Healing, box: str, what: str, since: float) -> bool:
    """Whether its guards have done such a repair after that."""
    return any(
        event["kind"] == "done" and what in event["text"] and event["running_seconds"] > since
        for event in site.watch.guards(box)["events"]
    )


def test_heat_lowers_the_batch_limit_and_tokens_go_on(guarded: Healing) -> None:
    box, before = guarded.box("box2"), guarded.watch.last_event_id()
    box.set_temperature("cpu-thermal", COOL_CELSIUS)
    guarded.watch.wait_for_finding("box2", "thermal", "temperature", "healthy", seconds=ACT_SECONDS)
    most, pid = int(guarded.watch.health("box2")["max_batch_sequences"]), faults.need_pid(box, "stage")
    assert limit_of(guarded, "box2") == most
    rounds: list[int] = []

    def heat() -> float:
        rounds.append(guarded.watch.guards("box2")["guards"]["thermal"]["rounds"])
        box.set_temperature("cpu-thermal", HOT_CELSIUS)
        return time.monotonic()

    def is_lower() -> bool:
        if limit_of(guarded, "box2") == most:
            return False
        rounds.append(guarded.watch.guards("box2")["guards"]["thermal"]["rounds"])
        return True

    try:
        run = guarded.stream(fault=heat, until=is_lower)
        guarded.assert_equal(run, "box2 at 86 °C")
        assert rounds[1] - rounds[0] <= 2, "the round under way and the next one"
        note(f"heat: batch limit {most} → {limit_of(guarded, 'box2')} within {rounds[1] - rounds[0]} rounds")
    finally:
        box.set_temperature("cpu-thermal", COOL_CELSIUS)
    guarded.watch.wait(lambda: limit_of(guarded, "box2") == most, "the batch limit is back", ACT_SECONDS)
    assert faults.need_pid(box, "stage") == pid
    assert not guarded.committed(before), "heat moves no layers"


def test_a_leaking_stage_is_drained_and_restarted(guarded: Healing) -> None:
    box = guarded.box("box2")
    box.leak(0.0)
    before = guarded.watch.last_event_id()
    faults.kill(box)  # the stage that starts now has the leak in it
    guarded.watch.wait_for_event("box-dead", before, box="box2")
    guarded.watch.wait_whole(BACK_DEADLINE_SECONDS)
    before, pid, acts = guarded.watch.last_event_id(), faults.need_pid(box, "stage"), last_act(guarded, "box2")

    def begin() -> float:
        box.leak(LEAK_BYTES_PER_SECOND)
        return time.monotonic()

    def has_a_new_stage() -> bool:
        new = faults.program_pid(box, "stage") not in (None, pid)
        if new:
            box.leak(0.0)
        return new and guarded.watch.is_whole()

    began = time.monotonic()
    run = guarded.stream(fault=begin, until=has_a_new_stage, until_seconds=LEAK_DEADLINE_SECONDS)
    note(f"leak of {LEAK_BYTES_PER_SECOND / 1e6:g} MB/s: found and mended in {time.monotonic() - began:.0f} s")
    guarded.assert_equal(run, "a stage that leaks is restarted")
    assert guarded.watch.wait_for_event("lease-taken", before, box="box2")
    assert guarded.watch.wait_for_event("lease-returned", before, box="box2")
    assert not [event for event in guarded.watch.events(before) if event["kind"] == "box-dead"], guarded.watch.report()
    assert has_done(guarded, "box2", "restart-program stage", acts)


def test_a_stopped_stage_is_killed_and_starts_anew(guarded: Healing) -> None:
    box = guarded.box("box3")
    pid, acts = faults.need_pid(box, "stage"), last_act(guarded, "box3")
    run = guarded.stream(
        fault=lambda: faults.stop(box),
        until=lambda: faults.program_pid(box, "stage") not in (None, pid) and guarded.watch.is_whole(),
    )
    guarded.assert_equal(run, "SIGSTOP, mended by the guard")
    guarded.watch.wait(lambda: has_done(guarded, "box3", "kill-program stage", acts), "the guard says so", ACT_SECONDS)


def test_a_full_disk_costs_old_logs_and_no_service(guarded: Healing) -> None:
    box = guarded.box("box1")
    pid = faults.need_pid(box, "stage")
    box.exec(["fallocate", "--length", str(OLD_LOG_BYTES), "/var/log/fleet/stage.log.7"])
    try:
        run = guarded.stream(
            fault=lambda: fill(box), until=lambda: not box.inside("/var/log/fleet/stage.log.7").exists()
        )
        guarded.assert_equal(run, "the disk is full, old logs go")
        assert box.inside("/var/log/fleet/stage.log").exists()
        guarded.watch.wait_for_finding("box1", "surroundings", "disk/opt/fleet", "degraded", seconds=ACT_SECONDS)
        scrape = guarded.watch.guards_metrics("box1")
        assert 'fleet_guard_used_percent{guard="surroundings",part="disk/opt/fleet"}' in scrape
    finally:
        box.disk_unfill()
    guarded.watch.wait_for_finding("box1", "surroundings", "disk/opt/fleet", "healthy", seconds=ACT_SECONDS)
    assert faults.need_pid(box, "stage") == pid


def fill(box: LabBox) -> float:
    """A disk above every bound."""
    moment = time.monotonic()
    box.disk_fill(leave_bytes=LEFT_BYTES)
    return moment


def test_guards_that_are_killed_come_back_with_their_budgets(guarded: Healing) -> None:
    box, stage = guarded.box("box3"), faults.need_pid(guarded.box("box3"), "stage")
    budgets = guarded.watch.guards("box3")["budgets_left"]
    for _ in range(GUARD_KILLS):
        kill_guards(guarded, box)
    assert guarded.watch.guards("box3")["budgets_left"] == budgets
    assert faults.need_pid(box, "stage") == stage


def kill_guards(site: Healing, box: LabBox) -> None:
    """SIGKILL, and wait until a new process has looked."""
    pid = faults.need_pid(box, "guards")
    os.kill(pid, signal.SIGKILL)
    site.watch.wait(lambda: faults.program_pid(box, "guards") not in (None, pid), "the guards start anew", ACT_SECONDS)
    site.watch.wait_for_finding(box.name, "liveness", "program/stage", "healthy", seconds=ACT_SECONDS)


@pytest.mark.parametrize("kind", ["heat", "disk-full"])
def test_a_drill_makes_the_guards_of_a_live_box_trip_and_recover(
    guarded: Healing, short_guards: Path, kind: str
) -> None:
    """Box1 has no sensor of its own, and nothing of the drill is left on it."""
    box, most = guarded.box("box1"), limit_of(guarded, "box1")
    free = box.exec(["df", "--output=avail", "-B", "1M", "/opt/fleet"]).stdout.split()[1]
    answer = fleet("drill", kind, "box1", "--yes", "-o", "json", "-i", short_guards)
    tripped, back = answer.data["tripped_after_seconds"], answer.data["back_after_seconds"]
    note(f"drill {kind}: tripped after {tripped:.0f} s ({answer.data['tripped']}), well again after {back:.0f} s")
    assert not answer.data["noticed"]
    assert limit_of(guarded, "box1") == most
    left = box.exec(["df", "--output=avail", "-B", "1M", "/opt/fleet"]).stdout.split()[1]
    assert abs(int(left) - int(free)) < LEFT_BYTES / 1e6
    assert not box.inside("/run/fleet/drill").exists()


def test_guards_cost_little(guarded: Healing) -> None:
    """The figures of the goals: memory and share of a core, all guards on, at the lab's short periods."""
    pid = faults.need_pid(guarded.box("box1"), "guards")
    before = used_seconds(pid)
    time.sleep(MEASURED_SECONDS)
    share = (used_seconds(pid) - before) / MEASURED_SECONDS
    resident = next(
        int(line.split()[1]) * 1024
        for line in Path(f"/proc/{pid}/status").read_text(encoding="ascii").splitlines()
        if line.startswith("VmRSS:")
    )
    note(f"guards: {resident / 2**20:.1f} MiB RSS, {100 * share:.2f} % of a core at the lab's periods")
    assert resident > 0


def used_seconds(pid: int) -> float:
    """CPU time of a process, user and system."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
