"""coordinator.json differs after a restart: boxes that came, went or changed sides, another model, another load."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.coordinator.site import DIGEST, LAYERS, MIB, World, until, world
from tests.stage_runtime.pki import SiteCa

BOXES = {"box1", "box2", "box3"}


async def _restart(site: World) -> None:
    """The coordinator starts anew with what `site.data` holds now; everybody dials again."""
    await site.stop()
    await site.start()
    if site.gateway is not None:
        await site.gateway.close()
        site.gateway = None
    for stage in site.stages.values():
        await stage.close()


def _without(data: dict[str, Any], box: str) -> None:
    data["pipelines"]["main"]["boxes"].remove(box)


async def test_a_box_that_serves_and_is_no_longer_in_the_file(site: World) -> None:
    before = site.epoch
    _without(site.data, "box2")
    del site.data["boxes"]["box2"]
    await _restart(site)
    await site.connect("box1", "box3")
    await site.serving(before + 1, {"box1", "box3"})
    retired = await site.events("plan-retired")
    assert "box2" in retired[0]["text"]
    status, _ = await site.ask("GET", "/v1/site")
    assert status == 200


async def test_a_box_that_changes_sides_serves_there(tmp_path: Path, ca: SiteCa) -> None:
    async with world(tmp_path, ca) as made:
        await made.connect()
        await made.serving(boxes=BOXES)
        before = made.epoch
        other = {**made.data["pipelines"]["main"], "boxes": ["box3"]}
        _without(made.data, "box3")
        made.data["pipelines"]["other"] = other
        await _restart(made)
        made.stages["box3"].pipeline = "other"
        made.stages["box3"].restart()
        await made.connect()
        await made.serving(before + 1, {"box1", "box2"})
        assert made.coordinator is not None
        theirs = made.coordinator.pipelines["other"].switching
        await until(lambda: theirs.plan is not None, "the other pipeline has a plan")
        assert theirs.epoch > before  # that box knows epochs of its old pipeline


async def test_a_drain_under_way_of_a_box_that_is_gone(tmp_path: Path, ca: SiteCa) -> None:
    async with world(tmp_path, ca, timing={"switch_drain_seconds": 600.0}) as made:
        await made.connect()
        assert made.gateway is not None
        made.gateway.drains = False
        await made.serving(boxes=BOXES)
        before = made.epoch
        await made.ask("POST", "/v1/boxes/box2/drain")
        await made.serving(before + 1, {"box1", "box3"})
        assert made.pipeline.switching.draining is not None
        _without(made.data, "box2")
        del made.data["boxes"]["box2"]
        await _restart(made)
        await made.connect("box1", "box3")
        await made.serving(before + 1, {"box1", "box3"})
        assert made.epoch == before + 1  # what serves is left alone
        assert made.pipeline.switching.draining is None


async def test_a_box_that_is_added_gets_layers(tmp_path: Path, ca: SiteCa) -> None:
    async with world(tmp_path, ca) as made:
        await made.stop()
        made.data["pipelines"]["main"]["cost"]["layers"] *= 2
        await made.start()
        await made.connect()
        await until(lambda: set(made.spans) == BOXES, "served by three")
        before = made.epoch
        made.data["boxes"]["box4"] = made.data["boxes"]["box3"]
        made.data["pipelines"]["main"]["boxes"].append("box4")
        await _restart(made)
        await made.connect()
        await until(lambda: set(made.spans) == BOXES | {"box4"}, "served by four")
        assert made.epoch > before
        assert [event["text"] for event in await made.events("plan-aborted")] == []


@pytest.mark.parametrize("what", ["model", "load", "layers", "pipeline gone", "memory"])
async def test_other_orders_make_another_plan(tmp_path: Path, ca: SiteCa, what: str) -> None:
    async with world(tmp_path, ca) as made:
        await made.connect()
        await made.serving(boxes=BOXES)
        before, spec = made.epoch, made.data["pipelines"]["main"]
        if what == "model":
            spec["model_digest"] = "e" * 64
        elif what == "load":
            spec["max_sequences"] = 2
        elif what == "layers":
            spec["cost"]["layers"] = spec["cost"]["layers"][: LAYERS - 2]
        elif what == "pipeline gone":
            made.data["pipelines"]["main2"] = made.data["pipelines"].pop("main")
        elif what == "memory":
            for box in BOXES:
                made.data["boxes"][box]["memory_bytes"] = 64 * MIB
        await _restart(made)
        if what == "pipeline gone":
            for stage in made.stages.values():
                stage.pipeline = "main2"
        await made.connect()
        if what == "pipeline gone":
            assert made.coordinator is not None
            await until(lambda: made.coordinator.pipelines["main2"].switching.epoch > before, "serves under its name")
        elif what == "memory":  # the boxes have measured more than the file says
            await made.serving(before)
            assert made.epoch == before
        else:
            await until(lambda: made.epoch > before, "another plan")
            plan = made.pipeline.switching.plan
            assert (plan.model_digest == DIGEST) == (what != "model")
            assert plan.max_sequences == spec["max_sequences"]
            assert plan.layers == len(spec["cost"]["layers"])
