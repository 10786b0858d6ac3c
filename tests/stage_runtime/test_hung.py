"""A compute thread that never returns: orders, pages and stops do not wait for it, and the box starts anew."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from stage_runtime.link.frames import FrameType
from stage_runtime.link.membership import Retire
from tests.stage_runtime.site import TIMING, StageSite, answer, connected, eventually, request
from tests.stage_runtime.stopped_thread import stopped_thread
from tests.stage_runtime.tiny import TinyModel

DRAIN_SECONDS = 2.0


@pytest.fixture
def site(tmp_path: Path, tied_model: TinyModel) -> Iterator[StageSite]:
    """Two stages that serve epoch 1."""
    timing = TIMING | {"drain_seconds": DRAIN_SECONDS}
    made = StageSite(tmp_path, tied_model.directory, tied_model.digest, layers=6, tied=True, stages=2, timing=timing)
    for box in made.boxes:
        made.start(box)
    made.giver.wait_registered(*made.boxes)
    made.giver.wait(lambda: made.giver.committed_epoch == 1)
    yield made
    made.stop()


async def wait_held(site: StageSite, box: str) -> None:
    """Until a box says itself that its compute thread hangs."""
    giver = site.giver
    await eventually(
        lambda: "has been in one call for" in giver.stages[box].heartbeats[-1].reason,
        lambda: giver.stages[box].heartbeats[-1],
    )


@pytest.mark.parametrize("hung", ["box1", "box2"])
async def test_orders_are_answered_and_the_box_starts_anew(site: StageSite, hung: str) -> None:
    giver, process = site.giver, site.processes[hung]
    heard = giver.stages[hung]
    async with connected(site.client()) as client:
        with stopped_thread(process.pid, "compute"):
            open_answer = asyncio.ensure_future(answer(client, request([7, 8], 150)))
            await wait_held(site, hung)
            assert heard.heartbeats[-1].working_seconds >= DRAIN_SECONDS
            health = await site.health(hung)
            assert (health["epoch"], health["working_seconds"] > 0) == (1, True)
            # another plan is declined as long as this one is not taken away: the coordinator judges who hangs
            await asyncio.to_thread(giver.prepare, 2, site.pipeline_plan(hung), planned=True)
            vote = (await asyncio.to_thread(giver.votes, 2))[hung]
            assert (vote.yes, "has been in one call for" in vote.reason) == (False, True)
            await asyncio.to_thread(giver.go)  # a coordinator that restarts finds it
            await asyncio.to_thread(giver.come_back)
            await asyncio.to_thread(giver.wait_registered, hung, starts=2)
            assert process.poll() is None
            await asyncio.to_thread(giver.say, hung, FrameType.RETIRE, Retire(1, "it hangs"))
            assert await asyncio.to_thread(process.wait, 30) == 1
        _, end = await open_answer
        assert end.reason == "unavailable"
    log = site.log(hung)
    assert "epoch 1 ends here: epoch 1 is retired: it hangs" in log
    assert "to be started anew" in log
    assert "Thread 0x" in log  # where it hangs
    site.start(hung)
    await asyncio.to_thread(giver.wait_registered, hung, starts=3)
    assert (heard.registers[-1].incarnation, heard.registers[-1].serving_epoch) == (2, 0)


@pytest.mark.parametrize("signals", [1, 2])
async def test_a_stop_does_not_wait_for_it(site: StageSite, signals: int) -> None:
    process = site.processes["box2"]
    async with connected(site.client()) as client:
        with stopped_thread(process.pid, "compute"):
            open_answer = asyncio.ensure_future(answer(client, request([7, 8], 150)))
            await eventually(lambda: site.giver.stages["box2"].heartbeats[-1].working_seconds > 0)
            process.terminate()
            await eventually(lambda: bool(site.giver.stages["box2"].leaving))
            if signals == 2:
                process.terminate()
            assert await asyncio.to_thread(process.wait, 30) == 0
        assert (await open_answer)[1].reason == "unavailable"
    assert ("a second time" in site.log("box2")) == (signals == 2)
    assert "Timeout" not in site.log("box2")  # it ended by itself, not by the interpreter's watchdog


async def test_a_box_that_is_merely_slow_stays(site: StageSite, tied_model: TinyModel) -> None:
    """Held, but let go before the coordinator says anything: the answer goes on, and nothing of it is left."""
    giver = site.giver
    async with connected(site.client()) as client:
        with stopped_thread(site.processes["box2"].pid, "compute"):
            open_answer = asyncio.ensure_future(answer(client, request([7, 8], 50)))
            await wait_held(site, "box2")
        assert (await open_answer)[0] == tied_model.greedy([7, 8], 50)
    await eventually(lambda: giver.stages["box2"].heartbeats[-1].reason == "")
    assert giver.stages["box2"].heartbeats[-1].working_seconds == 0
    assert len(giver.stages["box2"].registers) == 1
