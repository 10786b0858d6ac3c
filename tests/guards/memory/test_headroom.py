from __future__ import annotations

import shutil
from pathlib import Path

import psutil
import pytest

from guards.memory.headroom import Room, read_headroom
from guards.roots import Roots
from tests.guards.memory.trees import lay_out

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30

# device → bytes available, path of the tightest room, its limit, what it leaves
BOXES = {
    "pi4": (2641180 * KIB, "", 3885396 * KIB, 2641180 * KIB),
    "orin-nano": (489200 * KIB, "", 7802116 * KIB, 489200 * KIB),
    "v2-limited": (768 * MIB, "/edge.slice", 4 * GIB, 768 * MIB),
    "v1": (768 * MIB, "/edge", 2 * GIB, 768 * MIB),
    "hybrid": (62 * MIB, "/lab/box1", GIB, 62 * MIB),
    "container": (1537 * MIB, "/", 2 * GIB, 1537 * MIB),
    "bound-group": (768 * MIB, "/", GIB, 768 * MIB),
}


@pytest.mark.parametrize("device", BOXES)
def test_available_memory_is_what_the_tightest_ancestor_leaves(device: str, tmp_path: Path) -> None:
    available, path, limit, free = BOXES[device]
    seen = read_headroom(lay_out(device, tmp_path))
    assert seen.available_bytes == available
    assert seen.tightest == Room(path, limit, free)


def test_few_bytes_left_need_not_be_the_smallest_share_left(tmp_path: Path) -> None:
    roots = lay_out("v2-limited", tmp_path)
    (roots.proc / "meminfo").write_text("MemTotal: 16306556 kB\nMemAvailable: 819200 kB\n", encoding="utf-8")
    seen = read_headroom(roots)
    assert seen.available_bytes == 768 * MIB  # of the slice
    assert seen.tightest == Room("", 16306556 * KIB, 800 * MIB)


def test_pressure_over_a_minute(tmp_path: Path) -> None:
    seen = read_headroom(lay_out("orin-nano", tmp_path))
    assert (seen.some_percent, seen.full_percent) == (24.07, 12.4)


def test_pressure_is_unknown_where_the_kernel_does_not_tell(tmp_path: Path) -> None:
    seen = read_headroom(lay_out("pi4", tmp_path))
    assert seen.some_percent is None
    assert seen.full_percent is None
    assert any("pressure" in reason for reason in seen.reasons)


@pytest.mark.parametrize("avg60", ["nan", "-1", "101", "x", ""])
def test_nonsense_pressure_is_unknown(avg60: str, tmp_path: Path) -> None:
    roots = lay_out("orin-nano", tmp_path)
    (roots.proc / "pressure/memory").write_text(f"some avg10=0.00 avg60={avg60} total=0\n", encoding="utf-8")
    assert read_headroom(roots).some_percent is None


def test_a_kernel_without_available_memory_tells_nothing(tmp_path: Path) -> None:
    seen = read_headroom(lay_out("old-kernel", tmp_path))
    assert seen.available_bytes is None
    assert seen.tightest is None
    assert "meminfo has no MemTotal or no MemAvailable" in seen.reasons


def test_nothing_there_at_all(tmp_path: Path) -> None:
    seen = read_headroom(Roots(sys=tmp_path / "sys", proc=tmp_path / "proc"))
    assert (seen.available_bytes, seen.tightest, seen.some_percent) == (None, None, None)
    assert len(seen.reasons) == 4


def test_a_limit_that_is_gone_meanwhile_counts_no_more(tmp_path: Path) -> None:
    roots = lay_out("v2-limited", tmp_path)
    shutil.rmtree(roots.sys / "fs/cgroup/edge.slice")
    assert read_headroom(roots).tightest == Room("", 16306556 * KIB, 12 * GIB)


def test_more_used_than_allowed_leaves_nothing(tmp_path: Path) -> None:
    roots = lay_out("hybrid", tmp_path)
    group = roots.sys / "fs/cgroup/memory/lab/box1"
    (group / "memory.usage_in_bytes").write_text("1083741824\n", encoding="utf-8")
    (group / "memory.stat").unlink()
    assert read_headroom(roots).available_bytes == 0


def test_a_limit_of_nothing_leaves_nothing() -> None:
    assert Room("/", 0, 0).free_percent == 0.0


def test_of_this_machine() -> None:
    seen = read_headroom(Roots())
    assert seen.available_bytes is not None
    assert 0 < seen.available_bytes <= psutil.virtual_memory().total
