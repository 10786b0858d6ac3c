"""Growth of logs, and what is removed when their disk is full."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from guards.deadline import DeadlineReader
from guards.findings import State
from guards.settings import SurroundingsSettings
from guards.surroundings.logs import Logs, LogsMemory, drop_rotated, judge_logs, sense_logs
from guards.surroundings.window import Window

SETTINGS = SurroundingsSettings()


def fill(directory: Path, *names: str) -> None:
    for name in names:
        (directory / name).write_text(name)


def test_oldest_first_and_never_a_current_one(tmp_path: Path) -> None:
    fill(tmp_path, "stage.log", "stage.log.1", "stage.log.3", "stage.log.2", "gateway.log", "gateway.log.2", "x.1")
    fill(tmp_path, "notes.log.txt", "supervisord.log", "supervisord.log.1", "core.1234")
    dropped = drop_rotated(tmp_path, lambda: False)
    assert dropped[0] == "stage.log.3"
    assert {*dropped[1:3]} == {"stage.log.2", "gateway.log.2"}
    assert {*dropped[3:]} == {"stage.log.1", "supervisord.log.1"}
    left = {each.name for each in tmp_path.iterdir()}
    assert left == {"stage.log", "gateway.log", "x.1", "notes.log.txt", "supervisord.log", "core.1234"}


def test_it_ends_when_there_is_room(tmp_path: Path) -> None:
    fill(tmp_path, "a.log", "a.log.1", "a.log.2", "a.log.3")
    assert drop_rotated(tmp_path, lambda: len(list(tmp_path.iterdir())) < 4) == ["a.log.3"]


def test_links_and_directories_are_never_followed(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    fill(outside, "precious.log.1")
    logs = tmp_path / "logs"
    logs.mkdir()
    (logs / "a.log.1").symlink_to(outside / "precious.log.1")
    (logs / "b.log.1").mkdir()
    (logs / "c.log.1").symlink_to(outside)
    assert drop_rotated(logs, lambda: False) == []
    assert (outside / "precious.log.1").exists()
    (tmp_path / "link").symlink_to(outside)
    with pytest.raises(OSError, match="link"):
        drop_rotated(tmp_path / "link", lambda: False)
    assert (outside / "precious.log.1").exists()


NAMES = st.lists(st.from_regex(r"[a-z]{1,3}(\.log)?(\.[0-9]{1,2})?", fullmatch=True), max_size=12, unique=True)


@given(NAMES, st.integers(0, 12))
def test_only_rotated_files_go_whatever_lies_there(names: list[str], most: int) -> None:
    with tempfile.TemporaryDirectory() as place:
        directory = Path(place)
        fill(directory, *names)
        room = [most]

        def enough() -> bool:
            room[0] -= 1
            return room[0] < 0

        dropped = drop_rotated(directory, enough)
        left = {each.name for each in directory.iterdir()}
    assert left | set(dropped) == set(names) and not left & set(dropped)
    assert len(dropped) <= most
    assert all(name.rpartition(".")[0].endswith(".log") and name.rpartition(".")[2].isdigit() for name in dropped)


def judged(rounds: int, step: Callable[[int], Logs]) -> list[tuple[State, object]]:
    memory = LogsMemory()
    seen: list[tuple[State, object]] = []
    for round_ in range(rounds):
        (finding,), memory = judge_logs(step(round_), memory, SETTINGS, 30.0 * round_)
        seen.append((finding.state, finding.evidence.get("bytes_per_hour")))
    return seen


def test_growth_is_measured_over_rotation() -> None:
    def step(round_: int) -> Logs:
        # 1 MB a round; a new file every second round, the oldest of three vanishes
        newest = round_ // 2
        sizes = {inode: 2_000_000 for inode in range(max(0, newest - 2), newest)}
        return Logs({**sizes, newest: 1_000_000 * (round_ % 2 + 1)}, 1)

    seen = judged(60, step)
    assert seen[0] == (State.INITIALISING, None)
    assert seen[-1] == (State.DEGRADED, pytest.approx(120e6))


def test_quiet_logs_and_a_directory_that_is_gone(tmp_path: Path) -> None:
    assert judged(30, lambda _: Logs({1: 5000}, 1))[-1] == (State.HEALTHY, 0.0)
    missing = sense_logs(tmp_path / "gone", DeadlineReader(5.0, 300.0))
    assert judged(1, lambda _: missing) == [(State.DEGRADED, None)]
    fill(tmp_path, "a.log", "a.log.1", "b.txt")
    seen = sense_logs(tmp_path, DeadlineReader(5.0, 300.0))
    assert (len(seen.sizes or ()), seen.rotated) == (3, 1)


@given(st.lists(st.tuples(st.floats(1.0, 500.0), st.integers(0, 10**6)), min_size=1), st.floats(10.0, 5000.0))
def test_a_window_spans_what_was_asked_for(steps: list[tuple[float, int]], keep: float) -> None:
    window, now, value = Window(), 0.0, 0
    for seconds, grown in steps:
        now, value = now + seconds, value + grown
        window = window.added(now, value, keep)
    assert window.growth >= 0
    assert window.seconds <= keep + 500.0
    assert window.seconds >= min(keep, now - steps[0][0]) - 1e-6
