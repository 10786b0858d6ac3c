"""Plans that come and go for years: nothing of them stays. Stops in every phase, and a coordinator that flaps."""

from __future__ import annotations

import asyncio
import random
import shutil
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from stage_runtime.link.frames import FrameType
from stage_runtime.link.membership import Commit, Retire
from tests.stage_runtime.site import StageSite, answer, connected, eventually, request
from tests.stage_runtime.tiny import TinyModel

SETTLED = 20  # switches after which caches of libraries are warm
FEW = 30
MANY = 1000
GROWTH_BYTES = 24 * 2**20  # allocator noise; a leaked engine of this model takes 1 MiB, a thousand of them 1 GiB


@pytest.fixture
def site(tmp_path: Path, tied_model: TinyModel) -> Iterator[StageSite]:
    """Two stages that serve epoch 1; the model directory is their own."""
    model = Path(shutil.copytree(tied_model.directory, tmp_path / "model"))
    made = StageSite(tmp_path, model, tied_model.digest, layers=6, tied=True, stages=2)
    for box in made.boxes:
        made.start(box)
    made.giver.wait_registered(*made.boxes)
    made.giver.wait(lambda: made.giver.committed_epoch == 1)
    yield made
    made.stop()


def held(site: StageSite, box: str) -> tuple[int, int, int]:
    """Descriptors, threads and resident bytes of a box's process."""
    process = psutil.Process(site.processes[box].pid)
    return process.num_fds(), process.num_threads(), process.memory_info().rss


def switch_somehow(site: StageSite, draw: random.Random) -> None:
    """One plan more: planned or not, aborted first or not, said twice or not."""
    giver = site.giver
    plan = site.pipeline_plan(*draw.choice([("box1",), ("box2",), ("box1", "box2"), ("box2", "box1")]))
    epoch = max(giver.plans) + 1
    if draw.random() < 0.3:
        giver.prepare(epoch, site.pipeline_plan("box2", "box1"), planned=True)
        if draw.random() < 0.5:
            giver.votes(epoch)
        giver.abort(epoch)
        epoch += 1
    giver.prepare(epoch, plan, planned=draw.random() < 0.5)
    votes = giver.votes(epoch)
    assert all(vote.yes for vote in votes.values()), votes
    giver.commit(epoch)
    for _ in range(draw.randrange(1, 3)):
        giver.retire(epoch - 1)


async def switch_often(site: StageSite, model: TinyModel, count: int, seed: int) -> None:
    draw = random.Random(seed)  # noqa: S311 - shuffles plans, keeps no secret
    before = {}
    for number in range(count):
        await asyncio.to_thread(switch_somehow, site, draw)
        if number % 10 == 0 or number == count - 1:
            async with connected(site.client(site.giver.committed_epoch)) as client:
                assert (await answer(client, request([5, 6, number % 300], 6)))[0] == model.greedy(
                    [5, 6, number % 300], 6
                )
        if number == SETTLED:
            before = {box: held(site, box) for box in site.boxes}
    await site.wait_kv_empty()
    for box in site.boxes:
        descriptors, threads, resident = before[box]
        await eventually(
            lambda box=box, most=descriptors + 4: held(site, box)[0] <= most, lambda box=box: (box, held(site, box))
        )
        assert held(site, box)[1] <= threads + 1
        assert held(site, box)[2] <= resident + GROWTH_BYTES, (box, before[box], held(site, box))


async def test_switches_leave_nothing_behind(site: StageSite, tied_model: TinyModel) -> None:
    await switch_often(site, tied_model, FEW, seed=1)


@pytest.mark.soak
async def test_1000_switches_leave_nothing_behind(site: StageSite, tied_model: TinyModel) -> None:
    await switch_often(site, tied_model, MANY, seed=2)


@pytest.mark.parametrize(
    "phase",
    [
        "starting",
        "preparing",
        "draining",
        *[pytest.param(phase, marks=pytest.mark.soak) for phase in ("prepared", "serving", "retired")],
    ],
)
async def test_a_stop_in_every_phase_is_an_orderly_one(site: StageSite, phase: str) -> None:
    giver, process = site.giver, site.processes["box2"]
    plan = site.pipeline_plan("box2", "box1")
    if phase == "starting":
        site.start("box2")
        await eventually(lambda: "box2" in site.log("box2") or site.admin_socket("box2").exists())
        process.kill()
        process = site.processes["box2"]
        await asyncio.sleep(1.0)  # libraries are being imported, or kernels tried
    elif phase == "serving":
        await site.wait_state("box2", "ready")
    elif phase == "retired":
        await asyncio.to_thread(giver.say, "box2", FrameType.RETIRE, Retire(1, "the test says so"))
    else:
        await asyncio.to_thread(giver.prepare, 2, plan, planned=True)
        if phase != "preparing":
            await asyncio.to_thread(giver.votes, 2)
        if phase == "draining":
            await asyncio.to_thread(giver.commit, 2)
    process.send_signal(signal.SIGTERM)
    if phase in ("serving", "draining", "preparing", "prepared"):
        await eventually(lambda: bool(giver.stages["box2"].leaving))
        await asyncio.to_thread(giver.say, "box2", FrameType.RETIRE, Retire(max(giver.plans), "it may go"))
    code = await asyncio.to_thread(process.wait, 30)
    assert code in ((0, -signal.SIGTERM) if phase == "starting" else (0,))  # before Python has set up its handler
    assert "Traceback" not in site.log("box2")
    assert "bug" not in site.log("box2")


async def test_a_coordinator_that_flaps_50_times_changes_nothing(site: StageSite, tied_model: TinyModel) -> None:
    giver = site.giver
    before = {box: held(site, box) for box in site.boxes}

    def flap() -> None:
        for number in range(50):
            giver.go()
            giver.come_back()
            if number % 5 == 0:
                giver.wait_registered(*site.boxes, starts=2)
        for box in site.boxes:
            giver.wait(lambda box=box: giver.stages[box].link is not None)

    async with connected(site.client()) as client:
        flapping = asyncio.ensure_future(asyncio.to_thread(flap))
        while not flapping.done():
            assert (await answer(client, request([7, 8], 50)))[0] == tied_model.greedy([7, 8], 50)
        await flapping
    for box in site.boxes:
        assert giver.stages[box].registers[-1].serving_epoch == 1
        assert "is broken" not in site.log(box)
        await eventually(lambda box=box: held(site, box)[0] <= before[box][0] + 4, lambda box=box: held(site, box))
    assert len(giver.plans) == 1


@pytest.mark.parametrize(
    "damage",
    ["deleted", "other bytes", *[pytest.param(damage, marks=pytest.mark.soak) for damage in ("cut", "no directory")]],
)
async def test_a_shard_that_is_damaged_later_is_a_no_with_its_name(
    site: StageSite, tied_model: TinyModel, damage: str
) -> None:
    """box1 serves layers 0 to 2; a merge needs all six."""
    giver, shard = site.giver, site.model_directory / "layer-004.safetensors"
    await site.wait_state("box1", "ready")
    if damage == "deleted":
        shard.unlink()
    elif damage == "cut":
        shard.write_bytes(shard.read_bytes()[:-7])
    elif damage == "other bytes":
        shard.write_bytes(shard.read_bytes()[:-7] + b"-------")
    else:
        shutil.move(site.model_directory, site.model_directory.with_name("elsewhere"))
    async with connected(site.client()) as client:
        await asyncio.to_thread(giver.prepare, 2, site.pipeline_plan("box1"), planned=True)
        vote = (await asyncio.to_thread(giver.votes, 2))["box1"]
        assert not vote.yes
        assert ("layer-003" if damage == "no directory" else "layer-004") in vote.reason
        assert (await answer(client, request([7, 8], 20)))[0] == tied_model.greedy([7, 8], 20)
        health = await site.health("box1")
        assert (health["state"], health["epoch"], health["draining_epoch"]) == ("ready", 1, None)
    shutil.rmtree(site.model_directory, ignore_errors=True)
    shutil.copytree(tied_model.directory, site.model_directory)
    await asyncio.to_thread(giver.prepare, 3, site.pipeline_plan("box1"), planned=True)  # the shard is back
    assert (await asyncio.to_thread(giver.votes, 3))["box1"].yes
    await asyncio.to_thread(giver.commit, 3)
    async with connected(site.client(3)) as client:
        assert (await answer(client, request([7, 8], 20)))[0] == tied_model.greedy([7, 8], 20)


async def test_orders_of_an_epoch_that_is_long_over_are_answered(site: StageSite) -> None:
    giver = site.giver
    await asyncio.to_thread(giver.switch, site.pipeline_plan("box1"))
    heard = giver.stages["box1"]
    for late in (Commit(1), Retire(1, "late"), Commit(2), Commit(99)):
        kind = FrameType.COMMIT if isinstance(late, Commit) else FrameType.RETIRE
        await asyncio.to_thread(giver.say, "box1", kind, late)
    await asyncio.to_thread(giver.say, "box1", FrameType.PREPARE, replace(giver.plans[1], planned=True))
    await eventually(lambda: sum(not vote.yes for vote in heard.votes) >= 3, lambda: heard.votes)
    assert "epoch 1" in heard.votes[-1].reason
    assert (await site.health("box1"))["epoch"] == 2
