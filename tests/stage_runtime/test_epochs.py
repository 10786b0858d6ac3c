"""Plans come and go under open answers: boxes die, stop, return; every answer equals that of an undisturbed run."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from stage_runtime.link.client import PipelineClient
from stage_runtime.link.frames import FrameType
from stage_runtime.link.membership import Commit, Standby
from stage_runtime.link.messages import FinishedEvent, GenerateRequest, TokenEvent
from tests.stage_runtime.site import StageSite, answer, connected, eventually, request, wait_ready
from tests.stage_runtime.tiny import TinyModel

PROMPT = [5, 9, 200, 17, 33]
TOKENS = 60


@pytest.fixture
def site(tmp_path: Path, tied_model: TinyModel) -> Iterator[StageSite]:
    """Three stages that serve epoch 1."""
    made = StageSite(tmp_path, tied_model.directory, tied_model.digest, layers=6, tied=True)
    for box in made.boxes:
        made.start(box)
    made.giver.wait_registered(*made.boxes)
    made.giver.wait(lambda: made.giver.committed_epoch == 1)
    yield made
    made.stop()


@asynccontextmanager
async def begun(client: PipelineClient, wanted: GenerateRequest, count: int = 5) -> AsyncIterator[asyncio.Task[Begun]]:
    """An answer that is read in the background, once it has some tokens."""
    heard = Begun([], None)

    async def read() -> Begun:
        async for event in client.generate(wanted):
            if isinstance(event, TokenEvent):
                heard.tokens.append(event.token_id)
            else:
                heard.end = event
        return heard

    task = asyncio.ensure_future(read())
    await eventually(lambda: len(heard.tokens) >= count)
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


class Begun:
    """What came of an answer."""

    def __init__(self, tokens: list[int], end: FinishedEvent | None) -> None:
        self.tokens = tokens
        self.end = end


async def go_on(client: PipelineClient, wanted: GenerateRequest, so_far: list[int]) -> list[int]:
    """Submit a sequence again with what was generated; the whole answer."""
    tokens = list(so_far)
    async for event in client.generate(replace(wanted, generated=tuple(so_far))):
        if isinstance(event, FinishedEvent):
            assert event.reason == "length", event
            return tokens
        assert event.index == len(tokens)
        tokens.append(event.token_id)
    raise AssertionError("no end")


def rows(site: StageSite, epoch_log: str, box: str) -> list[int]:
    """Numbers that a box logged behind a text."""
    return [int(number) for number in re.findall(epoch_log + r"(\d+)", site.log(box))]


@pytest.mark.parametrize("dead", ["box1", "box2", "box3"])
async def test_a_box_dies_and_the_answer_goes_on_elsewhere(site: StageSite, tied_model: TinyModel, dead: str) -> None:
    greedy, seeded = request(PROMPT, TOKENS), request(PROMPT, TOKENS, temperature=1.1, seed=7, frequency_penalty=0.3)
    async with connected(site.client()) as client:
        undisturbed = (await answer(client, replace(seeded, sequence_id=2**40)))[0]
        async with begun(client, greedy) as one, begun(client, seeded) as two:
            site.kill(dead)
            first, second = await one, await two
    for heard in (first, second):
        assert heard.end is not None
        assert heard.end.reason == "unavailable"
    left = [box for box in site.boxes if box != dead]
    neighbours = [site.giver.stages[box] for box in left]
    await eventually(  # a gateway may hear of a first stage's death before the coordinator hears of it
        lambda: any(report.box == dead and report.kind == "closed" for each in neighbours for report in each.reports)
    )
    epoch = await asyncio.to_thread(site.giver.switch, site.pipeline_plan(*left))
    async with connected(site.client(epoch)) as client:
        assert await go_on(client, greedy, first.tokens) == tied_model.greedy(PROMPT, TOKENS)
        assert await go_on(client, seeded, second.tokens) == undisturbed
        await eventually(lambda: client.status.largest_logit_difference is not None)  # the probe comes behind
    await site.wait_kv_empty()


async def test_a_planned_switch_loses_no_token(site: StageSite, tied_model: TinyModel) -> None:
    wanted, more = request(PROMPT, 200), request(PROMPT, TOKENS)
    new_plan = site.pipeline_plan("box3", "box1")
    giver = site.giver
    async with connected(site.client()) as old, begun(old, wanted) as reading:
        await asyncio.to_thread(giver.prepare, 2, new_plan, planned=True)
        votes = await asyncio.to_thread(giver.votes, 2)
        assert all(vote.yes for vote in votes.values()), votes
        assert not reading.done()
        await asyncio.to_thread(giver.commit, 2)
        async with connected(site.client(2)) as new:
            health = await site.health("box1")
            assert (health["epoch"], health["draining_epoch"]) == (2, 1)
            assert (await answer(new, more))[0] == tied_model.greedy(PROMPT, TOKENS)
            await eventually(lambda: new.status.largest_logit_difference is not None)  # the probe ends behind
            await asyncio.to_thread(giver.retire, 1)
            heard = await reading
            assert heard.end is not None
            if heard.end.reason == "unavailable":  # else it had finished
                # its own RETIRE, or the links that a neighbour has closed for its: whichever comes first
                assert "epoch 1 is retired" in heard.end.message or "the ring broke" in heard.end.message
                heard.tokens = await go_on(new, wanted, heard.tokens)
            assert heard.tokens == tied_model.greedy(PROMPT, 200)
    await site.wait_kv_empty()
    assert (await site.wait_state("box2", "loaded"))["epoch"] == 0
    await eventually(lambda: giver.stages["box2"].heartbeats[-1].ready_layers == 0)  # what only it needed is freed


async def test_an_aborted_prepare_changes_nothing(site: StageSite, tied_model: TinyModel) -> None:
    giver = site.giver
    async with connected(site.client()) as client, begun(client, request(PROMPT, 200)) as reading:
        await asyncio.to_thread(giver.prepare, 2, site.pipeline_plan("box2", "box1"), planned=True)
        await asyncio.to_thread(giver.votes, 2)
        await asyncio.to_thread(giver.abort, 2)
        late = Commit(2)
        await asyncio.to_thread(giver.say, "box1", FrameType.COMMIT, late)  # nothing is promised any more
        await eventually(lambda: not giver.stages["box1"].votes[-1].yes, lambda: giver.stages["box1"].votes)
        assert (await reading).tokens == tied_model.greedy(PROMPT, 200)
        health = await site.health("box1")
        assert (health["epoch"], health["draining_epoch"]) == (1, None)
        await asyncio.to_thread(giver.prepare, 2, site.pipeline_plan("box2", "box1"), planned=True)
        await eventually(lambda: "epoch 2 is aborted" in giver.stages["box1"].votes[-1].reason)


async def test_orders_that_come_again_are_answered_the_same(site: StageSite) -> None:
    giver = site.giver
    heard = giver.stages["box2"]
    await site.wait_state("box2", "ready")
    formed = (await site.health("box2"))["epoch"], site.log("box2").count("is connected")
    before = len(heard.committed)
    for _ in range(3):
        await asyncio.to_thread(giver.say, "box2", FrameType.PREPARE, giver.plans[1])
        await asyncio.to_thread(giver.say, "box2", FrameType.COMMIT, Commit(1))
    await eventually(lambda: len(heard.committed) >= before + 3)
    assert all(vote.yes for vote in heard.votes if vote.epoch == 1)
    old = replace(giver.plans[1], epoch=0)
    await asyncio.to_thread(giver.say, "box2", FrameType.PREPARE, old)
    await eventually(lambda: heard.vote(0) is not None)
    assert not heard.votes[-1].yes
    await asyncio.to_thread(giver.challenge, "box2", "a nonce")
    await eventually(lambda: heard.answers == ["a nonce"])
    assert formed == ((await site.health("box2"))["epoch"], site.log("box2").count("is connected"))


async def test_a_ring_that_breaks_between_living_stages_prefills_nothing_again(
    site: StageSite, tied_model: TinyModel
) -> None:
    prompt = [3 + index % 300 for index in range(150)]
    wanted = request(prompt, TOKENS)
    async with connected(site.client()) as client:
        async with begun(client, wanted) as reading:
            await asyncio.to_thread(reset_links, site, "box1", "box2")
            heard = await reading
        assert heard.end is not None
        assert heard.end.reason == "unavailable"
        await wait_ready(client)
        assert await go_on(client, wanted, heard.tokens) == tied_model.greedy(prompt, TOKENS)
    kept = rows(site, "sequence is queued, ", "box1")
    assert len(kept) == 2
    assert kept[1] >= len(prompt)
    assert len(site.giver.plans) == 1
    await site.wait_kv_empty()


def reset_links(site: StageSite, one: str, other: str) -> None:
    """Kill the TCP connection between two stages' ring ports, both alive."""
    port = site.ring_ports[other]
    subprocess.run(["ss", "-K", "dst", "127.0.0.1", "dport", "=", str(port)], check=True, capture_output=True)
    site.giver.wait(
        lambda: any(report.box == other and report.kind == "closed" for report in site.giver.stages[one].reports),
        lambda: "the link was reset",
    )


async def test_a_stopped_stage_that_runs_on_is_fenced(site: StageSite, tied_model: TinyModel) -> None:
    wanted = request(PROMPT, TOKENS)
    stopped = site.processes["box1"].pid
    async with connected(site.client()) as client, begun(client, wanted) as reading:
        os.kill(stopped, signal.SIGSTOP)
        epoch = await asyncio.to_thread(site.giver.switch, site.pipeline_plan("box2", "box3"))
        async with connected(site.client(epoch)) as new:
            os.kill(stopped, signal.SIGCONT)
            heard = await reading
            assert await go_on(new, wanted, heard.tokens) == tied_model.greedy(PROMPT, TOKENS)
            await asyncio.to_thread(site.giver.retire, 1, "box1")
            await eventually(lambda: "is fenced by epoch 2" in site.log("box1"), lambda: site.log("box1")[-2000:])
            assert not client.status.ready
            assert (await answer(new, request(PROMPT, 9)))[0] == tied_model.greedy(PROMPT, 9)
    assert (await site.wait_state("box1", "loaded"))["epoch"] == 0


async def test_a_restarted_stage_waits_for_its_commit(site: StageSite, tied_model: TinyModel) -> None:
    giver = site.giver
    await site.wait_state("box2", "ready")
    giver.obedient = False
    site.kill("box2")
    site.start("box2")
    await asyncio.to_thread(giver.wait_registered, "box2", starts=2)
    register = giver.stages["box2"].registers[-1]
    assert (register.incarnation, register.committed_epoch, register.serving_epoch) == (2, 1, 0)
    assert register.process_id != giver.stages["box2"].registers[0].process_id
    await eventually(lambda: giver.stages["box2"].heartbeats[-1].ready_layers == 2)  # in memory at once
    health = await site.health("box2")
    assert (health["state"], health["epoch"], health["incarnation"]) == ("loaded", 0, 2)
    await asyncio.to_thread(giver.say, "box2", FrameType.COMMIT, Commit(1))
    await site.wait_state("box2", "ready")
    async with connected(site.client()) as client:
        assert (await answer(client, request(PROMPT, 9)))[0] == tied_model.greedy(PROMPT, 9)


async def test_the_ring_does_not_notice_that_the_coordinator_is_gone(site: StageSite, tied_model: TinyModel) -> None:
    giver = site.giver
    async with connected(site.client()) as client, begun(client, request(PROMPT, 200)) as reading:
        await asyncio.to_thread(giver.go)
        for box in site.boxes:
            await eventually(lambda box=box: giver.stages[box].link is None)
        await asyncio.to_thread(giver.come_back)
        await asyncio.to_thread(giver.wait_registered, *site.boxes, starts=2)
        assert (await reading).tokens == tied_model.greedy(PROMPT, 200)
    for box in site.boxes:
        assert giver.stages[box].registers[-1].serving_epoch == 1
        assert len(re.findall(r"predecessor box\d is connected", site.log(box))) == (box != "box1")
        assert "is broken" not in site.log(box)


async def test_standby_layers_are_ready_and_reported(site: StageSite) -> None:
    await site.wait_state("box1", "ready")
    await asyncio.to_thread(site.giver.standby, "box1", Standby((2, 3), head=False, embedding=False))
    await eventually(lambda: site.giver.stages["box1"].heartbeats[-1].ready_layers == 4)
    assert (await site.health("box1"))["standby_layers"] == [2, 3]
    await asyncio.to_thread(site.giver.standby, "box1", Standby((), head=False, embedding=False))
    await eventually(lambda: site.giver.stages["box1"].heartbeats[-1].ready_layers == 2)


async def test_a_plan_that_does_not_fit_memory_is_declined_with_what_is_missing(
    tied_model: TinyModel, tmp_path: Path
) -> None:
    keep_free = 2**50
    site = StageSite(
        tmp_path,
        tied_model.directory,
        tied_model.digest,
        layers=6,
        tied=True,
        stages=1,
        memory_keep_free_bytes=keep_free,
    )
    site.start("box1")
    try:
        heard = site.giver.stages["box1"]
        await eventually(lambda: bool(heard.votes))
        assert not heard.votes[0].yes
        assert 0 < keep_free - heard.votes[0].missing_bytes < heard.registers[0].memory_total_bytes
        assert heard.registers[0].layer_seconds is None
        health = await site.wait_state("box1", "loaded")
        assert "may be taken" in health["reason"]
    finally:
        site.stop()
