"""The database is damaged, cut short, deleted, or its disk is full, while the coordinator runs."""

from __future__ import annotations

import contextlib
import os
import shutil
import sqlite3
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from fleet.coordinator.records import BoxRecord, box_from_json, box_to_json, plan_from_json
from tests.coordinator.site import World, world
from tests.stage_runtime.pki import SiteCa

FULL_BYTES = 2 * 2**20


def _files(site: World) -> list[Path]:
    return [site.directory / f"coordinator.sqlite{suffix}" for suffix in ("", "-wal", "-shm")]


def _delete_all(site: World) -> None:
    for path in _files(site):
        path.unlink()


def _delete_directory(site: World) -> None:
    shutil.rmtree(site.directory)


def _delete_log(site: World) -> None:
    _files(site)[1].unlink()


def _cut_short(site: World) -> None:
    os.truncate(_files(site)[0], 512)


def _cut_log_short(site: World) -> None:
    os.truncate(_files(site)[1], 100)


def _restore_copy(site: World) -> None:
    copy = site.directory / "copy"
    shutil.copy(_files(site)[0], copy)
    copy.replace(_files(site)[0])


@pytest.mark.parametrize(
    "break_it", [_delete_all, _delete_directory, _delete_log, _cut_short, _cut_log_short, _restore_copy]
)
async def test_a_lost_file_is_made_anew_with_what_is_live(
    tmp_path: Path, ca: SiteCa, break_it: Callable[[World], None]
) -> None:
    async with world(tmp_path / "state", ca) as made:
        await made.connect()
        await made.serving()
        before = made.epoch
        assert (await made.ask("POST", "/v1/boxes/box3/drain"))[0] == 202
        await made.serving(before + 1, {"box1", "box2"})
        break_it(made)
        await made.stages["box2"].kill()
        await made.stages["box1"].report("box2", "closed")
        await made.serving(before + 2, {"box1"})  # healing goes on
        (told,) = await made.events("database-replaced")
        assert "made anew" in told["text"]
        last = made.epoch
        await made.stop()
        await made.start()
        assert made.epoch == last  # a restart finds the plan, the drain and the hold-down
        boxes = made.coordinator.context.boxes if made.coordinator else {}
        assert boxes["box3"].record.drained
        assert boxes["box2"].record.deaths == 1
        assert {"plan-committed", "coordinator-started"} <= {event["kind"] for event in await made.events()}


async def test_damage_that_a_write_finds_is_mended(site: World) -> None:
    """SQLite's own word for it, from pages that are rubbish when they are read again."""
    before = site.epoch
    await site.events()
    assert site.coordinator is not None
    connection = site.coordinator.context.store._database._connection
    assert connection is not None
    connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
    connection.execute("PRAGMA cache_size=0")
    connection.execute("PRAGMA shrink_memory")
    with _files(site)[0].open("r+b") as file:
        file.seek(4096)
        file.write(os.urandom(_files(site)[0].stat().st_size - 4096))
    await site.stages["box2"].kill()
    await site.stages["box1"].report("box2", "closed")
    await site.serving(before + 1, {"box1", "box3"})
    assert len(await site.events("database-replaced")) == 1
    assert (site.directory / "coordinator.sqlite.damaged-1").exists()


@contextlib.contextmanager
def _small_disk(directory: Path) -> Iterator[None]:
    directory.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={FULL_BYTES}", "tmpfs", str(directory)]
    if os.geteuid() != 0 or subprocess.run(command, check=False, capture_output=True).returncode != 0:
        pytest.skip("no right to mount a small disk")
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(directory)], check=True)


def _fill(directory: Path) -> None:
    with contextlib.suppress(OSError), (directory / "filler").open("wb", buffering=0) as file:
        while True:
            file.write(b"x" * 4096)


async def test_a_full_disk(tmp_path: Path, ca: SiteCa) -> None:
    state = tmp_path / "state"
    with _small_disk(state):
        async with world(state, ca) as made:
            await made.connect()
            await made.serving()
            before = made.epoch
            _fill(state)
            for number in range(400):
                made.pipeline.switching._event("plan-refused", f"number {number} " + "x" * 1000)
            await made.events()
            await made.stages["box2"].kill()
            await made.stages["box1"].report("box2", "closed")
            await made.serving(before + 1, {"box1", "box3"})  # room was held for it
            for _ in range(10):
                epoch = made.epoch
                assert (await made.ask("POST", "/v1/boxes/box3/drain"))[0] == 202
                await made.serving(epoch + 1, {"box1"})
                assert (await made.ask("POST", "/v1/boxes/box3/undrain"))[0] == 202
                await made.serving(epoch + 2, {"box1", "box3"})
            (state / "filler").unlink()
            made.pipeline.switching._event("plan-refused", "room again")
            assert (await made.events("plan-refused"))[-1]["text"] == "room again"
            with sqlite3.connect(f"file:{state}/coordinator.sqlite?mode=ro", uri=True) as database:
                rows = database.execute("SELECT epoch FROM epochs WHERE state = 'committed'").fetchall()
                ((record,),) = database.execute("SELECT record FROM boxes WHERE name = 'box2'").fetchall()
            assert rows == [(made.epoch,)]
            assert box_from_json(record).deaths == 1  # what was noted while it was full came later


def test_rows_that_can_not_be_true_are_none() -> None:
    for text in (
        "",
        "{}",
        "[]",
        box_to_json(BoxRecord(layer_seconds=1e300)),
        box_to_json(BoxRecord(head_seconds=-1.0)),
        box_to_json(BoxRecord(hold_down_seconds=-1.0)),
        box_to_json(BoxRecord()).replace("false", "0"),
    ):
        with pytest.raises(ValueError):
            box_from_json(text)
    assert box_from_json(box_to_json(BoxRecord(3, "p", "a", 1, 0.1, None, 2, 9.5, True))).drained


@pytest.mark.parametrize(
    "change",
    [
        "UPDATE boxes SET record = '{}' WHERE name = 'box2'",
        "UPDATE boxes SET record = x'00ff' WHERE name = 'box2'",
        "UPDATE boxes SET record = replace(record, '\"layer_seconds\":null', '\"layer_seconds\":1e300')",
        "UPDATE epochs SET plan = replace(plan, '\"end\": 2', '\"end\": 3')",
        "UPDATE epochs SET state = 'odd'",
        "UPDATE epochs SET plan = x'00'",
        "UPDATE pipelines SET reserved = 'many'",
        "UPDATE epochs SET epoch = -7",
        "DROP TABLE epochs",
    ],
)
async def test_a_damaged_row_costs_a_plan_at_most(site: World, change: str) -> None:
    before = site.epoch
    await site.stop()
    with sqlite3.connect(site.directory / "coordinator.sqlite") as database:
        database.execute(change)
    database.close()
    await site.start()
    if site.gateway is not None:
        await site.gateway.close()
        site.gateway = None
    for stage in site.stages.values():
        await stage.close()
    await site.connect()
    await site.serving(before, {"box1", "box2", "box3"})


def test_a_plan_with_a_gap_is_none() -> None:
    with pytest.raises(ValueError, match="begins at layer"):
        plan_from_json(
            '{"model":"m","model_digest":"d","layers":2,"policy":"exact","max_sequences":1,'
            '"max_tokens_per_sequence":1,"stages":[{"box":"a","start":1,"end":2,"embedding":true,"head":true}]}'
        )
