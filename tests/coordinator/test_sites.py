"""More than one of something: pipelines at one site, gateways, switches without number; and a clock that jumps."""

from __future__ import annotations

import asyncio
import gc
import time
from pathlib import Path

import pytest

from fleet.coordinator import store as store_module
from stage_runtime.link.membership import Prepare, Route
from tests.coordinator.site import BOX_BYTES, ScriptedGateway, ScriptedStage, World, until, world
from tests.stage_runtime.pki import SiteCa

SWITCHES = 60


async def test_a_pipeline_heals_while_the_other_serves(tmp_path: Path, ca: SiteCa) -> None:
    names = ("box1", "box2", "box3", "other1", "other2")
    async with world(tmp_path, ca, boxes=names) as made:
        await made.stop()
        main = made.data["pipelines"]["main"]
        made.data["pipelines"]["other"] = {**main, "boxes": ["other1", "other2"]}
        main["boxes"] = ["box1", "box2", "box3"]
        await made.start()
        for name in ("other1", "other2"):
            made.stages[name] = ScriptedStage(ca, name)
            made.stages[name].pipeline = "other"
            made.stages[name].memory_bytes = BOX_BYTES
        await made.connect()
        await made.serving(boxes={"box1", "box2", "box3"})
        assert made.coordinator is not None and made.gateway is not None
        other = made.coordinator.pipelines["other"].switching
        await until(lambda: other.plan is not None and made.stages["other1"].serving == other.epoch, "other serves")
        before, theirs = made.epoch, other.epoch
        seen = len(made.gateway.inbox)
        asked = [made.stages[name].count(Prepare) for name in ("other1", "other2")]
        await made.stages["box2"].kill()
        await made.stages["box1"].report("box2", "closed")
        await made.stages["other1"].report("box3", "closed", before)  # not its business
        await made.serving(before + 1, {"box1", "box3"})
        told = [each for each in made.gateway.inbox[seen:] if isinstance(each, Route)]
        assert {each.pipeline for each in told} == {"main"}
        assert other.epoch == theirs
        assert [made.stages[name].count(Prepare) for name in ("other1", "other2")] == asked
        await made.stages["other2"].kill()
        await made.stages["other1"].report("other2", "closed")
        await until(lambda: other.epoch == theirs + 1, "and the other heals on its own")
        assert made.epoch == before + 1


async def test_of_two_gateways_both_have_to_be_drained(tmp_path: Path, ca: SiteCa) -> None:
    async with world(tmp_path, ca, timing={"switch_drain_seconds": 600.0}, gateways=["control", "second"]) as made:
        await made.connect()
        await made.serving()
        second = ScriptedGateway(ca, "second")
        second.drains = False
        assert made.coordinator is not None
        await second.connect(made.coordinator.port)
        before = made.epoch
        assert (await made.ask("POST", "/v1/boxes/box2/drain"))[0] == 202
        await made.serving(before + 1, {"box1", "box3"})
        await asyncio.sleep(0.5)
        assert made.pipeline.switching.draining is not None
        assert second.route.epoch == before + 1
        await second.close()  # it is killed: what it had open is nobody's any more
        await until(lambda: made.pipeline.switching.draining is None, "the other one's word is enough")
        assert "nothing is open" in (await made.events("plan-retired"))[-1]["text"]


@pytest.mark.parametrize("days", [-400, 400])
async def test_a_clock_that_jumps_changes_times_of_events_only(
    site: World, monkeypatch: pytest.MonkeyPatch, days: int
) -> None:
    before, states = site.epoch, (await site.ask("GET", "/v1/site"))[1]
    usual = time.time
    monkeypatch.setattr(store_module.time, "time", lambda: usual() + days * 86400.0)
    await asyncio.sleep(1.0)
    after = (await site.ask("GET", "/v1/site"))[1]
    assert site.epoch == before
    assert {name: box["state"] for name, box in after["boxes"].items()} == {
        name: box["state"] for name, box in states["boxes"].items()
    }
    await site.stages["box2"].kill()
    await site.stages["box1"].report("box2", "closed")
    await site.serving(before + 1, {"box1", "box3"})
    await site.connect("box2")
    await site.serving(before + 2, {"box1", "box2", "box3"})  # settle and hold-down pass as ever
    events = await site.events()
    assert [event["id"] for event in events] == sorted(event["id"] for event in events)
    assert abs(events[-1]["unix_seconds"] - events[0]["unix_seconds"]) > 300 * 86400
    assert all(0 <= phase < 60_000 for event in events for phase in event["milliseconds"].values())


async def test_switch_after_switch_leaves_nothing_behind(site: World) -> None:
    """`python -m tests.coordinator.test_sites` does 10 000 of them and tells the memory."""
    epochs = await switch_often(site, SWITCHES)
    assert epochs == sorted(set(epochs))
    pipeline = site.pipeline
    assert len(pipeline.planner._answers) < 20
    assert sum(map(len, pipeline.reports._about.values())) < 20
    assert site.coordinator is not None
    assert len(site.coordinator.context.store._epochs) <= 2
    assert len(site.coordinator.context.store._pending) < 20


async def switch_often(site: World, times: int) -> list[int]:
    """Planned switches, to and fro; the epochs that were committed."""
    epochs = []
    for number in range(times):
        before = site.epoch
        pipeline = site.pipeline
        box = site.coordinator.context.boxes["box2"] if site.coordinator else None
        assert box is not None
        await (pipeline.orders.undrain(box) if number % 2 else pipeline.orders.drain(box))
        while site.epoch == before or site.switching or pipeline.switching.draining:  # noqa: ASYNC110 - it has no event
            await asyncio.sleep(0.001)
        epochs.append(site.epoch)
        for each in (*site.stages.values(), site.gateway):
            if each is not None:
                del each.inbox[:-20]
    return epochs


async def _many(times: int) -> None:
    import tempfile

    import psutil

    with tempfile.TemporaryDirectory() as directory:
        ca = SiteCa(Path(directory) / "pki", "demo")
        timing = {"settle_seconds": 0.001, "hold_down_seconds": 0.001, "heartbeat_seconds": 0.01}
        async with world(Path(directory) / "state", ca, timing=timing) as made:
            await made.connect()
            await made.serving()
            done, began = 0, time.monotonic()
            while done < times:
                epochs = await switch_often(made, min(500, times - done))
                done += len(epochs)
                gc.collect()
                size = sum(path.stat().st_size for path in (Path(directory) / "state").iterdir())
                resident = psutil.Process().memory_info().rss
                print(
                    f"{done} switches, epoch {epochs[-1]}, {time.monotonic() - began:.0f} s, resident "
                    f"{resident / 2**20:.1f} MiB, database {size / 2**20:.2f} MiB",
                    flush=True,
                )


if __name__ == "__main__":
    import sys

    asyncio.run(_many(int(sys.argv[1]) if len(sys.argv) > 1 else 10_000))
