"""Drills: a zone that `fleet drill heat` lays into the run directory, and what of it is believed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from guards.deadline import DeadlineReader
from guards.findings import State
from guards.settings import ThermalSettings
from guards.thermal.guard import ThermalGuard
from guards.thermal.readings import Kind, Zone
from guards.thermal.sources.drill import LONGEST_SECONDS, DrillZones
from tests.guards.thermal.trees import Tree


@pytest.fixture
def run(tmp_path: Path) -> Path:
    directory = tmp_path / "run"
    directory.mkdir()
    return directory


def lay(run: Path, celsius: float, *, kind: str = "cpu-thermal", zone: int = 0) -> Path:
    """As the verb does: the file is replaced as a whole. The zone's directory."""
    directory = run / "drill" / "thermal" / f"thermal_zone{zone}"
    for each in (*reversed(directory.relative_to(run).parents[:-1]), directory.relative_to(run)):
        (run / each).mkdir(mode=0o755, exist_ok=True)
        (run / each).chmod(0o755)
    for name, text in (("type", kind), ("temp", str(round(celsius * 1000)))):
        fresh = directory / f"{name}.new"
        fresh.write_text(f"{text}\n")
        fresh.chmod(0o644)
        fresh.replace(directory / name)
    return directory


def zones(run: Path, reader: DeadlineReader) -> tuple[Zone, ...]:
    return DrillZones(run, reader).read().zones


def test_a_box_in_a_drill_is_as_hot_as_the_hottest(tree: Tree, run: Path) -> None:
    tree.write("class/thermal/thermal_zone0/type", "cpu-thermal")
    tree.heat(45.0)
    guard = ThermalGuard(tree.roots, ThermalSettings(), None, run)

    def temperature() -> tuple[State, object, object]:
        finding = guard.decide(guard.sense(), guard.first_memory(), 100.0).findings[0]
        return finding.state, finding.evidence["celsius"], finding.evidence["zone"]

    assert temperature() == (State.HEALTHY, 45.0, "thermal_zone0/cpu-thermal")
    lay(run, 86.0)
    assert temperature() == (State.DEGRADED, 86.0, "drill/thermal_zone0/cpu-thermal")
    lay(run, 20.0)  # a drill can't make a box cooler than it is
    assert temperature() == (State.HEALTHY, 45.0, "thermal_zone0/cpu-thermal")
    lay(run, 96.0)
    assert temperature()[0] is State.UNHEALTHY
    for path in sorted((run / "drill").rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    (run / "drill").rmdir()
    assert temperature() == (State.HEALTHY, 45.0, "thermal_zone0/cpu-thermal")


def test_zones_by_their_type(run: Path, reader: DeadlineReader) -> None:
    assert zones(run, reader) == ()
    lay(run, 86.0, kind="gpu-thermal")
    lay(run, 70.0, kind="whatever", zone=1)
    lay(run, 999.0, zone=2)
    assert zones(run, reader) == (
        Zone("drill/thermal_zone0/gpu-thermal", Kind.GPU, 86.0),
        Zone("drill/thermal_zone1/whatever", Kind.SOC, 70.0),
        Zone("drill/thermal_zone2/cpu-thermal", Kind.CPU, None, "999 °C is not plausible"),
    )


@pytest.mark.parametrize("place", ["drill", "drill/thermal", "drill/thermal/thermal_zone0", "temp", "type"])
@pytest.mark.parametrize("mode", [0o020, 0o002])
def test_what_others_may_write_is_not_believed(run: Path, reader: DeadlineReader, place: str, mode: int) -> None:
    directory = lay(run, 86.0)
    path = directory / place if place in ("temp", "type") else run / place
    path.chmod(path.stat().st_mode | mode)
    (zone,) = zones(run, reader)
    assert zone.celsius is None
    assert zone.reason == f"OSError: {path.name} may be written by others"


@pytest.mark.skipif(os.geteuid() != 0, reason="gives a file away")
def test_what_another_user_owns_is_not_believed(run: Path, reader: DeadlineReader) -> None:
    directory = lay(run, 86.0)
    os.chown(directory / "temp", 12345, -1)
    (zone,) = zones(run, reader)
    assert zone.celsius is None
    assert zone.reason == "OSError: temp belongs to user 12345, not to root or the guards' own"


def test_links_and_what_is_no_file(run: Path, reader: DeadlineReader, tmp_path: Path) -> None:
    directory = lay(run, 86.0)
    elsewhere = tmp_path / "elsewhere"
    (directory / "temp").rename(elsewhere)
    assert zones(run, reader) == ()  # not whole yet
    (directory / "temp").symlink_to(elsewhere)
    assert "Too many levels of symbolic links (ELOOP)" in zones(run, reader)[0].reason
    (directory / "temp").unlink()
    os.mkfifo(directory / "temp", 0o644)
    assert zones(run, reader)[0].reason == "OSError: temp is no regular file"
    (directory / "temp").unlink()
    (directory / "temp").write_bytes(b"\xff" * 100_000)
    (directory / "temp").chmod(0o644)
    assert zones(run, reader)[0].celsius is None
    (directory / "temp").write_text("9" * 4096)
    assert zones(run, reader)[0].celsius is None
    (run / "drill").rename(run / "other")
    (run / "drill").symlink_to("other")
    assert zones(run, reader)[0].celsius is None
    assert zones(tmp_path / "none", reader)[0].celsius is None


def test_a_drill_that_nobody_ends_ends_by_itself(
    run: Path, reader: DeadlineReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [1000.0]
    monkeypatch.setattr("guards.thermal.sources.drill.time.monotonic", lambda: now[0])
    source = DrillZones(run, reader)
    lay(run, 86.0)
    assert source.read().zones[0].celsius == 86.0
    now[0] += LONGEST_SECONDS + 1.0
    assert source.read().zones[0].reason == "a drill that nobody has ended for 1800 s is over"
    lay(run, 86.0)  # written anew
    assert source.read().zones[0].celsius == 86.0
