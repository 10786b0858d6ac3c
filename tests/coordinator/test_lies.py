"""Peers with certificates of the site that say what can't be true, or what they should not."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from stage_runtime.link.connection import LinkError
from stage_runtime.link.frames import FrameType
from stage_runtime.link.membership import Heartbeat, LinkReport, Vote
from tests.coordinator.site import Dialler, ScriptedGateway, World, until, world
from tests.stage_runtime.pki import SiteCa

BOXES = {"box1", "box2", "box3"}


@pytest.mark.parametrize(
    ("layer_seconds", "head_seconds"), [(1e300, None), (-1.0, None), (1e-320, None), (None, 1e300), (0.01, -1e300)]
)
async def test_seconds_beyond_all_reason_are_refused(
    site: World, layer_seconds: float | None, head_seconds: float | None
) -> None:
    stage = site.stages["box2"]
    absurd = replace(stage.register(), layer_seconds=layer_seconds, head_seconds=head_seconds)
    await stage.say(FrameType.REGISTER, absurd)
    await until(lambda: stage.ended, "refused")
    assert "beyond all reason" in stage.ended
    record = site.coordinator.context.boxes["box2"].record
    assert (record.layer_seconds, record.head_seconds) == (None, None)
    assert site.gateway.route.state == "serving"


@pytest.mark.parametrize("epoch", [2**62, 2**62 - 10, 2**61 + 1])
async def test_an_epoch_above_which_none_is_left_is_refused(site: World, epoch: int) -> None:
    stage = site.stages["box2"]
    await stage.say(FrameType.REGISTER, replace(stage.register(), prepared_epoch=epoch))
    await until(lambda: stage.ended, "refused")
    assert "beyond all reason" in stage.ended


@pytest.mark.parametrize("silent", [1e308, -5.0, 1e17])
async def test_a_silence_beyond_all_reason_is_refused(site: World, silent: float) -> None:
    stage = site.stages["box1"]
    await stage.say(FrameType.LINK_REPORT, LinkReport("box2", site.epoch, "silent", "so it says", silent))
    await until(lambda: stage.ended, "refused")
    assert "beyond all reason" in stage.ended


@pytest.mark.parametrize("letter", ["x", "\x1b", "\U0001f600"])
async def test_a_reason_as_long_as_a_frame_reaches_nobody_whole(site: World, letter: str) -> None:
    """A stage that fails tells why; gateways and events get a line of it, whatever it holds."""
    before = site.epoch
    reason = letter * (60_000 // len(letter.encode("unicode_escape")) // 2)
    heartbeat = Heartbeat(before, "failed", reason, 0, 0, 0, 0.0, 0, 1, 0.0, None, None, 0, 0, None, "")
    site.stages["box2"].beats = False
    await site.stages["box2"].say(FrameType.HEARTBEAT, heartbeat)
    await site.serving(before + 1, {"box1", "box3"})
    assert not site.gateway.ended
    assert site.gateway.route.degraded.startswith("box2: its stage failed")
    for event in await site.events():
        assert len(event["text"]) <= 2000
        assert event["text"].isprintable()


async def _trouble_of(site: World, liar: str) -> None:
    """The liar says, of every neighbour that it ever has, that it can't be reached."""
    told: set[int] = set()

    def lies() -> list[LinkReport]:
        if (epoch := site.stages[liar].serving) in told or liar not in site.spans or not epoch:
            return []
        told.add(epoch)
        order = list(site.spans)
        neighbour = order[(order.index(liar) + 1) % len(order)]
        return [LinkReport(neighbour, epoch, "unreachable", "a lie", 0.0)]

    async def tell() -> bool:
        for report in lies():
            await site.stages[liar].say(FrameType.LINK_REPORT, report)
        return liar not in site.spans

    for _ in range(1500):
        if await tell():
            return
        await asyncio.sleep(0.01)
    raise AssertionError(f"{liar} is still in: {site.spans}, told {sorted(told)}")


@pytest.mark.parametrize("liar", ["box1", "box2", "box3"])
async def test_who_accuses_one_neighbour_after_the_other_is_left_out_itself(
    tmp_path: Path, ca: SiteCa, liar: str
) -> None:
    boxes = ("box1", "box2", "box3", "box4")
    async with world(tmp_path, ca, boxes=boxes, timing={"hold_down_seconds": 20.0}) as made:
        await made.connect()
        await made.serving(boxes=set(boxes))
        await _trouble_of(made, liar)
        await made.serving()
        assert len(made.spans) >= 2  # at most one that is innocent is out with it


async def test_who_accuses_all_is_left_out(site: World) -> None:
    before = site.epoch
    for box in ("box1", "box3", "box2", "box9"):
        await site.stages["box2"].report(box, "closed", before)
    await site.serving(before + 1, {"box1", "box3"})


async def test_who_gives_its_plan_up_again_and_again_is_left_out(tmp_path: Path, ca: SiteCa) -> None:
    async with world(tmp_path, ca, timing={"hold_down_seconds": 20.0}) as made:
        await made.connect()
        await made.serving(boxes=BOXES)
        stage, refused = made.stages["box2"], 0
        for _ in range(20):
            if "box2" not in made.spans:
                break
            epoch = made.epoch
            await stage.say(FrameType.VOTE, Vote(epoch, False, "no promise of mine", 0, 0.0))
            refused += 1
            await made.serving(epoch + 1)
        assert refused <= 3
        await made.serving(boxes={"box1", "box3"})


async def test_absurd_memory_costs_the_box_its_place_and_nothing_else(site: World) -> None:
    before, stage = site.epoch, site.stages["box2"]
    stage.memory_bytes = 1
    await stage.say(FrameType.REGISTER, stage.register())
    stage = site.stages["box3"]
    stage.memory_bytes = 2**60
    await stage.say(FrameType.REGISTER, stage.register())
    boxes = site.coordinator.context.boxes
    await until(lambda: (boxes["box2"].record.memory_bytes, boxes["box3"].record.memory_bytes) == (1, 2**60), "taken")
    await site.serving(before)


async def test_a_vote_that_lacks_all_memory_of_the_world_is_one_box_out(site: World) -> None:
    before = site.epoch
    site.stages["box3"].answer = lambda prepare: Vote(prepare.epoch, False, "none", 2**60, 1e300)
    await site.stages["box2"].kill()
    await site.stages["box1"].report("box2", "closed")
    await site.serving(before + 1, {"box1"})


async def test_a_stage_in_the_role_of_a_gateway_holds_nothing_up_for_long(site: World) -> None:
    """It never says DRAINED: the time of a drain is all that it costs."""
    mute = ScriptedGateway(site.ca, "box3")
    mute.drains = False
    await mute.connect(site.coordinator.port)
    before = site.epoch
    assert (await site.ask("POST", "/v1/boxes/box2/drain"))[0] == 202
    await site.serving(before + 1, {"box1", "box3"})
    await until(lambda: site.stages["box2"].retired >= before, "RETIRE when time is up")
    events = await site.events("plan-retired")
    assert "time is up" in events[-1]["text"]
    await mute.close()


async def test_a_role_that_is_none_is_refused(site: World) -> None:
    for role in ("coordinator", "operator", "", "x" * 1000):
        with pytest.raises(LinkError, match="no business"):
            await Dialler(site.ca, "box1", role).connect(site.coordinator.port)
