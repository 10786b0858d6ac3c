"""Orders that come at a bad time, or all at once."""

from __future__ import annotations

import asyncio

from stage_runtime.link.membership import Prepare, Route
from tests.coordinator.site import World, until


async def test_the_last_box_is_not_drained_and_the_answer_says_why(site: World) -> None:
    before = site.epoch
    assert (await site.ask("POST", "/v1/boxes/box1/drain"))[0] == 202
    await site.serving(before + 1, {"box2", "box3"})
    assert (await site.ask("POST", "/v1/boxes/box2/drain"))[0] == 202
    await site.serving(before + 2, {"box3"})
    status, body = await site.ask("POST", "/v1/boxes/box3/drain")
    assert status == 409
    assert body["reason"] == "pipeline main: no other box can take over: box1 is drained, box2 is drained"
    assert site.gateway.route.state == "serving"


async def test_of_drains_at_once_the_last_is_refused(site: World) -> None:
    answers = await asyncio.gather(*(site.ask("POST", f"/v1/boxes/{box}/drain") for box in site.stages))
    assert sorted(status for status, _ in answers) == [202, 202, 409]
    await site.serving()
    await until(lambda: len(site.spans) == 1, "one box serves")
    (left,) = site.spans
    await site.serving(boxes={left})
    assert not site.coordinator.context.boxes[left].record.drained


async def test_a_drain_in_the_middle_of_a_planned_switch(site: World) -> None:
    """Box3 is to take over from box2 and is drained before it has voted."""
    before, three = site.epoch, site.stages["box3"]
    usual, three.answer = three.answer, lambda _: None
    assert (await site.ask("POST", "/v1/boxes/box2/drain"))[0] == 202
    await until(lambda: three.last(Prepare).epoch > before, "PREPARE")
    assert (await site.ask("POST", "/v1/boxes/box3/drain"))[0] == 202
    three.answer = usual
    await site.serving(before + 1, {"box1"})
    routes = [each for each in site.gateway.inbox if isinstance(each, Route)]
    assert {each.state for each in routes[routes.index(site.gateway.route) - 3 :]} <= {"serving", "none"}
    aborted = await site.events("plan-aborted")
    assert "box3 to be taken out" in aborted[-1]["text"]


async def test_a_drain_in_the_middle_of_an_unplanned_switch_comes_after_it(site: World) -> None:
    before, three = site.epoch, site.stages["box3"]
    held: list[Prepare] = []
    usual = three.answer
    three.answer = held.append
    await site.stages["box2"].kill()
    await site.stages["box1"].report("box2", "closed")
    await until(lambda: held, "PREPARE")
    assert (await site.ask("POST", "/v1/boxes/box3/drain"))[0] == 202
    three.answer = usual
    await three.handle(held[0])
    await site.serving(before + 2, {"box1"})


async def test_a_drain_undone_in_the_middle_of_its_switch(site: World) -> None:
    before, three = site.epoch, site.stages["box3"]
    held: list[Prepare] = []
    usual = three.answer
    three.answer = held.append
    assert (await site.ask("POST", "/v1/boxes/box2/drain"))[0] == 202
    await until(lambda: held, "PREPARE")
    assert (await site.ask("POST", "/v1/boxes/box2/undrain"))[0] == 202
    three.answer = usual
    await three.handle(held[0])
    await site.serving(before, {"box1", "box2", "box3"})


async def test_why_a_gateway_was_lost_is_told(site: World) -> None:
    await site.gateway.close()
    await until(lambda: not site.coordinator.context.gateways, "lost")
    (lost,) = await site.events("gateway-lost")
    assert lost["text"].startswith("gateway on control: link with control: ")
    site.gateway = None
    await site.connect("box1")
    await site.gateway.drained(7, "nowhere")
    await until(lambda: site.gateway.ended, "refused")
    lost = (await site.events("gateway-lost"))[-1]
    assert "DRAINED for pipeline 'nowhere'" in lost["text"]
    await site.gateway.close()
    site.gateway = None
    await site.connect("box1")
    told = len(await site.events("gateway-lost"))
    await site.stop()
    await site.start()
    assert len(await site.events("gateway-lost")) == told  # that the coordinator stops is no loss
