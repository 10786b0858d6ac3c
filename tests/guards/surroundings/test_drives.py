"""smartctl, hwmon and eMMC."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from guards.deadline import DeadlineReader
from guards.findings import Repair, State
from guards.settings import SurroundingsSettings
from guards.surroundings.drives import Drive, judge_drives, parse_smart, sense_drives
from tests.guards.surroundings.trees import fixture, plant, roots, tool

SETTINGS = SurroundingsSettings()


def sense(base: Path) -> tuple[Drive, ...]:
    return sense_drives(roots(base), DeadlineReader(5.0, 300.0), SETTINGS)


def smart(name: str) -> Drive:
    text = fixture(name)
    return parse_smart("sda", json.loads(text)["smartctl"]["exit_status"], text)


@pytest.mark.parametrize(
    ("file", "celsius", "state", "repair"),
    [
        ("smartctl_nvme.json", 46.0, State.HEALTHY, Repair.NONE),
        ("smartctl_sata.json", 38.0, State.HEALTHY, Repair.NONE),  # exit status 64: old entries in its error log
        ("smartctl_failing.json", 41.0, State.UNHEALTHY, Repair.CHECK_STORAGE),
        ("smartctl_usb.json", None, State.UNSUPPORTED, Repair.NONE),
        ("smartctl_absent.json", None, State.UNSUPPORTED, Repair.NONE),
        ("smartctl_denied.json", None, State.DEGRADED, Repair.CHECK_SENSOR),
    ],
)
def test_recorded_drives(file: str, celsius: float | None, state: State, repair: Repair) -> None:
    drive = smart(file)
    (finding,) = judge_drives([drive], SETTINGS)
    assert drive.celsius == celsius
    assert (finding.state, finding.repair) == (state, repair)


@pytest.mark.parametrize(("celsius", "state"), [(70, State.HEALTHY), (71, State.DEGRADED)])
def test_warm_drive(celsius: int, state: State) -> None:
    text = fixture("smartctl_nvme.json").replace('"current": 46', f'"current": {celsius}')
    (finding,) = judge_drives([parse_smart("nvme0n1", 0, text)], SETTINGS)
    assert finding.state is state


@pytest.mark.parametrize("celsius", ["0", "-128", "255", "null", '"hot"', "true"])
def test_a_temperature_that_can_not_be_is_none(celsius: str) -> None:
    text = fixture("smartctl_nvme.json").replace('"current": 46', f'"current": {celsius}')
    assert parse_smart("nvme0n1", 0, text).celsius is None


def test_nvme_critical_warning_and_old_smartctl() -> None:
    text = fixture("smartctl_nvme.json").replace('"critical_warning": 0', '"critical_warning": 4')
    (finding,) = judge_drives([parse_smart("nvme0n1", 8, text)], SETTINGS)
    assert finding.state is State.UNHEALTHY and "0x04" in finding.reason
    (old,) = judge_drives([parse_smart("sda", 1, "smartctl 6.6 2017-11-05\n=======> INVALID ARGUMENT: -j\n")], SETTINGS)
    assert old.state is State.DEGRADED and "7.0" in old.reason


GARBAGE = [
    '{"smartctl":[]}',
    '{"smartctl":{"messages":5}}',
    '{"temperature":{"current":NaN},"nvme_smart_health_information_log":{"critical_warning":Infinity}}',
    '{"temperature":{"current":1' + "0" * 400 + '},"nvme_smart_health_information_log":{"percentage_used":1e999}}',
]


@given(st.integers(0, 255), st.one_of(st.text(), st.from_type(type(None)).map(json.dumps), st.sampled_from(GARBAGE)))
def test_no_answer_makes_a_figure(code: int, text: str) -> None:
    drive = parse_smart("sda", code, text)
    assert drive.celsius is None
    assert judge_drives([drive], SETTINGS)[0].evidence["temperature_celsius"] is None


def test_only_built_in_drives_are_asked(tmp_path: Path) -> None:
    for name in ("loop0", "zram0", "dm-0", "ram0", "sda", "sr0", "mmcblk0boot0"):
        plant(tmp_path, f"sys/block/{name}/size = 1")
    plant(tmp_path, "sys/block/sda/removable = 0\nsys/block/sdb/removable = 1")
    tool(tmp_path, "smartctl", fixture("smartctl_sata.json"), 64)
    (drive,) = sense(tmp_path)
    assert (drive.name, drive.celsius, drive.passed) == ("sda", 38.0, True)


def test_nvme_without_rights_is_measured_by_hwmon(tmp_path: Path) -> None:
    plant(tmp_path, "sys/block/nvme0n1/device/hwmon1/temp1_input = 47850")
    tool(tmp_path, "smartctl", fixture("smartctl_denied.json"), 2)
    (drive,) = sense(tmp_path)
    assert drive.celsius == 47.85 and drive.passed is None
    (finding,) = judge_drives([drive], SETTINGS)
    assert finding.state is State.HEALTHY and "Permission denied" in finding.reason


def test_without_smartctl(tmp_path: Path) -> None:
    plant(tmp_path, "sys/block/sda/size = 1")
    (finding,) = judge_drives(sense(tmp_path), SETTINGS)
    assert finding.state is State.UNSUPPORTED and "not installed" in finding.reason


def test_a_smartctl_that_hangs_costs_its_deadline_only(tmp_path: Path) -> None:
    plant(tmp_path, "sys/block/sda/size = 1")
    tool(tmp_path, "smartctl", "")
    (tmp_path / "bin/smartctl").write_text("#!/bin/sh\nexec /bin/sleep 60\n")
    settings = SurroundingsSettings(tool_seconds=0.2)
    (drive,) = sense_drives(roots(tmp_path), DeadlineReader(5.0, 300.0), settings)
    assert "did not answer" in drive.problem
    assert judge_drives([drive], settings)[0].state is State.DEGRADED


@pytest.mark.parametrize(
    ("life_time", "reserve", "state"),
    [
        ("0x01 0x02", "0x01", State.HEALTHY),
        ("0x0a 0x02", "0x01", State.DEGRADED),
        ("0x0b 0x0b", "0x01", State.UNHEALTHY),
        ("0x01 0x01", "0x02", State.DEGRADED),
        ("0x01 0x01", "0x03", State.UNHEALTHY),
        ("0x00 0x00", "0x00", State.UNSUPPORTED),
    ],
)
def test_emmc_of_a_jetson(tmp_path: Path, life_time: str, reserve: str, state: State) -> None:
    plant(tmp_path, f"sys/block/mmcblk0/device/life_time = {life_time}")
    plant(tmp_path, f"sys/block/mmcblk0/device/pre_eol_info = {reserve}")
    (finding,) = judge_drives(sense(tmp_path), SETTINGS)
    assert finding.state is state
    assert finding.evidence["temperature_celsius"] is None


def test_sd_card_of_a_pi(tmp_path: Path) -> None:
    plant(tmp_path, "sys/block/mmcblk0/device/type = SD")
    (finding,) = judge_drives(sense(tmp_path), SETTINGS)
    assert finding.state is State.UNSUPPORTED
    assert sense(tmp_path / "nothing") == ()
