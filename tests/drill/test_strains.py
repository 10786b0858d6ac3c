"""What drills lay on a box, read by the guards' own code."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from fleet.drill import strains
from fleet.drill.strains import FullDisk, Heat, WrongClock, strain_of
from fleet.provision.agent.errors import AgentError
from guards.deadline import DeadlineReader
from guards.settings import SurroundingsSettings
from guards.surroundings.space import is_full, measure
from guards.thermal.sources.drill import DrillZones


def test_the_guard_reads_the_heat_and_nothing_is_left(tmp_path: Path) -> None:
    zones = DrillZones(tmp_path, DeadlineReader(5.0, 60.0))
    heat = Heat(str(tmp_path), 86.0)
    heat.undo()
    assert heat.make() == "its guards read 86 °C"
    assert [(zone.name, zone.celsius) for zone in zones.read().zones] == [("drill/thermal_zone0/cpu-thermal", 86.0)]
    heat.undo()
    heat.undo()
    assert zones.read().zones == ()
    assert list(tmp_path.iterdir()) == []


def test_heat_without_guards_is_refused(tmp_path: Path) -> None:
    with pytest.raises(AgentError, match="no guards run here"):
        strain_of({"kind": "heat", "run_directory": str(tmp_path / "none"), "celsius": 86})


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """80 MiB."""
    if os.geteuid() != 0:
        pytest.skip("only root mounts a file system")
    disk = tmp_path / "disk"
    disk.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=80m", "drill", str(disk)], check=False, capture_output=True, text=True
    )
    if done.returncode != 0:
        pytest.skip(f"no file system can be mounted here: {done.stderr.strip()}")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


def test_the_guard_sees_a_full_disk_and_its_room_comes_back(small_disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(AgentError, match=r"MiB of .* would stay free, 64 must"):
        FullDisk(str(small_disk), 95.0)
    monkeypatch.setattr(strains, "LEAST_FREE_BYTES", strains.MEBIBYTE)
    settings, before = SurroundingsSettings(), measure(small_disk)
    strain = strain_of({"kind": "disk-full", "directory": str(small_disk), "percent": settings.disk_full_percent})
    assert strain.make().startswith(f"filled the file system of {small_disk} with 7")
    assert is_full(measure(small_disk), settings)
    assert list(small_disk.iterdir()) == []
    with pytest.raises(AgentError, match="is full already"):
        FullDisk(str(small_disk), 95.0)
    strain.undo()
    strain.undo()
    assert measure(small_disk).free_bytes == before.free_bytes
    del strain  # closes its file, so that the file system can go


def test_a_clock_goes_back_by_the_time_that_passed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine's clock is played: it must not be touched."""
    ahead = 0
    real = time.time_ns

    def set_to(which: int, value: int) -> None:
        nonlocal ahead
        assert which == time.CLOCK_REALTIME
        ahead = value - real()

    monkeypatch.setattr(time, "time_ns", lambda: real() + ahead)
    monkeypatch.setattr(time, "clock_settime_ns", set_to)
    clock = WrongClock()
    clock.undo()
    assert ahead == 0
    assert clock.make() == "set its clock 5 s ahead"
    assert abs(ahead - 5_000_000_000) < 1_000_000_000
    clock.undo()
    assert abs(ahead) < 1_000_000_000
    clock.make()
    ahead = 7  # as chronyd does
    clock.undo()
    assert ahead == 7
