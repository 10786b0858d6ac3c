"""All of the surroundings together."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from guards.findings import Action, Repair, State
from guards.guard import ActionFailed, Guard
from guards.settings import SurroundingsSettings
from guards.surroundings.guard import SurroundingsGuard, SurroundingsMemory, SurroundingsReading, budgets
from guards.surroundings.links import Nominal
from tests.guards.surroundings.trees import fixture, plant, roots, tool

# a real file system is always fuller than that, or never
FULL, EMPTY = SurroundingsSettings(disk_full_percent=-1.0), SurroundingsSettings(disk_full_percent=100.0)


def guard(base: Path, settings: SurroundingsSettings, clock: list[float] | None = None) -> SurroundingsGuard:
    logs = base / "log"
    logs.mkdir(exist_ok=True)
    time = clock or [0.0]
    return SurroundingsGuard(
        settings,
        roots(base),
        directories=[base],
        log_directory=logs,
        data_link=Nominal(1000.0),
        monotonic=lambda: time[0],
    )


def test_a_full_disk_of_logs_is_emptied_of_old_ones(tmp_path: Path) -> None:
    made: Guard[SurroundingsReading, SurroundingsMemory] = guard(tmp_path, FULL)
    for name in ("stage.log", "stage.log.1", "stage.log.2"):
        (tmp_path / "log" / name).write_text("x")
    decision = made.decide(made.sense(), made.first_memory(), 0.0)
    (action,) = decision.actions
    assert (action.repair, action.budget) == (Repair.DROP_OLD_LOGS, "log-drop")
    assert action.budget in budgets(FULL)
    assert made.act(action) == "removed stage.log.2, stage.log.1"
    later = made.decide(made.sense(), decision.memory, 30.0)
    assert later.actions == ()  # none left
    assert [each.name for each in (tmp_path / "log").iterdir()] == ["stage.log"]
    full = next(finding for finding in later.findings if finding.part == f"disk{tmp_path}")
    assert full.state is State.UNHEALTHY


def test_logs_on_another_file_system_make_no_room(tmp_path: Path) -> None:
    made = guard(tmp_path, FULL)
    (tmp_path / "log/stage.log.1").write_text("x")
    reading = made.sense()
    elsewhere = replace(reading, logs=replace(reading.logs, device=-1))
    assert len(made.decide(reading, made.first_memory(), 0.0).actions) == 1
    assert made.decide(elsewhere, made.first_memory(), 0.0).actions == ()


def test_room_enough_removes_nothing(tmp_path: Path) -> None:
    made = guard(tmp_path, EMPTY)
    (tmp_path / "log/stage.log.1").write_text("x")
    assert made.decide(made.sense(), made.first_memory(), 0.0).actions == ()
    drop = Action(Repair.DROP_OLD_LOGS, str(tmp_path / "log"), "")
    assert made.act(drop) == "there was room again"
    assert (tmp_path / "log/stage.log.1").exists()


def test_an_action_that_can_not_be_done(tmp_path: Path) -> None:
    made = guard(tmp_path, FULL)
    (tmp_path / "log").rmdir()
    with pytest.raises(ActionFailed, match="No such file"):
        made.act(Action(Repair.DROP_OLD_LOGS, "log", ""))
    with pytest.raises(ActionFailed, match="limit-batch"):
        made.act(Action(Repair.LIMIT_BATCH, "stage", ""))


def test_a_bare_box_is_no_crash_and_no_number(tmp_path: Path) -> None:
    made = guard(tmp_path, EMPTY)
    decision = made.decide(made.sense(), made.first_memory(), 0.0)
    parts = [finding.part for finding in decision.findings]
    assert len(set(parts)) == len(parts)
    assert {"supply", "oom", "units", "logs", "nic", "mount" + str(tmp_path)} <= set(parts)


def test_slow_looks_are_taken_less_often(tmp_path: Path) -> None:
    plant(tmp_path, "sys/block/sda/size = 1\nrun/systemd/system/")
    tool(tmp_path, "smartctl", fixture("smartctl_sata.json"))
    tool(tmp_path, "systemctl", "")
    clock = [0.0]
    made = guard(tmp_path, EMPTY, clock)
    assert made.sense().drives[0].celsius == 38.0
    tool(tmp_path, "smartctl", fixture("smartctl_failing.json"), 24)
    tool(tmp_path, "systemctl", fixture("systemctl_failed.txt"))
    clock[0] = 299.0
    seen = made.sense()
    assert (seen.drives[0].celsius, seen.units.failed) == (38.0, ())
    clock[0] = 300.0
    seen = made.sense()
    assert seen.drives[0].celsius == 41.0 and len(seen.units.failed or ()) == 2


def test_memory_outlives_a_reboot(tmp_path: Path) -> None:
    plant(tmp_path, fixture("net_jetson.txt"))
    plant(tmp_path, "proc/vmstat = oom_kill 1\nproc/sys/kernel/random/boot_id = b1")
    tool(tmp_path, "dmesg", fixture("dmesg_oom.txt"))
    made = guard(tmp_path, EMPTY)
    memory = made.decide(made.sense(), made.first_memory(), 5.0).memory
    again = made.memory_from_json(json.loads(json.dumps(made.memory_to_json(memory))))
    assert again.oom == memory.oom and len(again.oom.news) == 2
    assert again.links.once_up == frozenset({"eno1"})
    with pytest.raises(KeyError):
        made.memory_from_json({})


def test_on_this_machine(tmp_path: Path) -> None:
    from guards.roots import Roots

    made = SurroundingsGuard(EMPTY, Roots(), directories=[tmp_path], log_directory=tmp_path, data_link=Nominal(100.0))
    decision = made.decide(made.sense(), made.first_memory(), 0.0)
    states = {finding.part: finding.state for finding in decision.findings}
    assert states[f"disk{tmp_path}"] in (State.HEALTHY, State.DEGRADED)
    assert states["logs"] is State.INITIALISING
    assert "oom" in states and any(part.startswith("mount/") for part in states)
