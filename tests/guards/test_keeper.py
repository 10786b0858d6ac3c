"""What guards keep outlives crashes, full disks and damage."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import threading
from collections.abc import Callable
from pathlib import Path
from time import monotonic, sleep

import pytest

from guards.budgets import Budget, Ledger
from guards.keeper import IDLE_SAVE_SECONDS, SAVE_SECONDS, BudgetSpent, Keeper
from guards.store import FILE_NAME, DamagedStore, Kept, Store

WAIT_SECONDS = 20.0
BUDGETS = {"restart": Budget(2, 3600.0), "gentle": Budget(100, 60.0)}


class Time:
    """A monotonic clock that a test moves; it begins at 0 with every boot."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


class FullDisk(Store):
    """A store whose disk is full while `full`."""

    full = True

    def save(self, kept: Kept) -> None:
        if self.full:
            raise OSError(errno.ENOSPC, "No space left on device")
        super().save(kept)


class Noting(Store):
    """A store that notes what was written: the running seconds of each."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.written: list[float] = []

    def save(self, kept: Kept) -> None:
        super().save(kept)
        self.written.append(kept.running_seconds)


class HangingDisk(Noting):
    """A disk that hangs in each read and write until `let_go`, as a dead network drive does."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self._fifo = directory / "hang"
        os.mkfifo(self._fifo)
        self.hangs = False

    def load(self) -> Kept | None:
        self._hang()
        return super().load()

    def save(self, kept: Kept) -> None:
        self._hang()
        super().save(kept)

    def _hang(self) -> None:
        if self.hangs:
            with self._fifo.open("wb"):  # waits for a reader
                pass

    def let_go(self) -> None:
        self.hangs = False
        os.close(os.open(self._fifo, os.O_RDONLY | os.O_NONBLOCK))


def until(condition: Callable[[], bool]) -> None:
    end = monotonic() + WAIT_SECONDS
    while not condition():
        assert monotonic() < end, "not in time"
        sleep(0.01)


def store_threads() -> int:
    """Writers that live; earlier tests have left others."""
    return sum(thread.name == "store" for thread in threading.enumerate())


def test_a_disk_that_hangs_stops_nobody_and_pays_for_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("guards.keeper.CHARGE_SECONDS", 0.2)
    monkeypatch.setattr("guards.keeper.CLOSE_SECONDS", 0.2)
    monkeypatch.setattr("guards.writer.HUNG_SECONDS", 0.05)
    time, store = Time(), HangingDisk(tmp_path)
    keeper = Keeper(store, BUDGETS, time)
    before = store_threads()
    store.hangs = True
    with pytest.raises(BudgetSpent, match=r"budget restart: .*not written within 0\.2 s: the disk hangs"):
        keeper.charge("restart")
    assert "a write hangs for" in keeper.trouble
    assert keeper.write_seconds > 0
    for _ in range(5):  # refused at once, and nothing is taken off
        with pytest.raises(BudgetSpent, match="a write hangs for"):
            keeper.charge("restart")
    keeper.charge("gentle", although_unwritten=True)
    keeper.remember("thermal", {"limit": 1})
    for minute in range(1, 5):  # the loop goes on, and no threads pile up
        time.seconds = minute * SAVE_SECONDS
        keeper.remember("thermal", {"limit": minute})
        keeper.save_in_time()
    assert store_threads() == before + 1
    assert keeper.left()["restart"] == 1
    keeper.close()  # a bounded wait
    assert "at the end: " in caplog.text
    store.let_go()
    until(lambda: len(store.written) == 2)
    assert keeper.trouble == ""
    again = Keeper(Store(tmp_path), BUDGETS, Time())
    assert again.memory("thermal") == {"limit": 4}  # of the states meanwhile, the latest
    assert again.left()["restart"] == 1


def test_a_disk_that_hangs_at_the_start_leaves_one_of_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("guards.keeper.LOAD_SECONDS", 0.1)
    store = HangingDisk(tmp_path)
    store.hangs = True
    keeper = Keeper(store, BUDGETS, Time())
    assert "cannot be read: no answer within 0.1 s" in keeper.trouble
    assert keeper.left() == {"restart": 1, "gentle": 1}
    store.let_go()
    keeper.charge("restart")
    assert keeper.trouble == ""


def test_a_memory_that_is_no_json_is_that_guards_fault_alone(tmp_path: Path) -> None:
    keeper = Keeper(Store(tmp_path), BUDGETS, Time())
    for wrong in (float("nan"), float("inf"), object()):
        with pytest.raises((ValueError, TypeError)):
            keeper.remember("thermal", {"limit": wrong})
    keeper.charge("restart")
    assert keeper.trouble == ""


@pytest.mark.parametrize("name", [FILE_NAME, "guards.new"])
def test_a_fifo_in_the_place_of_a_file_is_not_waited_for(tmp_path: Path, name: str) -> None:
    os.mkfifo(tmp_path / name)
    keeper = Keeper(Store(tmp_path), BUDGETS, Time())
    with contextlib.suppress(BudgetSpent):  # the first write may but clear the way
        keeper.charge("restart")
    keeper.close()
    assert keeper.trouble == ""
    assert Keeper(Store(tmp_path), BUDGETS, Time()).left() == keeper.left()


def test_budgets_and_time_outlive_a_power_cut_right_after_an_action(tmp_path: Path) -> None:
    time = Time()
    keeper = Keeper(Store(tmp_path), BUDGETS, time)
    time.seconds = 1000.0
    keeper.charge("restart")
    keeper.charge("restart")
    time.seconds = 1500.0  # nothing was closed or saved since: the power goes
    again = Keeper(Store(tmp_path), BUDGETS, Time())
    assert again.clock.now_seconds() == 1000.0
    assert again.left() == {"restart": 0, "gentle": 100}
    with pytest.raises(BudgetSpent, match="budget restart is spent, 2 in 1 h: a person is needed"):
        again.charge("restart")


def test_two_are_far_enough_apart() -> None:
    time = Time()
    keeper = Keeper(None, {"restart": Budget(5, 3600.0, apart_seconds=60.0)}, time)
    keeper.charge("restart")
    time.seconds = 59.0
    with pytest.raises(BudgetSpent, match="budget restart: 60 s from one to the next"):
        keeper.charge("restart")
    assert keeper.left() == {"restart": 4}
    time.seconds = 60.0
    keeper.charge("restart")


def test_no_number_of_reboots_brings_a_budget_back(tmp_path: Path) -> None:
    done = 0
    for _ in range(50):  # a boot loop, a minute each: the running clock advances by what was saved only
        time = Time()
        keeper = Keeper(Store(tmp_path), BUDGETS, time)
        time.seconds = 60.0
        keeper.save_in_time()
        try:
            keeper.charge("restart")
            done += 1
        except BudgetSpent:
            pass
    assert done <= 2


def test_memories_are_written_seldom_and_only_if_they_change(tmp_path: Path) -> None:
    time, store = Time(), Noting(tmp_path)
    keeper = Keeper(store, BUDGETS, time)
    keeper.remember("thermal", {"limit": 4})
    keeper.save_in_time()
    time.seconds = SAVE_SECONDS
    keeper.save_in_time()
    until(lambda: store.written == [SAVE_SECONDS])  # and not at 0
    keeper.remember("thermal", {"limit": 4})
    time.seconds = 2 * SAVE_SECONDS
    keeper.save_in_time()
    time.seconds += IDLE_SAVE_SECONDS
    keeper.save_in_time()
    until(lambda: store.written == [SAVE_SECONDS, time.seconds])
    again = Keeper(Store(tmp_path), BUDGETS, Time())
    assert again.memory("thermal") == {"limit": 4}
    assert again.memory("clock") is None
    assert again.clock.now_seconds() == 2 * SAVE_SECONDS + IDLE_SAVE_SECONDS


def test_on_a_full_disk_only_what_makes_room_is_paid_for(tmp_path: Path) -> None:
    time, store = Time(), FullDisk(tmp_path)
    keeper = Keeper(store, BUDGETS, time)
    with pytest.raises(BudgetSpent, match="No space left on device"):
        keeper.charge("restart")
    keeper.charge("gentle", although_unwritten=True)
    assert "cannot be written" in keeper.trouble
    assert keeper.left() == {"restart": 1, "gentle": 99}  # charged all the same
    store.full = False
    time.seconds = SAVE_SECONDS
    keeper.save_in_time()
    until(lambda: keeper.trouble == "")
    assert Keeper(Store(tmp_path), BUDGETS, Time()).left() == {"restart": 1, "gentle": 100}


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "null",
        '{"schema":2,"running_seconds":0,"ledger":{},"memories":{}}',
        '{"schema":1,"running_seconds":-1,"ledger":{},"memories":{}}',
        '{"schema":1,"running_seconds":NaN,"ledger":{},"memories":{}}',
        '{"schema":1,"running_seconds":0,"ledger":{"restart":["x"]},"memories":{}}',
        '{"schema":1,"running_seconds":0,"ledger":{},"memories":{"thermal":3}}',
        '{"schema":1,"running_seconds":1e300,"ledger":{},"memories":{}}',
        '{"schema":1,"running_seconds":1' + "0" * 400 + ',"ledger":{},"memories":{}}',
        '{"schema":1,"running_seconds":5,"ledger":{"restart":[NaN]},"memories":{}}',
        '{"schema":1,"running_seconds":5,"ledger":{"restart":[6]},"memories":{}}',
        "[" * 100_000,
    ],
)
def test_a_damaged_store_is_set_aside_and_leaves_one_of_each(tmp_path: Path, text: str) -> None:
    (tmp_path / FILE_NAME).write_text(text)
    with pytest.raises(DamagedStore):
        Store(tmp_path).load()
    keeper = Keeper(Store(tmp_path), BUDGETS, Time())
    assert "set aside as guards.damaged" in keeper.trouble
    assert (tmp_path / "guards.damaged").read_text() == text
    assert keeper.left() == {"restart": 1, "gentle": 1}
    keeper.charge("restart")
    assert keeper.trouble == ""
    assert Keeper(Store(tmp_path), BUDGETS, Time()).left()["restart"] == 0


def test_a_save_that_fails_leaves_the_old_contents(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.save(Kept(5.0, Ledger({}), {}))
    (tmp_path / "guards.new").mkdir()  # nothing can be opened for writing there
    with pytest.raises(OSError, match="directory"):
        store.save(Kept(6.0, Ledger({}), {}))
    kept = store.load()
    assert kept is not None
    assert kept.running_seconds == 5.0


def test_the_file_is_private(tmp_path: Path) -> None:
    Store(tmp_path).save(Kept(5.0, Ledger({}), {"a": {"b": 1}}))
    assert (tmp_path / FILE_NAME).stat().st_mode & 0o777 == 0o600
    assert json.loads((tmp_path / FILE_NAME).read_text())["memories"] == {"a": {"b": 1}}


def test_without_a_store_nothing_is_written(tmp_path: Path) -> None:
    keeper = Keeper(None, BUDGETS, Time())
    keeper.charge("restart")
    keeper.close()
    assert keeper.left()["restart"] == 1
    assert list(tmp_path.iterdir()) == []
