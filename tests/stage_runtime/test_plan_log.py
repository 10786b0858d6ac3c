"""The plan log: what was promised is found again, and a damaged file is no end."""

from __future__ import annotations

from pathlib import Path

import pytest

from fleet.errors import FleetError
from fleet.planning.plan import PipelinePlan, StagePlan
from stage_runtime.link.membership import Prepare
from stage_runtime.server.plan_log import FILE_NAME, PlanLog, Recovered


def prepare(epoch: int) -> Prepare:
    plan = PipelinePlan("tiny", "d" * 64, 6, "exact", 8, 256, (StagePlan("box1", 0, 6, embedding=True, head=True),))
    return Prepare("main", epoch, plan, {"box1": "127.0.0.1:7401"}, planned=False)


async def reopen(directory: Path) -> Recovered:
    log = PlanLog(directory)
    try:
        return await log.open()
    finally:
        log.close()


async def test_what_was_written_is_found_again_and_starts_are_counted(tmp_path: Path) -> None:
    log = PlanLog(tmp_path)
    assert await log.open() == Recovered(1, None, None, 0, 0)
    await log.fence(3)
    await log.prepare(prepare(3))
    log.close()
    assert await reopen(tmp_path) == Recovered(2, None, prepare(3), 3, 0)
    log = PlanLog(tmp_path)
    await log.open()
    await log.commit(prepare(3))
    await log.prepare(prepare(4))
    await log.forget_prepared()
    await log.retire(2)
    log.close()
    assert await reopen(tmp_path) == Recovered(4, prepare(3), None, 3, 2)


@pytest.mark.parametrize("damage", [b"no database at all" * 300, b"SQLite format 3\0" + bytes(5000)])
async def test_a_damaged_database_is_set_aside(tmp_path: Path, damage: bytes) -> None:
    for number in (1, 2):
        (tmp_path / FILE_NAME).write_bytes(damage)
        assert (await reopen(tmp_path)).incarnation == 1
        assert (tmp_path / f"{FILE_NAME}.damaged-{number}").read_bytes() == damage


async def test_facts_that_make_no_sense_are_set_aside_too(tmp_path: Path) -> None:
    log = PlanLog(tmp_path)
    await log.open()
    await log._run(log._write, {"committed": "no plan"}, ())
    log.close()
    assert (await reopen(tmp_path)).incarnation == 1


async def test_a_directory_that_is_not_there_is_said(tmp_path: Path) -> None:
    with pytest.raises(FleetError, match="unable to open"):
        await reopen(tmp_path / "nowhere")
