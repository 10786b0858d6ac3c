"""Disk space, inodes, read-only mounts and ext4 errors."""

from __future__ import annotations

from pathlib import Path

import pytest

from guards.deadline import DeadlineReader
from guards.findings import Repair, State
from guards.settings import SurroundingsSettings
from guards.surroundings.mounts import judge_mounts, mount_of, parse_mountinfo, sense_mounts
from guards.surroundings.space import Space, judge_space, sense_space
from tests.guards.surroundings.trees import fixture, plant, roots

SETTINGS = SurroundingsSettings()


def reader() -> DeadlineReader:
    return DeadlineReader(5.0, 300.0)


def space(used: float | None, inodes: float | None = 10.0, problem: str = "") -> Space:
    return Space("/var/log/fleet", 1, used, 10**9, inodes, problem)


@pytest.mark.parametrize(
    ("seen", "state", "repair"),
    [
        (space(80.0), State.HEALTHY, Repair.NONE),
        (space(80.1), State.DEGRADED, Repair.CHECK_STORAGE),
        (space(95.1), State.UNHEALTHY, Repair.DROP_OLD_LOGS),
        (space(50.0, inodes=91.0), State.DEGRADED, Repair.CHECK_STORAGE),
        (space(50.0, inodes=None), State.HEALTHY, Repair.NONE),
        (space(None, problem="no answer within 2 s"), State.DEGRADED, Repair.CHECK_STORAGE),
    ],
)
def test_space(seen: Space, state: State, repair: Repair) -> None:
    (finding,) = judge_space([seen], SETTINGS)
    assert (finding.state, finding.repair) == (state, repair)


def test_space_of_real_directories(tmp_path: Path) -> None:
    here, gone = sense_space([tmp_path, tmp_path / "gone"], reader())
    assert here.device == tmp_path.stat().st_dev
    assert here.used_percent is not None and 0 <= here.used_percent <= 100
    assert gone.used_percent is None and "ENOENT" in gone.problem
    assert judge_space([gone], SETTINGS)[0].evidence["used_percent"] is None


def test_the_mount_that_hides_others_counts() -> None:
    mounts = parse_mountinfo(fixture("mountinfo_overlay.txt") + "a line that is none\n")
    assert len(mounts) == 4
    found = mount_of("/opt/fleet", mounts)
    assert found is not None and found.kind == "btrfs"
    state = mount_of("/mnt/fleet state/stage", mounts)
    assert state is not None and state.read_only
    root = mount_of("/optional", mounts)
    assert root is not None and root.point == "/"


def test_read_only_and_ext4_errors_of_a_pi(tmp_path: Path) -> None:
    plant(tmp_path, "sys/devices/mmcblk0/mmcblk0p2/dev = 179:2\nsys/fs/ext4/mmcblk0p2/errors_count = 0\n")
    plant(tmp_path, "sys/dev/block/179:2 -> ../../devices/mmcblk0/mmcblk0p2")
    plant(tmp_path, "proc/self/")
    (tmp_path / "proc/self/mountinfo").write_text(fixture("mountinfo_pi.txt"))
    ours = [Path("/opt/fleet"), Path("/var/log/fleet"), Path("/boot/firmware/fleet")]
    root, boot = judge_mounts(sense_mounts(ours, roots(tmp_path), reader()))
    assert (root.part, root.state, root.evidence["ext4_errors"]) == ("mount/", State.HEALTHY, 0)
    assert boot.state is State.UNHEALTHY and "/boot/firmware/fleet must be written" in boot.reason
    (tmp_path / "sys/fs/ext4/mmcblk0p2/errors_count").write_text("3\n")
    root, _ = judge_mounts(sense_mounts(ours, roots(tmp_path), reader()))
    assert root.state is State.UNHEALTHY and "3 errors" in root.reason


def test_ext4_that_tells_nothing_and_no_mountinfo(tmp_path: Path) -> None:
    (unknown,) = judge_mounts(sense_mounts([Path("/opt")], roots(tmp_path), reader()))
    assert unknown.state is State.DEGRADED and "mountinfo" in unknown.reason
    plant(tmp_path, "proc/self/")
    (tmp_path / "proc/self/mountinfo").write_text(fixture("mountinfo_pi.txt"))
    (finding,) = judge_mounts(sense_mounts([Path("/opt")], roots(tmp_path), reader()))
    assert finding.state is State.HEALTHY
    assert finding.evidence["ext4_errors"] is None
