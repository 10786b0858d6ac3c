"""Clocks of boxes over a real sshd. Nothing here sets a clock: box and operator are one machine, and it is right."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

import fleet.timing.boxes
from fleet.cli.main import main
from fleet.inventory.loader import load_site
from fleet.ssh.results import HostStatus
from fleet.ssh.site import SshSite
from fleet.timing import box_side, record
from fleet.timing.boxes import look
from fleet.timing.estimate import Offset, Verdict
from tests.ssh.conftest import USER, Sshd, free_port, needs_root, site_file

INVENTORY = """\
site: test
state_dir: state
prefix: {prefix}
device_profiles: {{this: {{architecture: x86_64, python: "3.11", torch: {{version: "2.13.0"}}}}}}
boxes:
  box1: {{address: 127.0.0.1, port: {port}, user: {user}, identity_file: {key}, profile: this, roles: {roles}}}
  box2: {{address: 127.0.0.2, connection: local, profile: this}}
models: {{tiny: {{source: {{path: tiny.gguf}}, licence: none}}}}
pipelines: {{main: {{model: tiny, boxes: [box1, box2]}}}}
"""
ROLES = "[stage, coordinator, gateway]"


def inventory(directory: Path, sshd: Sshd, port: int | None = None) -> str:
    file = directory / "site.yaml"
    port, key = port or sshd.port, sshd.identity
    file.write_text(INVENTORY.format(prefix=directory / "prefix", port=port, user=USER, key=key, roles=ROLES))
    return str(file)


def state_directory(path: str) -> Path:
    return load_site(Path(path), resolve_secrets=False).state_directory


@needs_root
def test_the_same_machine_is_right_and_nothing_is_set(tmp_path: Path, sshd: Sshd) -> None:
    file = site_file(tmp_path, sshd.port, sshd.identity)
    ssh = SshSite.of(file, report=lambda line: None)
    clocks, results = look(file, ssh, ["box1"])
    assert [result.status for result in results] == [HostStatus.OK]
    seen = clocks["box1"]
    assert abs(seen.before.nanoseconds) <= seen.before.uncertainty_nanoseconds
    assert seen.verdict is Verdict.RIGHT


@needs_root
def test_push_of_a_right_clock_changes_nothing(tmp_path: Path, sshd: Sshd, capsys: pytest.CaptureFixture[str]) -> None:
    path = inventory(tmp_path, sshd)
    assert main(["time", "push", "box1", "-i", path, "-o", "json"]) == 0
    data = json.loads(capsys.readouterr().out)["data"]
    assert (data["changed"], data["boxes"]["box1"]["verdict"], data["errors"]) == (0, "right", {})
    assert main(["time", "status", path]) == 0
    assert capsys.readouterr().out.splitlines()[1].startswith("box1\t")
    assert main(["time", "log", path, "-o", "json"]) == 0
    assert json.loads(capsys.readouterr().out)["data"] == {"pushes": []}


def test_an_unreachable_box_is_shown(tmp_path: Path, sshd: Sshd, capsys: pytest.CaptureFixture[str]) -> None:
    path = inventory(tmp_path, sshd, free_port())
    assert main(["time", "status", path]) == 3
    shown = capsys.readouterr()
    assert shown.out.splitlines()[1].startswith("box1\t")
    assert "unreachable" in shown.out


@pytest.mark.parametrize(
    ("box", "refusal"),
    [("box2", (1, "has no clock of its own")), ("box9", (2, "no box box9"))],
)
def test_boxes_that_have_no_clock(
    tmp_path: Path, sshd: Sshd, capsys: pytest.CaptureFixture[str], box: str, refusal: tuple[int, str]
) -> None:
    code, says = refusal
    assert main(["time", "push", box, "-i", inventory(tmp_path, sshd), "--yes"]) == code
    assert says in capsys.readouterr().err


def test_the_box_reads_its_clock() -> None:
    before = time.time_ns()
    said = box_side.answer({"op": "time"})
    assert before <= said["unix_nanoseconds"] <= time.time_ns()
    assert set(box_side.answer({"op": "facts"})) == {"op", "chrony", "timesyncd"}


class SetClock:
    """A box's clock that is 3 s ahead until it is corrected."""

    def __init__(self, *_: object) -> None:
        self.ahead = 3_000_000_000

    def __enter__(self) -> SetClock:
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing to end."""

    def keeper(self) -> str:
        return ""

    def offset(self) -> Offset:
        return Offset(self.ahead, 1_000_000)

    def correct(self, offset: Offset) -> str:
        self.ahead -= offset.nanoseconds
        return "none"


def test_a_push_is_measured_again_and_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], sshd: Sshd
) -> None:
    """Only the box is played: a real one would be this machine."""
    monkeypatch.setattr(fleet.timing.boxes, "BoxClock", SetClock)
    path = inventory(tmp_path, sshd)
    assert main(["time", "push", "box1", "-i", path]) == 2
    assert "box1: +3.000000 ± 0.001000 s off" in capsys.readouterr().err
    assert main(["time", "push", "box1", "-i", path, "--dry-run"]) == 0
    assert "1 would be changed" in capsys.readouterr().err
    assert main(["time", "push", "box1", "-i", path, "--yes", "-o", "json"]) == 0
    data = json.loads(capsys.readouterr().out)["data"]
    assert (data["changed"], data["boxes"]["box1"]["after_seconds"]) == (1, 0.0)
    assert [entry["before_seconds"] for entry in record.read(state_directory(path))] == [3.0]
    assert main(["time", "log", path]) == 0
    assert "box1\t+3.000000\t0.001000\t+0.000000" in capsys.readouterr().out


def test_a_kept_clock_is_left_to_its_keeper(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], sshd: Sshd
) -> None:
    monkeypatch.setattr(fleet.timing.boxes, "BoxClock", SetClock)
    monkeypatch.setattr(SetClock, "keeper", lambda self: "chronyd follows 10.77.0.1")
    assert main(["time", "push", "box1", "-i", inventory(tmp_path, sshd), "--yes"]) == 1
    err = capsys.readouterr().err
    assert "chronyd follows 10.77.0.1: the next correction would undo a push" in err
    assert "chronyc makestep" in err
    assert not list((tmp_path / "state").glob(f"**/{record.NAME}"))


def test_the_box_takes_the_difference_off_its_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Up to the system call."""
    calls: list[tuple[int, int]] = []
    monkeypatch.setattr(box_side, "HARDWARE_CLOCKS", ())
    monkeypatch.setattr(time, "clock_settime_ns", lambda *call: calls.append(call))
    before = time.time_ns()
    assert box_side.answer({"op": "set", "ahead_nanoseconds": 5}) == {"op": "set", "hardware_clock": "none"}
    ((which, value),) = calls
    assert which == time.CLOCK_REALTIME
    assert before - 5 <= value <= time.time_ns() - 5
