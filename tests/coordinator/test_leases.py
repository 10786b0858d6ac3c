"""Leases: guards ask with their own client before they take a box that serves out of its pipeline."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from guards.board import Board
from guards.findings import Action, Repair
from guards.keeper import Keeper
from guards.leases import CoordinatorLeases
from guards.restarts import LeaseRefused, Restarts, RestartTiming
from stage_runtime.link.membership import Prepare, Retire, Vote
from stage_runtime.link.tls import server_name
from tests.coordinator.site import MIB, SITE, ScriptedStage, World, until, world
from tests.stage_runtime.pki import SiteCa


def client(site: World, box: str, seconds: float = 30.0) -> CoordinatorLeases:
    assert site.coordinator is not None
    return CoordinatorLeases(
        SITE,
        box,
        site.ca.issue(box),
        coordinator_box="control",
        host="127.0.0.1",
        port=site.coordinator.http_port,
        lease_seconds=seconds,
    )


@asynccontextmanager
async def leased(site: World, box: str, seconds: float = 30.0) -> AsyncIterator[None]:
    """The guards' client blocks, as their threads do."""
    lease = client(site, box, seconds).take("it leaks")
    await asyncio.to_thread(lease.__enter__)
    try:
        yield
    finally:
        await asyncio.to_thread(lease.__exit__, None, None, None)


async def refusal(site: World, box: str) -> str:
    with pytest.raises(LeaseRefused) as caught:
        async with leased(site, box):
            pass
    return str(caught.value)


async def post(site: World, path: str, body: bytes, who: str, method: str = "POST") -> tuple[int, Any]:
    assert site.coordinator is not None
    url = f"https://127.0.0.1:{site.coordinator.http_port}{path}"
    context = site.ca.issue(who).client_context()
    async with (
        aiohttp.ClientSession() as session,
        session.request(method, url, data=body, ssl=context, server_hostname=server_name("control", SITE)) as response,
    ):
        return response.status, await response.json(content_type=None)


async def test_one_box_of_a_pipeline_at_a_time(site: World) -> None:
    async with leased(site, "box2"):
        assert await refusal(site, "box3") == "the coordinator on control gives no lease: box2 has the lease"
        async with leased(site, "box2"):  # its guards were killed meanwhile, and ask again
            pass
    async with leased(site, "box3"):
        pass
    kinds = [event["kind"] for event in await site.events("lease-taken", "lease-returned", "lease-ended")]
    assert kinds == ["lease-taken", "lease-returned", "lease-taken", "lease-returned"]


async def test_while_one_is_away_nobody_else_goes(site: World) -> None:
    before = site.epoch
    async with leased(site, "box2"):
        await site.stages["box2"].leave()
        await site.serving(before + 1, {"box1", "box3"})
    assert "box2 is away, and is waited for" in await refusal(site, "box3")


async def test_the_last_box_stays(site: World) -> None:
    before = site.epoch
    for number, box in enumerate(("box1", "box2"), 1):
        assert (await site.ask("POST", f"/v1/boxes/{box}/drain"))[0] == 202
        await site.serving(before + number)
        await until(lambda: site.pipeline.switching.draining is None, "the old plan is retired")
    assert "no other box can take over" in await refusal(site, "box3")


async def test_one_that_is_not_given_back_ends(site: World) -> None:
    path = "/v1/boxes/box2/lease"
    status, lease = await post(site, path, b'{"because": "it leaks", "seconds": 0.05}', "box2")
    assert (status, lease["seconds"]) == (200, 0.05)
    await until(lambda: site.pipeline.leases.held is None, "it ends")
    async with leased(site, "box3"):
        pass
    assert (await post(site, f"{path}/{lease['lease']}", b"", "box2", "DELETE"))[0] == 404
    assert len(await site.events("lease-ended")) == 1


@pytest.mark.parametrize(
    ("path", "body", "who", "status"),
    [
        ("/v1/boxes/box2/lease", {"because": "x", "seconds": 1}, "box3", 403),
        ("/v1/boxes/box2/drain", {}, "box2", 403),
        ("/v1/boxes/box9/lease", {"because": "x", "seconds": 1}, "box9", 404),
        ("/v1/boxes/box2/lease", {"because": "x", "seconds": 0}, "box2", 400),
        ("/v1/boxes/box2/lease", {"because": "", "seconds": 1}, "box2", 400),
        ("/v1/boxes/box2/lease", {"because": "x", "seconds": 1, "more": 1}, "box2", 400),
        ("/v1/boxes/box2/lease", [], "box2", 400),
        ("/v1/boxes/box2/lease", {"because": "x" * 5000, "seconds": 1}, "box2", 413),
        ("/v1/boxes/box2/lease", {"because": "line\nline" + "x" * 500, "seconds": 1e5}, "box2", 200),
        ("/v1/boxes/box2/lease", {"because": "by hand", "seconds": 5}, "operator", 200),
    ],
)
async def test_who_may_ask_and_how(site: World, path: str, body: object, who: str, status: int) -> None:
    answered, document = await post(site, path, json.dumps(body).encode(), who)
    assert answered == status
    if status == 200:
        assert document["seconds"] <= 3600
        (taken,) = await site.events("lease-taken")
        assert "\n" not in taken["text"]
        assert len(taken["text"]) < 300
    else:
        assert document["reason"]


async def test_no_coordinator_no_lease(site: World) -> None:
    asking = client(site, "box2")
    await site.stop()
    with pytest.raises(LeaseRefused, match="can't be asked"):
        await asyncio.to_thread(asking.take("it leaks").__enter__)


async def ask_lease(site: World, box: str, seconds: float = 30.0) -> tuple[int, Any]:
    body = json.dumps({"because": "it leaks", "seconds": seconds}).encode()
    return await post(site, f"/v1/boxes/{box}/lease", body, box)


async def test_a_holder_that_asks_again_has_the_same_lease_even_while_it_is_taken_out(site: World) -> None:
    first = await ask_lease(site, "box2")
    hold = asyncio.Event()
    site.stages["box1"].answer = lambda prepare: None if not hold.is_set() else Vote(prepare.epoch, True, "", 0, 0.01)
    await site.stages["box2"].leave()
    await until(lambda: site.switching, "a switch takes it out")
    assert await ask_lease(site, "box2") == first
    assert await ask_lease(site, "box3") == (409, {"reason": "box2 has the lease"})
    assert len(await site.events("lease-taken")) == 1
    _, document = await site.ask("GET", "/v1/site")
    assert document["pipelines"]["main"]["lease"]["box"] == "box2"
    assert 0 < document["pipelines"]["main"]["lease"]["seconds_left"] <= 30


async def test_nobody_goes_during_a_switch(site: World) -> None:
    site.stages["box1"].answer = lambda prepare: None
    assert (await site.ask("POST", "/v1/boxes/box2/drain"))[0] == 202
    await until(lambda: site.switching, "the drain is under way")
    assert "pipeline main is in a switch" in await refusal(site, "box3")


async def test_nobody_goes_while_a_member_is_not_heard(site: World) -> None:
    """Its neighbours hear it, so it is not dead, but it may be."""
    await site.stages["box1"].report("box2", "connected")
    await site.stages["box3"].report("box2", "connected")
    await site.stages["box2"].close()
    await until(lambda: site.coordinator.context.boxes["box2"].channel == "lost", "it is noticed")  # type: ignore[union-attr]
    await until(lambda: site.coordinator.context.boxes["box2"].verdict.kind == "waiting", "judged")  # type: ignore[union-attr]
    assert "box2 serves, and is not heard" in await refusal(site, "box3")


async def test_nobody_goes_whom_the_others_cannot_do_without(tmp_path: Path, ca: SiteCa) -> None:
    small = dict.fromkeys(("box1", "box2", "box3"), 660 * MIB)
    async with world(tmp_path, ca, memory=small) as site:
        await site.connect()
        await site.serving()
        reason = await refusal(site, "box2")
        assert "MiB" in reason
        assert await site.events("lease-taken") == []


async def test_one_that_dies_with_a_lease_loses_it_when_its_time_has_passed(tmp_path: Path, ca: SiteCa) -> None:
    async with world(tmp_path, ca, timing={"prepare_seconds": 1.0}) as site:
        await site.connect()
        await site.serving()
        assert (await ask_lease(site, "box2", 1.0))[0] == 200
        await site.stages["box2"].kill()
        await site.stages["box1"].report("box2", "closed")
        assert (await ask_lease(site, "box3"))[0] == 409
        await site.serving(site.epoch + 1, {"box1", "box3"})
        await until(lambda: site.pipeline.leases.held is None, "it ends")
        for _ in range(200):  # until nobody waits for the dead one any more
            status, _ = await ask_lease(site, "box3")
            if status == 200:
                break
            await asyncio.sleep(0.05)
        assert status == 200
        assert [event["box"] for event in await site.events("lease-ended")] == ["box2"]


async def test_a_coordinator_that_restarts_knows_who_has_the_lease(site: World) -> None:
    path = "/v1/boxes/box2/lease"
    _, lease = await ask_lease(site, "box2")
    await site.stop()
    await site.start()
    await site.connect("box1", "box3")
    assert await ask_lease(site, "box3") == (409, {"reason": "box2 has the lease"})
    await site.connect("box2")
    await site.serving()
    assert await ask_lease(site, "box2") == (200, lease)
    assert (await post(site, f"{path}/{lease['lease']}", b"", "box2", "DELETE"))[0] == 204
    await site.stop()
    await site.start()
    assert site.pipeline.leases.held is None


async def test_a_coordinator_that_restarts_waits_for_everyone_before_it_gives_a_lease(site: World) -> None:
    before = site.epoch
    assert (await site.ask("POST", "/v1/boxes/box2/drain"))[0] == 202
    await site.serving(before + 1, {"box1", "box3"})
    await until(lambda: site.pipeline.switching.draining is None, "the old plan is retired")
    assert (await site.ask("POST", "/v1/boxes/box2/undrain"))[0] == 202
    site.stages["box2"].answer = lambda prepare: None
    await site.stages["box2"].close()
    await site.stop()
    await site.start()
    await site.connect("box1", "box3")
    await until(lambda: site.coordinator.context.boxes["box3"].verdict.kind == "alive", "judged")  # type: ignore[union-attr]
    assert "box2 has not been heard since the coordinator started" in await refusal(site, "box1")


async def test_a_drain_by_hand_counts_on_no_box_that_may_go_at_any_moment(tmp_path: Path, ca: SiteCa) -> None:
    """Two boxes hold the model, one does not: with a lease out, nobody can be drained beside its holder."""
    async with world(tmp_path, ca, memory=dict.fromkeys(("box1", "box2", "box3"), 800 * MIB)) as site:
        await site.connect()
        await site.serving()
        async with leased(site, "box2"):
            status, answer = await site.ask("POST", "/v1/boxes/box3/drain")
            assert status == 409
            assert answer["reason"].endswith("; box2 has a lease for a restart")
        assert (await site.ask("POST", "/v1/boxes/box3/drain"))[0] == 202


class OneProgram:
    """What guards need of supervisord, for a scripted stage: stops when the coordinator lets it go, as the real one."""

    def __init__(self, site: World, stage: ScriptedStage) -> None:
        self._site, self._stage = site, stage
        self._loop = asyncio.get_running_loop()
        self.pid = 100
        self._next_pid = 101
        self.tasks: list[Any] = []

    def programs(self) -> Mapping[str, Mapping[str, Any]]:
        return {"stage": {"name": "stage", "group": "stage", "pid": self.pid, "statename": "RUNNING"}}

    def stop_group(self, group: str) -> None:
        assert group == "stage"
        self.tasks.append(asyncio.run_coroutine_threadsafe(self._stop(), self._loop))

    def start_group(self, group: str) -> None:
        assert group == "stage"
        self.tasks.append(asyncio.run_coroutine_threadsafe(self._start(), self._loop))

    async def _stop(self) -> None:
        epoch = self._site.epoch
        await self._stage.leave()
        await until(lambda: self._stage.retired >= epoch, "others have its layers")
        await self._stage.kill()
        self.pid = 0

    async def _start(self) -> None:
        await self._site.connect(self._stage.box)
        self.pid, self._next_pid = self._next_pid, self._next_pid + 1


async def test_guards_restart_a_stage_under_a_lease(site: World) -> None:
    stage, before = site.stages["box2"], site.epoch
    supervisor, keeper = OneProgram(site, stage), Keeper(None, {})
    board = Board(["memory"], keeper.clock.now_seconds)
    held: set[str] = set()

    def healthy(name: str) -> bool:
        held.add(site.pipeline.leases.held.box)
        return stage.serving == site.epoch > before + 1

    restarts = Restarts(
        supervisor,
        client(site, "box2"),
        keeper,
        board,
        timing=RestartTiming(10.0, 10.0),
        healthy=healthy,
    )
    action = Action(Repair.RESTART_PROGRAM, "stage", "it leaks", {"needs_lease": True})
    await asyncio.to_thread(restarts.run, "memory", action)
    assert [(event.kind, "healthy again" in event.text) for event in board.events()] == [("done", True)]
    assert held == {"box2"}
    assert site.pipeline.leases.held is None
    assert set(site.spans) == {"box1", "box2", "box3"}
    assert await site.events("box-dead") == [], "an orderly stop is no death"
    assert all(task.done() and task.exception() is None for task in supervisor.tasks)
    assert stage.last(Retire) is not None
    assert stage.last(Prepare) is not None
    kinds = [event["kind"] for event in await site.events("lease-taken", "lease-returned")]
    assert kinds == ["lease-taken", "lease-returned"]
