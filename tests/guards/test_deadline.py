"""Sensors that hang, and those that answer with an error."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from pathlib import Path

import pytest

from guards.deadline import MOST_FILE_BYTES, MOST_HANGS_A_ROUND, DeadlineReader, Unreadable


@pytest.fixture
def reader() -> DeadlineReader:
    """With a deadline that makes hanging sensors cheap."""
    return DeadlineReader(deadline_seconds=0.3, quarantine_seconds=300.0)


@pytest.fixture
def hanging(tmp_path: Path) -> Path:
    """Opening it waits for a writer for ever, as a zone's driver may."""
    path = tmp_path / "zone"
    os.mkfifo(path)
    return path


def let_go(path: Path) -> None:
    """Give the thread that hangs in it an end."""
    with path.open("wb"):
        pass


def read_when_let_go(reader: DeadlineReader, path: Path) -> str:
    """The thread that hung takes a moment to notice."""
    for _ in range(200):
        with contextlib.suppress(Unreadable):
            return reader.text(path)
        time.sleep(0.01)
    pytest.fail("it stays in quarantine")


def test_a_file_that_hangs_costs_only_itself(reader: DeadlineReader, hanging: Path, tmp_path: Path) -> None:
    good = tmp_path / "good"
    good.write_text("57939\n")
    with pytest.raises(Unreadable, match=r"no answer within 0\.3 s"):
        reader.text(hanging)
    assert reader.text(good) == "57939\n"
    assert reader.hung == (str(hanging),)
    let_go(hanging)


def test_quarantine_holds_even_if_the_driver_lets_go(reader: DeadlineReader, hanging: Path) -> None:
    with pytest.raises(Unreadable):
        reader.text(hanging)
    let_go(hanging)
    hanging.unlink()
    hanging.write_text("50000\n")
    with pytest.raises(Unreadable, match="left alone"):
        reader.text(hanging)


def test_after_the_quarantine_a_mended_sensor_is_read_again(hanging: Path) -> None:
    reader = DeadlineReader(deadline_seconds=0.2, quarantine_seconds=0.0)
    with pytest.raises(Unreadable, match="no answer"):
        reader.text(hanging)
    let_go(hanging)
    hanging.unlink()
    hanging.write_text("50000\n")
    assert read_when_let_go(reader, hanging) == "50000\n"
    assert reader.hung == ()


def test_a_sensor_that_still_hangs_gets_no_second_thread(hanging: Path) -> None:
    reader = DeadlineReader(deadline_seconds=0.1, quarantine_seconds=0.0)
    with pytest.raises(Unreadable, match="no answer"):
        reader.text(hanging)
    threads = threading.active_count()
    for _ in range(20):
        reader.begin_round()
        with pytest.raises(Unreadable, match="left alone"):
            reader.text(hanging)
    assert threading.active_count() <= threads
    let_go(hanging)


def test_a_box_full_of_hanging_sensors_is_bounded_in_time_and_threads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("guards.deadline.MOST_HUNG_THREADS", 4)
    reader = DeadlineReader(deadline_seconds=0.05, quarantine_seconds=0.0)
    zones = [tmp_path / str(index) for index in range(10)]
    for zone in zones:
        os.mkfifo(zone)
    reasons: list[str] = []
    for _ in range(4):
        reader.begin_round()
        for zone in zones:
            with pytest.raises(Unreadable) as raised:
                reader.text(zone)
            reasons.append(str(raised.value))
    assert sum("no answer" in reason for reason in reasons[: len(zones)]) == MOST_HANGS_A_ROUND
    assert "left out of this round" in reasons[len(zones) - 1]
    assert sum("no answer" in reason for reason in reasons) == 4
    assert reasons[-1] == "4 sensors hang, no more are asked"
    for zone in reader.hung:
        let_go(Path(zone))


def test_errors_are_told_by_name(reader: DeadlineReader, tmp_path: Path) -> None:
    with pytest.raises(Unreadable, match="ENOENT"):
        reader.text(tmp_path / "none")
    with pytest.raises(Unreadable, match="EISDIR"):
        reader.text(tmp_path)
    with pytest.raises(Unreadable, match="EIO"):
        reader.text(Path("/proc/self/mem"))
    with pytest.raises(Unreadable, match="ZeroDivisionError"):
        reader.ask("broken", lambda: 1 / 0)


def test_no_thread_to_be_had_is_unreadable(reader: DeadlineReader, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(Unreadable, match="can't start new thread"):
        reader.ask("zone", lambda: 1)


def test_a_file_is_read_no_further_than_a_sensors(reader: DeadlineReader) -> None:
    assert len(reader.text(Path("/dev/zero"))) == MOST_FILE_BYTES
