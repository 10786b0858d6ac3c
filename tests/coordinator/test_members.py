"""Identity, returns, orders over HTTPS, and peers that break the rules."""

from __future__ import annotations

import asyncio
import random
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from stage_runtime.link.connection import LinkError
from stage_runtime.link.control import encode_control
from stage_runtime.link.frames import Frame, FrameType, encode_frame
from stage_runtime.link.membership import Challenge, Committed, Drained, Heartbeat, LinkReport, Prepare, Vote
from tests.coordinator.site import MIB, TIMING, ScriptedGateway, ScriptedStage, World, until, world
from tests.stage_runtime.pki import SiteCa

MUTATED = 5000


async def test_a_clone_that_answers_is_refused_and_both_are_named(site: World) -> None:
    before = site.epoch
    clone = ScriptedStage(site.ca, "box2")
    await clone.connect(site.coordinator.port)
    await until(lambda: clone.ended, "the clone is refused")
    assert "two live processes: at 127.0.0.1 and at 127.0.0.1" in clone.ended
    (event,) = await site.events("box-clone-refused")
    assert event["box"] == "box2"
    assert site.stages["box2"].count(Challenge) == 1
    assert not site.stages["box2"].ended
    assert site.epoch == before
    await clone.close()


async def test_an_old_connection_that_does_not_answer_is_replaced(site: World) -> None:
    before = site.epoch
    old = site.stages.pop("box2")
    await old.freeze()
    new = ScriptedStage(site.ca, "box2")
    site.stages["box2"] = new
    await new.connect(site.coordinator.port)
    await site.serving(before + 2, {"box1", "box2", "box3"})
    assert await site.events("box-clone-refused") == []
    await old.close()


async def test_the_same_process_dials_again_without_ado(site: World) -> None:
    before = site.epoch
    first = site.stages["box2"]
    second = ScriptedStage(site.ca, "box2")
    second.process_id, second.committed, second.prepared, second.serving = first.process_id, before, before, before
    await second.connect(site.coordinator.port)
    await until(lambda: first.ended, "the old connection ends")
    assert first.count(Challenge) == 0
    await asyncio.sleep(1.0)
    assert site.epoch == before
    await first.close()
    site.stages["box2"] = second


async def test_a_new_address_is_told_and_used(site: World) -> None:
    box = site.coordinator.context.boxes["box2"]
    box.record = replace(box.record, address="192.0.2.7")  # where it was seen last
    assert box.address == "192.0.2.7:7401"
    before = site.epoch
    await site.stages["box2"].kill()
    await site.connect("box2")
    await site.serving(before + 1, {"box1", "box3"})
    (event,) = await site.events("box-moved")
    assert "was at 192.0.2.7, is at 127.0.0.1" in event["text"]


async def test_strangers_and_wrong_pipelines_are_refused(site: World) -> None:
    stranger = ScriptedStage(site.ca, "box9")
    with pytest.raises(LinkError, match="no stage box of this site"):
        await stranger.connect(site.coordinator.port)
    with pytest.raises(LinkError, match="no gateway of this site"):
        await ScriptedGateway(site.ca, "operator").connect(site.coordinator.port)


async def test_a_flapping_box_costs_two_plans_and_no_more(tmp_path: Path, ca: SiteCa) -> None:
    async with world(tmp_path, ca, timing={"hold_down_seconds": 2.0}) as made:
        await made.connect()
        await made.serving()
        before, box = made.epoch, made.stages["box2"]
        for _ in range(20):
            await box.kill()
            await asyncio.sleep(0.05)
            await made.connect("box2")
            await asyncio.sleep(0.05)
        await made.serving(boxes={"box1", "box3"})
        assert len(await made.events("plan-committed")) == 2  # the first plan, and one without it
        assert made.epoch == before + 1
        assert made.coordinator.context.boxes["box2"].hold_down.deaths >= 15
        _, document = await made.ask("GET", "/v1/site")
        assert document["boxes"]["box2"]["state"] == "held-down"
        assert document["boxes"]["box2"]["hold_down_seconds_left"] > 20
        assert "box2" in document["pipelines"]["main"]["degraded"]


async def test_orders_over_https(site: World) -> None:
    assert (await site.ask("POST", "/v1/boxes/box2/drain", "box1"))[0] == 403
    assert (await site.ask("POST", "/v1/boxes/box9/drain"))[0] == 404
    assert (await site.ask("GET", "/v1/events?after=x"))[0] == 400
    assert (await site.ask("GET", "/nowhere"))[0] == 404
    before = site.epoch
    assert (await site.ask("POST", "/v1/boxes/box2/drain"))[0] == 202
    assert (await site.ask("POST", "/v1/boxes/box2/drain"))[0] == 202  # asking twice is asking once
    await site.serving(before + 1, {"box1", "box3"})
    status, box = await site.ask("POST", "/v1/boxes/box2/undrain")
    assert (status, box["state"] in ("standby", "returning")) == (202, True)
    await site.serving(before + 2, {"box1", "box2", "box3"})
    assert len(await site.events("drain-requested")) == len(await site.events("undrain-requested")) == 1


async def test_a_drain_that_does_not_fit_is_refused_with_mebibytes(tmp_path: Path, ca: SiteCa) -> None:
    async with world(tmp_path, ca, memory={box: 750 * MIB for box in ("box1", "box2", "box3")}) as made:
        await made.connect()
        await made.serving()
        status, body = await made.ask("POST", "/v1/boxes/box2/drain")
        assert status == 409
        assert body["reason"] and body["missing_mebibytes"]
        _, document = await made.ask("GET", "/v1/site")
        assert document["boxes"]["box2"]["state"] == "serving"


async def test_a_drained_box_stays_so_over_a_restart(site: World) -> None:
    before = site.epoch
    await site.ask("POST", "/v1/boxes/box2/drain")
    await site.serving(before + 1, {"box1", "box3"})
    for stage in site.stages.values():
        await stage.close()
    await site.gateway.close()
    site.gateway = None
    await site.stop()
    await site.start()
    await site.connect()
    await asyncio.sleep(1.0)
    assert set(site.spans) == {"box1", "box3"}
    _, document = await site.ask("GET", "/v1/site")
    assert document["boxes"]["box2"]["state"] == "drained"
    assert document["gateways"] == ["control"]


async def test_metrics_have_all_their_series_from_the_start(tmp_path: Path, ca: SiteCa) -> None:
    import aiohttp

    from stage_runtime.link.tls import server_name

    async with world(tmp_path, ca) as made, aiohttp.ClientSession() as session:
        url = f"https://127.0.0.1:{made.coordinator.http_port}/metrics"
        context = ca.issue("operator").client_context()
        name = server_name("control", "demo")
        async with session.get(url, ssl=context, server_hostname=name) as response:
            text = await response.text()
        for series in (
            'fleet_coordinator_box_alive{box="box1"} 0.0',
            'fleet_coordinator_plan_epoch{pipeline="main"} 0.0',
            'fleet_coordinator_plan_refused{pipeline="main"} 0.0',
            'fleet_coordinator_switches_total{kind="planned",pipeline="main"} 0.0',
            'fleet_coordinator_events_total{kind="box-dead"} 0.0',
            'fleet_coordinator_verdicts_total{box="box3",verdict="hung"} 0.0',
            'fleet_coordinator_switch_phase_seconds_count{phase="ring"} 0.0',
        ):
            assert series in text
        no_certificate = ca.issue("operator").client_context()
        no_certificate = type(no_certificate)(no_certificate.protocol)
        no_certificate.load_verify_locations(ca.path)
        async with session.get(url, ssl=no_certificate, server_hostname=name) as response:
            assert response.status == 403
        live = url.replace("/metrics", "/livez")
        async with session.get(live, ssl=no_certificate, server_hostname=name) as response:
            assert (response.status, await response.text()) == (200, "ok\n")


def _messages(stage: ScriptedStage) -> list[tuple[FrameType, Any]]:
    return [
        (FrameType.REGISTER, stage.register()),
        (FrameType.HEARTBEAT, Heartbeat(1, "ready", "", 0, 2, 2, 0.5, 1, 7, 0.0, 0.1, 0.1, 2**30, 2**28, 40.0, "")),
        (FrameType.LINK_REPORT, LinkReport("box1", 1, "closed", "text", 0.0)),
        (FrameType.VOTE, Vote(1, True, "", 0, 0.1)),
        (FrameType.COMMITTED, Committed(1)),
        (FrameType.ANSWER, Challenge("nonce")),
        (FrameType.DRAINED, Drained("main", 1)),
        (FrameType.PREPARE, Committed(1)),
    ]


def _mutate(rng: random.Random, frame: bytes, kind: FrameType, body: bytes) -> bytes:
    """Bits flipped on the wire, or a frame that is one, with a body that is none."""
    if rng.random() < 0.3:
        spoilt = bytearray(frame)
        for _ in range(rng.randint(1, 4)):
            spoilt[rng.randrange(len(spoilt))] ^= 1 << rng.randrange(8)
        return bytes(spoilt)
    text = bytearray(body)
    for _ in range(rng.randint(1, 3)):
        at = rng.randrange(len(text) + 1)
        choice = rng.random()
        if choice < 0.4 and at < len(text):
            text[at] = rng.randrange(256)
        elif choice < 0.7:
            text[at:at] = rng.choice([b"[", b"{}", b"1e999", b"-1", b'"', b"null", b"\xff", b"9" * 400])
        else:
            del text[at : at + rng.randint(1, 8)]
    return encode_frame(Frame(kind, bytes(text), rng.randrange(4)))


async def test_thousands_of_mutated_messages_end_connections_and_nothing_else(tmp_path: Path, ca: SiteCa) -> None:
    """Each hostile link gets mutated messages until it is closed; then the next one dials."""
    rng = random.Random(3)  # noqa: S311 - the same mutations in every run
    async with world(tmp_path, ca, boxes=("box1", "box2", "box3", "evil")) as made:
        await made.connect("box1", "box2", "box3")
        await made.serving(boxes={"box1", "box2", "box3"})
        sent = links = 0
        evil = ScriptedStage(ca, "evil")
        frames = _messages(evil)
        while sent < MUTATED:
            evil.beats = False
            await evil.connect(made.coordinator.port)
            links += 1
            link = evil.link
            assert link is not None
            for _ in range(200):  # nobody waits for what they answer: much of it arrives before the link is closed
                kind, message = rng.choice(frames)
                body = encode_control(message)
                link._writer.write(_mutate(rng, encode_frame(Frame(kind, body, 1)), kind, body))
                sent += 1
            await until(lambda: evil.ended, "the link is closed")
            await evil.close()
        assert links >= MUTATED / 200
        assert made.gateway.route.state == "serving"
        assert {"box1", "box2", "box3"} <= set(made.spans)
        assert all(not made.stages[box].ended for box in ("box1", "box2", "box3"))


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        (FrameType.HEARTBEAT, b"{}"),
        (FrameType.STEP, b"x" * 100_000),
        (FrameType.PREPARE, b"{}"),
        (FrameType.DRAINED, b'{"pipeline":"main","epoch":1}'),
    ],
)
async def test_what_does_not_belong_here_ends_the_link_with_a_reason(site: World, kind: FrameType, body: bytes) -> None:
    stage = site.stages["box3"]
    assert stage.link is not None
    await stage.link.send(Frame(kind, body))
    await until(lambda: stage.ended, "closed")
    assert kind.name in stage.ended.upper() or "Heartbeat body" in stage.ended


async def test_epochs_beyond_all_reason_are_refused(site: World) -> None:
    stage = site.stages["box3"]
    await stage.kill()
    stage.committed = 2**63
    await site.connect("box3")
    await until(lambda: stage.ended, "refused")
    assert "beyond all reason" in stage.ended


async def test_who_sends_half_a_header_and_stays_is_cut_off(site: World) -> None:
    """Silence is counted in whole pings, so a link that dribbles bytes lives, and one that stops does not."""
    stage = site.stages["box3"]
    assert stage.link is not None
    stage.link._writer.write(struct.pack("<4sB", b"FLRG", 1))
    await stage.freeze()
    await until(lambda: site.coordinator.context.boxes["box3"].channel == "lost", "cut off")
    assert stage.count(Prepare) == 1
    assert TIMING["ring_silence_seconds"] < 2
