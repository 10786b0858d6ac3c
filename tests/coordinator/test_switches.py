"""The real coordinator with scripted stages: first plan, deaths, votes, returns, planned switches."""

from __future__ import annotations

import asyncio
from pathlib import Path

from stage_runtime.link.frames import FrameType
from stage_runtime.link.membership import Abort, Commit, Prepare, Retire, Standby, Vote
from tests.coordinator.site import MIB, World, until, world
from tests.stage_runtime.pki import SiteCa


async def test_the_first_plan_is_made_when_all_boxes_are_there(site: World) -> None:
    assert set(site.spans) == {"box1", "box2", "box3"}
    assert {stage.committed for stage in site.stages.values()} == {site.epoch}
    route = site.gateway.route
    assert (route.first_stage, route.host, route.port, route.epoch) == ("box1", "127.0.0.1", 7401, site.epoch)
    await until(lambda: all(stage.last(Standby) for stage in site.stages.values()), "standby")
    kinds = [event["kind"] for event in await site.events()]
    assert kinds.count("box-joined") == 3
    assert kinds.index("plan-preparing") < kinds.index("plan-committed")


async def test_the_first_plan_waits_so_long_and_no_longer(tmp_path: Path, ca: SiteCa) -> None:
    async with world(tmp_path, ca) as made:
        await made.connect("box1", "box3")
        await made.serving(boxes={"box1", "box3"})


async def test_a_killed_box_is_merged_away_as_soon_as_a_neighbour_says_so(site: World) -> None:
    before = site.epoch
    await site.stages["box2"].kill()
    await site.stages["box1"].report("box2", "closed")
    await site.serving(before + 1, {"box1", "box3"})
    prepare = site.stages["box1"].last(Prepare)
    assert not prepare.planned
    assert set(prepare.addresses) == {"box1", "box3"}
    await until(lambda: site.pipeline.switching.serving.phases is None, "the ring is ready")
    (serving,) = [event for event in await site.events("plan-serving") if "box2" in event["text"]]
    assert {"detect", "plan", "prepare", "commit", "ring"} == set(serving["milliseconds"])
    states = [route.state for route in site.gateway.inbox]
    assert "replanning" in states[states.index("serving") :]


async def test_a_silent_box_is_dead_when_its_neighbours_hear_nothing_either(site: World) -> None:
    before = site.epoch
    await site.stages["box1"].freeze()
    await site.stages["box2"].report("box1", "silent")
    await site.serving(before + 1, {"box2", "box3"})
    assert site.gateway.route.first_stage == "box2"


async def test_since_when_a_box_is_out_does_not_wait_for_somebody_to_ask(site: World) -> None:
    before, clock = site.epoch, site.coordinator.context.clock
    _, shown = await site.ask("GET", "/v1/site")
    assert shown["boxes"]["box2"]["state"] == "serving"
    killed_at = clock.now()
    await site.stages["box2"].kill()
    await site.stages["box1"].report("box2", "closed")
    await site.serving(before + 1, {"box1", "box3"})
    await until(lambda: site.coordinator.context.boxes["box2"].shown == "dead", "noted")
    known_at = clock.now()
    await asyncio.sleep(0.3)
    now = clock.now()
    _, shown = await site.ask("GET", "/v1/site")
    assert shown["boxes"]["box2"]["state"] == "dead"
    assert now - known_at <= shown["boxes"]["box2"]["since_seconds"] <= clock.now() - killed_at


async def test_a_lost_channel_alone_changes_nothing(site: World) -> None:
    before = site.epoch
    await site.stages["box1"].report("box2", "connected")
    await site.stages["box2"].close()
    await until(lambda: site.coordinator.context.boxes["box2"].channel == "lost", "lost")
    await asyncio.sleep(2.5)  # longer than an unaccused box has to dial again
    assert site.epoch == before
    assert site.gateway.route.state == "serving"
    await site.connect("box2")
    await until(lambda: site.coordinator.context.boxes["box2"].verdict.kind == "alive", "alive")
    assert (site.epoch, set(site.spans)) == (before, {"box1", "box2", "box3"})


async def test_a_box_that_nobody_hears_is_given_up_after_a_fair_time(site: World) -> None:
    before = site.epoch
    await site.stages["box3"].close()
    await site.serving(before + 1, {"box1", "box2"})


async def test_work_without_progress_is_hung_and_the_box_is_told_to_stop(site: World) -> None:
    before = site.epoch
    site.stages["box2"].working_seconds = 60.0
    await site.serving(before + 1, {"box1", "box3"})
    await until(lambda: site.stages["box2"].retired >= before, "retired")
    assert (await site.events("box-hung"))[0]["box"] == "box2"


async def test_a_slow_box_is_reported_and_stays(site: World) -> None:
    before = site.epoch
    site.stages["box2"].step_seconds = 1.0
    await until(lambda: site.coordinator.context.boxes["box2"].verdict.slow, "slow")
    assert len(await site.events("box-slow")) == 1
    assert site.epoch == before


async def test_of_two_that_cannot_reach_each_other_one_is_left_out(site: World) -> None:
    before = site.epoch
    await site.stages["box2"].report("box3", "unreachable")
    await site.stages["box1"].report("box2", "connected")
    await site.serving(before + 1, {"box1", "box2"})


async def test_a_restarted_process_has_lost_its_layers(site: World) -> None:
    before = site.epoch
    await site.stages["box2"].kill()
    await site.connect("box2")
    await site.serving(before + 1, {"box1", "box3"})
    await site.serving(before + 2, {"box1", "box2", "box3"})  # settled, hold-down over
    assert site.stages["box2"].last(Prepare).planned
    kinds = [event["kind"] for event in await site.events()]
    assert kinds.count("plan-committed") == 3
    assert "box-held-down" in kinds and "box-returned" in kinds


async def test_a_second_death_during_prepare_supersedes(site: World) -> None:
    before = site.epoch
    site.stages["box3"].answer = lambda _: None
    await site.stages["box2"].kill()
    await site.stages["box1"].report("box2", "closed")
    await until(lambda: site.switching, "a switch")
    await site.stages["box3"].kill()
    await site.stages["box1"].report("box3", "closed", site.stages["box1"].last(Prepare).epoch)
    await site.serving(before + 2, {"box1"})
    assert site.stages["box1"].last(Abort).epoch == before + 1
    assert site.spans == {"box1": (0, 6)}


async def test_whoever_does_not_vote_in_time_is_left_out(site: World) -> None:
    before = site.epoch
    site.stages["box3"].answer = lambda _: None
    await site.stages["box2"].kill()
    await site.stages["box1"].report("box2", "closed")
    await site.serving(before + 2, {"box1"})
    assert "no vote from box3" in (await site.events("plan-aborted"))[0]["text"]


async def test_missing_memory_is_learnt_from_a_no(site: World) -> None:
    before = site.epoch

    def refuse_more_than_two(prepare: Prepare) -> Vote:
        stage = prepare.plan.stage_of("box3")
        short = stage is not None and stage.end - stage.start > 2
        return Vote(prepare.epoch, not short, "no memory" if short else "", 80 * MIB if short else 0, 0.0)

    site.stages["box3"].answer = refuse_more_than_two
    await site.stages["box2"].kill()
    await site.stages["box1"].report("box2", "closed")
    await site.serving(before + 1, {"box1", "box3"})
    assert site.spans == {"box1": (0, 4), "box3": (4, 6)}
    assert site.epoch > before + 1


async def test_a_merge_that_does_not_fit_is_refused_with_mebibytes_and_heals(tmp_path: Path, ca: SiteCa) -> None:
    memory = {box: 750 * MIB for box in ("box1", "box2", "box3")}
    async with world(tmp_path, ca, memory=memory) as made:
        await made.connect()
        await made.serving()
        assert made.spans == {"box1": (0, 2), "box2": (2, 4), "box3": (4, 6)}
        await until(lambda: made.pipeline.planner.outlook.unsurvivable == ("box1", "box2", "box3"), "the outlook")
        await made.stages["box2"].kill()
        await made.stages["box1"].report("box2", "closed")
        await until(lambda: made.gateway.route.state == "refused", "refused")
        assert made.gateway.route.missing_mebibytes
        assert made.gateway.route.retry_after_seconds > 0
        status, health = await made.ask("GET", "/health")
        assert (status, "refused" in health["reason"]) == (503, True)
        _, document = await made.ask("GET", "/v1/site")
        assert document["pipelines"]["main"]["state"] == "refused"
        assert all(amount > 0 for amount in document["pipelines"]["main"]["missing_mebibytes"].values())
        await made.connect("box2")
        await made.serving(2, {"box1", "box2", "box3"})
        assert (await made.ask("GET", "/health"))[0] == 200


async def test_leaving_is_a_planned_switch_and_no_death(site: World) -> None:
    before = site.epoch
    stage = site.stages["box2"]
    await stage.leave()
    await site.serving(before + 1, {"box1", "box3"})
    assert site.stages["box1"].last(Prepare).planned
    await until(lambda: stage.retired >= before, "let go")
    await stage.kill()
    await site.connect("box2")
    await site.serving(before + 2, {"box1", "box2", "box3"})
    assert await site.events("box-dead", "box-held-down") == []


async def test_when_all_leave_all_are_let_go(site: World) -> None:
    for stage in site.stages.values():
        await stage.leave()
    await until(lambda: all(stage.retired for stage in site.stages.values()), "let go")


async def test_a_planned_switch_waits_for_the_gateway(site: World) -> None:
    site.gateway.drains = False
    before = site.epoch
    status, box = await site.ask("POST", "/v1/boxes/box2/drain")
    assert (status, box["state"]) == (202, "draining")
    await site.serving(before + 1, {"box1", "box3"})
    assert site.gateway.route.planned
    assert site.pipeline.switching.draining.record.epoch == before
    assert site.stages["box2"].serving == before
    await site.gateway.drained(before)
    await until(lambda: site.stages["box2"].retired == before, "retired")
    assert site.stages["box1"].last(Retire).epoch == before
    assert site.stages["box1"].serving == before + 1
    _, document = await site.ask("GET", "/v1/site")
    assert document["boxes"]["box2"]["state"] == "drained"


async def test_the_cap_ends_a_drain(site: World) -> None:
    site.gateway.drains = False
    before = site.epoch
    await site.ask("POST", "/v1/boxes/box2/drain")
    await until(lambda: site.stages["box2"].retired == before, "retired")
    assert "time is up" in (await site.events("plan-retired"))[-1]["text"]


async def test_a_death_of_the_serving_plan_beats_a_planned_switch(site: World) -> None:
    before = site.epoch
    site.stages["box1"].answer = lambda _: None
    await site.ask("POST", "/v1/boxes/box2/drain")
    await until(lambda: site.switching, "a planned switch")
    site.stages["box1"].answer = lambda prepare: Vote(prepare.epoch, True, "", 0, 0.0)
    await site.stages["box3"].kill()
    await site.stages["box1"].report("box3", "closed")
    await site.serving(before + 2, {"box1"})
    assert not site.stages["box1"].last(Prepare).planned


async def test_what_was_said_of_a_ring_that_was_given_up_is_no_evidence_later(site: World) -> None:
    before, reports = site.epoch, site.pipeline.reports
    site.stages["box1"].answer = lambda _: None
    await site.ask("POST", "/v1/boxes/box2/drain")
    await until(lambda: site.switching, "a planned switch")
    await site.stages["box3"].report("box1", "closed", before + 1)
    await until(lambda: reports.about("box1", before, {"box3"}, 0.0), "the report")
    await site.stages["box1"].say(FrameType.VOTE, Vote(before + 1, False, "its probe failed", 0, 0.0))
    await until(lambda: not site.switching, "given up")
    assert reports.about("box1", before, {"box3"}, 0.0) == ()
    assert site.epoch == before


async def test_nothing_changes_while_nothing_happens(site: World) -> None:
    before = site.epoch
    await asyncio.sleep(1.0)
    assert site.epoch == before
    assert {stage.count(Prepare) for stage in site.stages.values()} == {1}
    assert {stage.count(Commit) for stage in site.stages.values()} == {1}


async def test_boxes_that_boot_later_than_the_coordinator_are_all_in_the_first_plan(tmp_path: Path, ca: SiteCa) -> None:
    async with world(tmp_path, ca) as made:
        await asyncio.sleep(0.6)  # longer than settle_seconds: that counts from the first box on
        await made.connect("box2")
        await made.connect("box1", "box3")
        await made.serving(boxes={"box1", "box2", "box3"})
        assert made.stages["box2"].count(Prepare) == 1


async def test_after_a_power_cut_of_the_whole_site_the_first_box_waits_for_the_others(site: World) -> None:
    before = len(await site.events("plan-committed"))
    for stage in site.stages.values():
        await stage.kill()
    boxes = site.coordinator.context.boxes
    await until(lambda: all(boxes[name].peer is None for name in site.stages), "all are lost")
    await asyncio.sleep(site.config.timing.redial_seconds)  # so long that each counts as dead by itself
    for name in site.stages:
        await site.connect(name)
    await site.serving(boxes={"box1", "box2", "box3"})
    assert len(await site.events("plan-committed")) == before + 1
