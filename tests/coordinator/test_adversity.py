"""Bad luck that no single box is to blame for: epochs that can't serve any more, a full disk, memory that is short."""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import Any

import pytest

from fleet.coordinator.context import Context
from stage_runtime.link.frames import FrameType
from stage_runtime.link.membership import Prepare, Vote
from tests.coordinator.site import LAYERS, MIB, World, until, world
from tests.stage_runtime.pki import SiteCa


async def test_a_member_without_the_ring_gets_a_new_plan(site: World) -> None:
    """It gave the ring up for an epoch that this coordinator knows nothing of, and nothing starts that ring again."""
    epoch, stage = site.epoch, site.stages["box2"]
    await stage.close()
    stage.serving = 0
    await site.connect("box2")
    await site.serving(epoch + 1, {"box1", "box2", "box3"})


async def test_a_commit_that_a_stage_knows_nothing_of_is_replaced(site: World) -> None:
    epoch, stage = site.epoch, site.stages["box2"]
    await stage.say(FrameType.VOTE, Vote(epoch, False, "nothing is promised here", 0, 0.0))
    await site.serving(epoch + 1, {"box1", "box2", "box3"})


async def test_an_old_copy_of_the_database_does_not_win(site: World) -> None:
    """Restored from a backup, the store knows an epoch that no stage serves any more."""
    epoch = site.epoch
    await site.stop()
    with sqlite3.connect(site.directory / "coordinator.sqlite") as database:
        database.execute("UPDATE epochs SET epoch = epoch - 1")  # as it was before the last switch
        database.execute("UPDATE pipelines SET reserved = 0")
    for stage in site.stages.values():
        stage.committed = stage.prepared = stage.serving = epoch + 7
    await site.start()
    for box in site.stages:
        await site.stages[box].close()
    site.gateway = None
    await site.connect()
    await site.serving(epoch + 8, {"box1", "box2", "box3"})


async def test_epochs_that_were_only_heard_of_are_not_given_out_again(tmp_path: Path, ca: SiteCa) -> None:
    async with world(tmp_path, ca) as made:
        await made.connect("box1", "box2")
        made.stages["box1"].prepared = 40  # it has fenced what is older; an ABORT of it means nothing to it
        await made.stages["box1"].say(FrameType.REGISTER, made.stages["box1"].register())
        await made.stages["box1"].close()
        await made.connect("box1", "box3")
        await made.serving(41)


def context_of(site: World) -> Context:
    """What the running coordinator knows."""
    assert site.coordinator is not None
    return site.coordinator.context


def _refuse_writes(site: World, *, refuse: bool) -> None:
    """SQLite itself refuses, as it does on a disk that is full or read-only."""
    database = context_of(site).store._database._connection
    assert database is not None
    database.execute(f"PRAGMA query_only={int(refuse)}")


async def test_a_full_disk_stops_no_ring_and_burns_no_epochs(site: World) -> None:
    epoch, others = site.epoch, [site.stages["box1"], site.stages["box3"]]
    asked = [stage.count(Prepare) for stage in others]
    _refuse_writes(site, refuse=True)
    await site.stages["box2"].kill()
    await others[0].report("box2", "closed")
    await until(lambda: context_of(site).boxes["box2"].condemned, "noticed")
    status, body = await site.ask("POST", "/v1/boxes/box3/drain")
    assert status == 503
    assert "readonly" in body["reason"]
    assert not context_of(site).boxes["box3"].record.drained  # who asked was told that it is not so
    status, document = await site.ask("GET", "/v1/events?limit=1000")
    assert status == 200
    assert document["events"]
    ticks = context_of(site).clock.now() + 1.0
    await until(lambda: context_of(site).clock.now() > ticks, "a while")
    tried = sum(stage.count(Prepare) for stage in others) - sum(asked)
    assert tried <= 2 * len(others)  # what was under way when the disk filled up, and nothing in a loop
    _refuse_writes(site, refuse=False)
    await site.serving(epoch + 1, {"box1", "box3"})
    reserved, highest = _numbers(site)
    assert reserved >= highest


def _numbers(site: World) -> tuple[int, int]:
    with sqlite3.connect(f"file:{site.directory}/coordinator.sqlite?mode=ro", uri=True) as database:
        ((reserved,),) = database.execute("SELECT reserved FROM pipelines").fetchall()
        ((highest,),) = database.execute("SELECT max(epoch) FROM epochs").fetchall()
    return int(reserved), int(highest)


async def test_reserved_epochs_outlive_a_write_that_failed(site: World) -> None:
    store = context_of(site).store
    _refuse_writes(site, refuse=True)
    store.reserve("main", 500)
    assert not await store.works() or store.refused == ""
    await until(lambda: store.refused, "refused")
    _refuse_writes(site, refuse=False)
    assert await store.works()
    reserved, _ = _numbers(site)
    assert reserved >= 500


def _cramped(data: dict[str, Any]) -> None:
    data["pipelines"]["main"]["cost"]["kv_bytes_per_token"] = 400 * 1024  # 200 MiB a layer at full load


@pytest.mark.parametrize(("mebibytes", "at_once"), [(1800, True), (4096, False)])
async def test_two_full_caches_that_do_not_fit_end_the_old_epoch(
    tmp_path: Path, ca: SiteCa, mebibytes: int, at_once: bool
) -> None:
    memory = dict.fromkeys(("box1", "box2", "box3"), mebibytes * MIB)
    async with world(tmp_path, ca, memory=memory, timing={"switch_drain_seconds": 600.0}) as made:
        await made.stop()
        _cramped(made.data)
        await made.start()
        await made.connect("box1", "box2")
        assert made.gateway is not None
        made.gateway.drains = False
        await made.serving(1, {"box1", "box2"})
        before = made.epoch
        await made.connect("box3")
        await made.serving(before + 1, {"box1", "box2", "box3"})
        if at_once:
            await until(lambda: made.stages["box1"].retired == before, "RETIRE, though streams are open")
        else:
            assert made.pipeline.switching.draining is not None


async def test_memory_that_was_short_is_learnt_in_full_and_forgotten(site: World) -> None:
    """A stage compares with what is free: one no is enough, and later the box is asked again."""
    fits = 3  # layers that box3 has room for now, one less than its share without box2 is at most
    said: list[int] = []

    def answer(prepare: Prepare) -> Vote:
        stage = prepare.plan.stage_of("box3")
        assert stage is not None
        said.append(stage.end - stage.start)
        missing = max(0, said[-1] - fits) * 100 * MIB
        return Vote(prepare.epoch, not missing, "no memory" if missing else "", missing, 0.0)

    for box in ("box1", "box2"):
        await site.stages[box].kill()
    site.stages["box3"].answer = answer
    await until(lambda: site.gateway and site.gateway.route.state == "refused", "refused: nobody else is there")
    assert said == [LAYERS]
    box3 = context_of(site).boxes["box3"]
    assert box3.cost.missing_bytes(0) > 0 or box3.short_bytes >= 3 * 100 * MIB
    fits = LAYERS  # somebody closed a browser
    await site.serving(2, {"box3"})
