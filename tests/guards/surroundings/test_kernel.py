"""Under-voltage, kills for memory, failed units."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from guards.deadline import DeadlineReader
from guards.findings import Repair, State
from guards.settings import SurroundingsSettings
from guards.surroundings.kernel_log import Kmsg, parse_record, parse_stamped, read_by_tool
from guards.surroundings.oom import Kill, OomMemory, OomReading, OomSensor, acknowledged, find_kills, judge_oom
from guards.surroundings.supply import judge_supply, sense_supply
from guards.surroundings.units import judge_units, parse_units, sense_units
from tests.guards.surroundings.trees import fixture, plant, roots, tool

SETTINGS = SurroundingsSettings()


def reader() -> DeadlineReader:
    return DeadlineReader(5.0, 300.0)


@pytest.mark.parametrize(
    ("word", "state", "since_boot"),
    [
        ("0", State.HEALTHY, False),
        ("50000", State.HEALTHY, True),  # some time since boot, not now
        ("50005", State.UNHEALTHY, True),
        ("80008", State.HEALTHY, False),  # heat only
        ("1", State.UNHEALTHY, False),
    ],
)
@pytest.mark.parametrize("bus", ["soc", "soc@107c000000"])
def test_under_voltage_of_a_pi(tmp_path: Path, bus: str, word: str, state: State, since_boot: bool) -> None:
    plant(tmp_path, f"sys/devices/platform/{bus}/{bus}:firmware/get_throttled = {word}")
    (finding,) = judge_supply(sense_supply(roots(tmp_path), reader()))
    assert finding.state is state
    assert finding.evidence["under_voltage_since_boot"] is since_boot


@pytest.mark.parametrize(("alarm", "state"), [("0", State.HEALTHY), ("1", State.UNHEALTHY), ("?", State.DEGRADED)])
def test_under_voltage_by_hwmon(tmp_path: Path, alarm: str, state: State) -> None:
    plant(tmp_path, "sys/class/hwmon/hwmon0/name = cpu_thermal\nsys/class/hwmon/hwmon1/name = rpi_volt\n")
    plant(tmp_path, f"sys/class/hwmon/hwmon1/in0_lcrit_alarm = {alarm}")
    plant(tmp_path, "sys/devices/platform/soc/soc:firmware/get_throttled = garbage!")
    (finding,) = judge_supply(sense_supply(roots(tmp_path), reader()))
    assert finding.state is state


def test_no_supply_sensor(tmp_path: Path) -> None:
    (finding,) = judge_supply(sense_supply(roots(tmp_path), reader()))
    assert (finding.state, finding.evidence["under_voltage"]) == (State.UNSUPPORTED, None)


def test_lines_of_kills() -> None:
    new = find_kills(parse_stamped(fixture("dmesg_oom.txt")))
    assert new == (Kill(812.402511, "python (734)"), Kill(2044.118201, "ollama runner (1911)"))
    assert find_kills(parse_stamped(fixture("dmesg_oom_old.txt"))) == (Kill(301.331002, "python3 (5120)"),)
    assert find_kills(parse_stamped(fixture("journal_oom.txt"))) == (Kill(812.402511, "python (734)"),)
    records = fixture("kmsg_oom.txt").splitlines()
    lines = tuple(line for record in records if (line := parse_record(record)) is not None)
    assert find_kills(lines) == (Kill(812.402511, "python (734)"),)


@given(st.text())
def test_no_record_crashes(record: str) -> None:
    line = parse_record(record)
    assert line is None or line.seconds == line.seconds
    assert all(each.text is not None for each in parse_stamped(record))


def test_kmsg_brings_each_record_once(tmp_path: Path) -> None:
    plant(tmp_path, "dev/")
    os.mkfifo(tmp_path / "dev/kmsg")
    kmsg = Kmsg(roots(tmp_path))
    assert kmsg.lines() == ()
    with (tmp_path / "dev/kmsg").open("wb", buffering=0) as writer:
        writer.write(b"3,1,1000000,-;one\n")
        assert [line.text for line in kmsg.lines()] == ["one"]
        assert kmsg.lines() == ()


def reading(
    kills: tuple[Kill, ...] | None, boot: str = "a", machine: int | None = 0, group: int | None = 0
) -> OomReading:
    return OomReading(boot, machine, group, kills, "not permitted" if kills is None else "")


KILL = Kill(100.0, "python (7)")


def test_a_kill_is_news_once_and_for_a_while() -> None:
    (finding,), memory = judge_oom(reading((KILL,), machine=1), OomMemory(), SETTINGS, 1000.0)
    assert finding.state is State.DEGRADED and "python (7)" in finding.reason
    # the same line again, as dmesg gives it: still one
    (finding,), memory = judge_oom(reading((KILL,), machine=1), memory, SETTINGS, 1030.0)
    assert finding.evidence["kills_not_acknowledged"] == 1
    (finding,), memory = judge_oom(reading((KILL,), machine=1), memory, SETTINGS, 1000.0 + SETTINGS.oom_shown_seconds)
    assert finding.state is State.HEALTHY
    (finding,), _ = judge_oom(reading((KILL, Kill(200.0, "x (8)"))), memory, SETTINGS, 9000.0)
    assert finding.state is State.DEGRADED and finding.evidence["kills_not_acknowledged"] == 1


def test_an_acknowledged_kill_is_no_news() -> None:
    _, memory = judge_oom(reading((KILL,)), OomMemory(), SETTINGS, 1000.0)
    (finding,), _ = judge_oom(reading((KILL,)), acknowledged(memory), SETTINGS, 1001.0)
    assert finding.state is State.HEALTHY


def test_another_boot_begins_at_zero() -> None:
    _, memory = judge_oom(reading((Kill(5000.0, "old (1)"),), machine=9), OomMemory(), SETTINGS, 1000.0)
    (finding,), later = judge_oom(reading((KILL,), boot="b", machine=1), acknowledged(memory), SETTINGS, 1100.0)
    assert finding.evidence["kills_not_acknowledged"] == 1
    assert later.told_seconds == KILL.seconds


def test_counters_speak_where_the_log_may_not_be_read() -> None:
    (finding,), memory = judge_oom(reading(None, machine=2), OomMemory(), SETTINGS, 0.0)
    assert finding.state is State.DEGRADED and "2 somewhere" in finding.reason
    (finding,), memory = judge_oom(reading(None, machine=2), acknowledged(memory), SETTINGS, 30.0)
    assert finding.state is State.HEALTHY
    (finding,), memory = judge_oom(reading((), machine=3, group=1), memory, SETTINGS, 60.0)
    assert finding.state is State.DEGRADED and "in this service" in finding.reason
    (finding,), _ = judge_oom(reading(None, machine=None, group=None), OomMemory(), SETTINGS, 0.0)
    assert finding.state is State.UNSUPPORTED


VMSTAT = "nr_free_pages 1000\\nnr_dirty 3\\noom_kill {}"


@pytest.mark.parametrize(
    ("cgroup", "file", "content"),
    [
        ("0::/system.slice/fleet.service", "system.slice/fleet.service/memory.events", "low 0\\noom 1\\noom_kill 4"),
        ("0::/not/seen/here", "memory.events", "oom_kill 4"),
        ("4:memory:/box\\n0::/", "memory/box/memory.oom_control", "oom_kill_disable 0\\nunder_oom 0\\noom_kill 4"),
        ("4:memory:/box\\n0::/", "memory/memory.oom_control", "oom_kill 4"),
    ],
)
def test_counter_of_our_group(tmp_path: Path, cgroup: str, file: str, content: str) -> None:
    plant(tmp_path, f"proc/vmstat = {VMSTAT.format(3)}\nproc/self/cgroup = {cgroup}\nsys/fs/cgroup/{file} = {content}")
    seen = OomSensor(roots(tmp_path), reader(), SETTINGS).sense()
    assert (seen.machine, seen.group) == (3, 4)


def test_the_tool_is_started_only_when_a_counter_moves(tmp_path: Path) -> None:
    plant(tmp_path, f"proc/vmstat = {VMSTAT.format(0)}\nproc/sys/kernel/random/boot_id = b7e1")
    tool(tmp_path, "dmesg", "[    1.000000] quiet\n")
    clock = [0.0]
    sensor = OomSensor(roots(tmp_path), reader(), SETTINGS, lambda: clock[0])
    assert [sensor.sense().kills for _ in range(3)] == [(), (), ()]
    tool(tmp_path, "dmesg", fixture("dmesg_oom.txt"))
    assert sensor.sense().kills == ()  # nothing has moved: no look
    plant(tmp_path, f"proc/vmstat = {VMSTAT.format(2)}")
    seen = sensor.sense()
    assert (seen.boot, seen.machine) == ("b7e1", 2) and seen.kills is not None and len(seen.kills) == 2
    sensor.sense()
    assert sensor.sense().kills == ()
    clock[0] = SETTINGS.kernel_log_period_seconds
    assert sensor.sense().kills is not None and len(sensor.sense().kills or ()) == 0


def test_the_journal_stands_in_for_dmesg(tmp_path: Path) -> None:
    tool(tmp_path, "dmesg", "", 1)
    tool(tmp_path, "journalctl", fixture("journal_oom.txt"))
    assert len(read_by_tool(roots(tmp_path), 5.0)) == 1


def test_no_log_is_no_crash(tmp_path: Path) -> None:
    seen = OomSensor(roots(tmp_path), reader(), SETTINGS).sense()
    assert seen.kills is None and "dmesg" in seen.problem and "journalctl" in seen.problem
    assert (seen.machine, seen.group, seen.boot) == (None, None, "")


@pytest.mark.parametrize(("file", "count"), [("systemctl_failed.txt", 2), ("systemctl_failed_bullets.txt", 1)])
def test_failed_units(tmp_path: Path, file: str, count: int) -> None:
    assert len(parse_units(fixture(file))) == count
    plant(tmp_path, "run/systemd/system/")
    tool(tmp_path, "systemctl", fixture(file))
    (finding,) = judge_units(sense_units(roots(tmp_path), SETTINGS), SETTINGS)
    assert (finding.state, finding.repair) == (State.DEGRADED, Repair.CHECK_PROGRAM)
    assert "nvargus-daemon.service" in finding.reason and finding.evidence["failed_units"] == count


def test_units_without_systemd_and_with_a_sick_one(tmp_path: Path) -> None:
    tool(tmp_path, "systemctl", "")
    assert judge_units(sense_units(roots(tmp_path), SETTINGS), SETTINGS)[0].state is State.UNSUPPORTED
    plant(tmp_path, "run/systemd/system/")
    assert judge_units(sense_units(roots(tmp_path), SETTINGS), SETTINGS)[0].state is State.HEALTHY
    tool(tmp_path, "systemctl", "", 1)
    assert judge_units(sense_units(roots(tmp_path), SETTINGS), SETTINGS)[0].state is State.DEGRADED
