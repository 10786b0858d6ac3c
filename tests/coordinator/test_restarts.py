"""The coordinator's process is killed with SIGKILL at each step of a switch, and started again on the same store."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import sqlite3
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from fleet.planning.plan import PipelinePlan
from stage_runtime.link.membership import Abort, Commit, Prepare, Route
from tests.coordinator.site import ScriptedGateway, ScriptedStage, config_data, until
from tests.stage_runtime.pki import SiteCa

BOXES = ("box1", "box2", "box3")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@dataclass
class Process:
    """The coordinator as a process of its own, with stages and a gateway that dial again by themselves."""

    directory: Path
    ca: SiteCa
    port: int = field(default_factory=free_port)
    stages: dict[str, ScriptedStage] = field(default_factory=dict)
    running: asyncio.subprocess.Process | None = None
    dialling: dict[str, asyncio.Task[None]] = field(default_factory=dict)

    @property
    def database(self) -> Path:
        return self.directory / "coordinator.sqlite"

    async def start(self) -> None:
        data = config_data(self.directory, self.ca)
        data["listen"]["port"] = self.port
        file = self.directory / "coordinator.json"
        file.write_text(json.dumps(data))
        command = [sys.executable, "-m", "fleet.cli.main", "coordinator", "--config", str(file)]
        log = (self.directory / "log").open("ab")
        self.running = await asyncio.create_subprocess_exec(*command, stderr=log)
        log.close()

    async def end(self, how: signal.Signals = signal.SIGKILL) -> int:
        assert self.running is not None
        with suppress(ProcessLookupError):
            self.running.send_signal(how)
        return await self.running.wait()

    def dial(self, *boxes: str) -> None:
        """Keep these stages connected; "control" is the gateway."""
        for box in boxes:
            peer: Any = ScriptedGateway(self.ca) if box == "control" else ScriptedStage(self.ca, box)
            self.stages[box] = peer
            self.dialling[box] = asyncio.ensure_future(self._keep(peer))

    async def _keep(self, peer: Any) -> None:
        while True:
            await peer.connect(self.port)
            await peer._task
            await peer.close()

    async def drop(self, box: str) -> None:
        """A box dies."""
        self.dialling[box].cancel()
        await asyncio.gather(self.dialling[box], return_exceptions=True)
        await self.stages[box].close()

    def rows(self, sql: str) -> list[Any]:
        with suppress(sqlite3.OperationalError):
            database = sqlite3.connect(f"file:{self.database}?mode=ro", uri=True)
            try:
                return database.execute(sql).fetchall()
            finally:
                database.close()
        return []

    async def close(self) -> None:
        for box in list(self.dialling):
            await self.drop(box)
        await self.end()

    async def serving(self, boxes: tuple[str, ...], after: int) -> int:
        """Wait until these boxes serve one epoch above `after`, and the gateway knows."""
        members = [self.stages[box] for box in boxes]

        def agreed() -> int:
            epochs = {stage.serving for stage in members}
            route = self.stages["control"].last(Route)
            told = route is not None and (route.state, {route.epoch}) == ("serving", epochs)
            return next(iter(epochs)) if len(epochs) == 1 and min(epochs) > after and told else 0

        return int(await until(agreed, f"one epoch above {after} on {boxes}"))

    def plans(self) -> dict[int, PipelinePlan]:
        """Every plan that any stage was ever asked to prepare; no epoch may have had two."""
        plans: dict[int, PipelinePlan] = {}
        for stage in self.stages.values():
            for prepare in (each for each in stage.inbox if isinstance(each, Prepare)):
                assert plans.setdefault(prepare.epoch, prepare.plan) == prepare.plan
        return plans


@asynccontextmanager
async def serving(directory: Path, ca: SiteCa) -> AsyncIterator[tuple[Process, int]]:
    process = Process(directory, ca)
    try:
        await process.start()
        process.dial(*BOXES, "control")
        yield process, await process.serving(BOXES, 0)
        process.plans()
    finally:
        await process.close()


async def test_a_restart_changes_nothing_that_works(tmp_path: Path, ca: SiteCa) -> None:
    async with serving(tmp_path, ca) as (process, epoch):
        before = {box: process.stages[box].count(Prepare) for box in BOXES}
        assert await process.end() != 0
        await process.start()
        routes = process.stages["control"].count(Route)
        await until(lambda: process.stages["control"].count(Route) > routes, "the route again")
        await asyncio.sleep(2.5)  # longer than anyone has to dial again
        assert process.stages["control"].last(Route).state == "serving"
        assert {box: process.stages[box].count(Prepare) for box in BOXES} == before
        assert {process.stages[box].serving for box in BOXES} == {epoch}
        assert await process.end(signal.SIGTERM) == 0


async def test_a_death_while_it_was_down_is_mended_when_it_is_back(tmp_path: Path, ca: SiteCa) -> None:
    async with serving(tmp_path, ca) as (process, epoch):
        await process.end()
        await process.drop("box2")
        await process.start()
        assert await process.serving(("box1", "box3"), epoch) > epoch


async def test_all_boxes_restarted_while_it_was_down(tmp_path: Path, ca: SiteCa) -> None:
    async with serving(tmp_path, ca) as (process, epoch):
        await process.end()
        for box in BOXES:
            process.stages[box].restart()
        await process.start()
        assert await process.serving(BOXES, epoch) > epoch
        states = process.rows("SELECT state FROM epochs ORDER BY epoch")
        assert states[-1] == ("committed",)


async def silent_votes(process: Process, voters: int) -> None:
    """From now on, only the first so many of box1 and box3 vote."""
    for number, box in enumerate(("box1", "box3")):
        if number >= voters:
            process.stages[box].answer = lambda _: None


async def lose_box2(process: Process) -> None:
    await process.drop("box2")
    await process.stages["box1"].report("box2", "closed")


def prepared(process: Process, epoch: int) -> Callable[[], bool]:
    return lambda: any(process.stages[box].last(Prepare).epoch > epoch for box in ("box1", "box3"))


def stored(process: Process, epoch: int, state: str) -> Callable[[], bool]:
    return lambda: any(row[0] > epoch and row[1] == state for row in process.rows("SELECT epoch, state FROM epochs"))


@pytest.mark.parametrize("step", ["sent", "stored", "one vote", "committed", "delivered to one"])
async def test_killed_at_each_step_of_a_switch(tmp_path: Path, ca: SiteCa, step: str) -> None:
    async with serving(tmp_path, ca) as (process, epoch):
        one, three = process.stages["box1"], process.stages["box3"]
        usual = one.answer
        votes = {"sent": 0, "stored": 0, "one vote": 1}.get(step, 2)
        await silent_votes(process, votes)
        one.deaf, three.deaf = step == "committed", step in ("committed", "delivered to one")
        await lose_box2(process)
        await until(prepared(process, epoch), "PREPARE")
        if step == "stored":
            await until(stored(process, epoch, "preparing"), "stored")
        elif step == "one vote":
            await until(lambda: one.prepared > epoch, "a vote")
        elif step != "sent":
            await until(stored(process, epoch, "committed"), "committed")
            await until(lambda: one.count(Commit) > 1 and three.count(Commit) > 1, "delivered")
        await process.end()
        one.answer = three.answer = usual
        one.deaf = three.deaf = False
        aborts = one.count(Abort)
        await process.start()
        final = await process.serving(("box1", "box3"), epoch)
        if votes == 2:  # the commit point was passed: the same decision is delivered again
            assert final == epoch + 1
        else:  # presumed abort: never that epoch again
            assert final > epoch + 1
        if step == "one vote":
            assert one.count(Abort) > aborts


async def test_a_damaged_database_is_set_aside_and_epochs_go_on(tmp_path: Path, ca: SiteCa) -> None:
    async with serving(tmp_path, ca) as (process, epoch):
        await process.end()
        for suffix in ("-wal", "-shm"):
            (tmp_path / f"coordinator.sqlite{suffix}").unlink(missing_ok=True)
        process.database.write_bytes(b"no database at all, " * 1000)
        await process.start()
        assert await process.serving(BOXES, epoch) > epoch
        assert process.database.with_name("coordinator.sqlite.damaged-1").stat().st_size == 20_000
        ((text,),) = process.rows("SELECT text FROM events WHERE kind = 'coordinator-started'")
        assert "DAMAGED" in text
