"""A plan log that a dying card, another release or a full disk has got at: no crash, and no promise that is none."""

from __future__ import annotations

import asyncio
import os
import sqlite3
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from fleet.errors import FleetError
from stage_runtime.server.history import History
from stage_runtime.server.plan_log import FILE_NAME, PlanLog, PlanLogError, Recovered
from tests.stage_runtime.site import StageSite
from tests.stage_runtime.test_plan_log import prepare, reopen
from tests.stage_runtime.tiny import TinyModel

Damage = Callable[[Path], object]
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="mounts a file system")


async def write_some(directory: Path) -> None:
    """A log that holds a committed and a prepared plan."""
    log = PlanLog(directory)
    await log.open()
    await log.commit(prepare(3))
    await log.prepare(prepare(4))
    log.close()


def statements(*sql: str) -> Damage:
    def run(file: Path) -> None:
        connection = sqlite3.connect(file)
        for statement in sql:
            connection.execute(statement)
        connection.commit()
        connection.close()

    return run


def set_byte(offset: int, value: int) -> Damage:
    def change(file: Path) -> None:
        data = bytearray(file.read_bytes())
        data[offset] = value
        file.write_bytes(data)

    return change


@pytest.mark.parametrize(
    "damage",
    [
        *[lambda file, size=size: os.truncate(file, size) for size in (0, 1, 50, 101, 4096, 6000)],
        set_byte(19, 3),  # to be read by a later SQLite only
        set_byte(47, 9),  # a later schema format
        statements("DROP TABLE facts", "CREATE TABLE facts (id INTEGER, name TEXT, value TEXT)"),
        statements("DROP TABLE facts", "CREATE TABLE facts (key TEXT, value BLOB)"),
        statements("DROP TABLE facts", "CREATE VIEW facts AS SELECT 'incarnation' AS name, '4' AS value"),
        statements("CREATE TRIGGER no BEFORE INSERT ON facts BEGIN SELECT RAISE(ABORT, 'no'); END"),
        statements("UPDATE facts SET value = x'ff00' WHERE name = 'committed'"),
        statements("UPDATE facts SET value = CAST(x'ff00' AS TEXT) WHERE name = 'committed'"),
        statements("UPDATE facts SET value = replace(value, 'pipeline', 'line') WHERE name = 'committed'"),
        statements("UPDATE facts SET value = '-5' WHERE name = 'incarnation'"),
        statements("UPDATE facts SET value = '9223372036854775808' WHERE name = 'incarnation'"),
        statements("UPDATE facts SET value = hex(zeroblob(5000)) WHERE name = 'incarnation'"),
        statements("UPDATE facts SET value = replace(hex(zeroblob(5000)), '0', '9') WHERE name = 'incarnation'"),
        statements("INSERT INTO facts VALUES ('fenced', '1180591620717411303424')"),
    ],
)
async def test_a_log_that_cannot_be_understood_is_begun_anew(tmp_path: Path, damage: Damage) -> None:
    await write_some(tmp_path)
    damage(tmp_path / FILE_NAME)
    assert await reopen(tmp_path) == Recovered(1, None, None, 0, 0)
    assert (await reopen(tmp_path)).incarnation == 2


@pytest.mark.parametrize(
    "spoil",
    [
        statements("PRAGMA user_version = 99", "INSERT INTO facts VALUES ('colour', 'red')"),
        lambda file: file.with_name(FILE_NAME + "-wal").write_bytes(os.urandom(5000)),
        lambda file: file.with_name(FILE_NAME + "-shm").write_bytes(os.urandom(32768)),
    ],
)
async def test_what_can_be_understood_is_kept(tmp_path: Path, spoil: Damage) -> None:
    await write_some(tmp_path)
    spoil(tmp_path / FILE_NAME)
    assert await reopen(tmp_path) == Recovered(2, prepare(3), prepare(4), 0, 0)


@pytest.fixture
def full_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of one megabyte; whoever fills it writes the file `ballast`."""
    mounted = tmp_path / "disk"
    mounted.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", mounted], check=True)
    yield mounted
    subprocess.run(["umount", "--lazy", mounted], check=True)


def fill(disk: Path) -> None:
    with (disk / "ballast").open("wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(512))
        except OSError:
            return


@needs_root
async def test_a_full_disk_promises_nothing_and_stops_what_is_to_stop(full_disk: Path) -> None:
    log = PlanLog(full_disk)
    history = History(log, await log.open())
    await history.vote(prepare(3))
    fill(full_disk)
    large = prepare(4)
    large.addresses["box1"] = "x" * 2**18  # more than is left in the pages that the file has already
    with pytest.raises(PlanLogError, match="full"):
        await history.vote(large)
    assert history.prepared == prepare(3)
    (full_disk / "ballast").unlink()
    await history.vote(prepare(4))
    log.close()
    assert (await reopen(full_disk)).prepared == prepare(4)


@needs_root
async def test_a_full_disk_at_the_start_says_so_and_is_found_empty_later(full_disk: Path) -> None:
    fill(full_disk)
    log = PlanLog(full_disk)
    for _ in range(2):
        with pytest.raises(FleetError, match=r"full|disk"):
            await log.open()
    (full_disk / "ballast").unlink()
    assert (await log.open()).incarnation == 1
    log.close()


@needs_root
async def test_what_is_to_stop_stops_though_it_cannot_be_written_down(full_disk: Path) -> None:
    log = PlanLog(full_disk)
    history = History(log, await log.open())
    for epoch in (3, 4):
        await history.vote(prepare(epoch))
    fill(full_disk)
    for order in (history.abort(4), history.fence(2), history.retire(3)):
        with pytest.raises(PlanLogError, match="full"):
            await order
    assert history.prepared is None
    assert history.stale_problem(prepare(4)) == "epoch 4 is aborted"
    assert [history.over_problem(epoch) for epoch in (1, 3, 4)] == [
        "epoch 1 is fenced by epoch 2",
        "epoch 3 is retired",
        "",
    ]
    log.close()


@needs_root
async def test_a_read_only_disk_is_said(full_disk: Path) -> None:
    await write_some(full_disk)
    await asyncio.to_thread(subprocess.run, ["mount", "-o", "remount,ro", full_disk], check=True)
    with pytest.raises(FleetError, match=r"readonly|read-only|unable"):
        await reopen(full_disk)


@needs_root
async def test_a_stage_waits_for_room_on_its_disk(full_disk: Path, tmp_path: Path, tied_model: TinyModel) -> None:
    fill(full_disk)
    site = StageSite(
        tmp_path, tied_model.directory, tied_model.digest, layers=6, tied=True, stages=1, state_directory=str(full_disk)
    )
    site.start("box1")
    try:
        health = await site.wait_state("box1", "failed")
        assert FILE_NAME in health["reason"]
        (full_disk / "ballast").unlink()
        assert (await site.wait_state("box1", "ready"))["incarnation"] == 1
    finally:
        site.stop()
