"""Peers with certificates of the site that say, or dial, without end; strangers who dial and say nothing."""

from __future__ import annotations

import asyncio
import socket
import ssl

import pytest

from stage_runtime.link.connection import LinkError
from stage_runtime.link.control import encode_control
from stage_runtime.link.frames import Frame, FrameType, encode_frame
from stage_runtime.link.membership import Committed, Drained, LinkReport, Retire, Vote
from stage_runtime.link.tls import server_name
from tests.coordinator.site import ScriptedGateway, ScriptedStage, World, until

FLOOD = 20_000


def _flood(kind: FrameType, site: World) -> bytes:
    epoch = site.epoch
    message = {
        FrameType.REGISTER: site.stages["box2"].register(),
        FrameType.LINK_REPORT: LinkReport("box1", epoch, "silent", "text", 1.0),
        FrameType.VOTE: Vote(epoch + 5, True, "", 0, 0.1),
        FrameType.COMMITTED: Committed(epoch),
        FrameType.DRAINED: Drained("main", epoch),
    }[kind]
    return encode_frame(Frame(kind, encode_control(message)))


@pytest.mark.parametrize(
    "kind", [FrameType.REGISTER, FrameType.LINK_REPORT, FrameType.VOTE, FrameType.COMMITTED, FrameType.DRAINED]
)
async def test_a_flood_of_messages_ends_its_link(site: World, kind: FrameType) -> None:
    gateway = kind is FrameType.DRAINED
    peer = ScriptedGateway(site.ca, "control") if gateway else site.stages["box2"]
    if gateway:
        await peer.connect(site.coordinator.port)
    assert peer.link is not None
    frame, handled = _flood(kind, site), site.coordinator.context.metrics.refused_links
    for _ in range(FLOOD // 100):
        peer.link._writer.write(frame * 100)
        if peer.ended:
            break
        await asyncio.sleep(0)
    await until(lambda: peer.ended, "the link is ended")
    assert handled._value.get() >= 1
    assert "without end" in peer.ended or "again and again" in peer.ended or "Connection" in peer.ended
    await peer.close()
    others = [site.stages[box] for box in ("box1", "box3")]
    assert not any(stage.ended for stage in others)


async def test_a_box_that_dials_without_end_is_slowed_down(site: World) -> None:
    """Each time another process: none of it may push the rest of the history out, or cost a plan each time."""
    refused = 0
    for _ in range(150):
        stage = ScriptedStage(site.ca, "box2")
        stage.beats = False
        try:
            await stage.connect(site.coordinator.port)
        except LinkError:
            refused += 1
        await asyncio.sleep(0.005)
        refused += "short time" in stage.ended
        await stage.close()
    joined = await site.events("box-joined")
    assert len([event for event in joined if event["box"] == "box2"]) <= 70
    assert len(await site.events("plan-committed")) <= 3


async def test_links_that_never_register_make_room_for_one_that_does(site: World) -> None:
    class Mute(ScriptedStage):
        async def introduce(self) -> None:
            pass

    mutes = [Mute(site.ca, "box2") for _ in range(20)]
    for mute in mutes:
        await mute.connect(site.coordinator.port)
    await until(lambda: sum(bool(mute.ended) for mute in mutes) >= len(mutes) - 4, "the oldest are closed")
    await site.stages["box2"].close()
    site.stages["box2"].restart()
    await site.connect("box2")
    await until(lambda: site.coordinator and site.coordinator.context.boxes["box2"].peer, "box2 is back")
    for mute in mutes:
        await mute.close()


async def test_no_kind_of_event_pushes_the_others_out(site: World) -> None:
    context = site.coordinator.context
    for number in range(3000):
        context.event("box-slow", f"number {number}", pipeline="main", box="box2")
    await site.events()
    _, document = await site.ask("GET", "/v1/events?limit=1000")
    kinds = [event["kind"] for event in document["events"]]
    assert "coordinator-started" in kinds
    assert "plan-committed" in kinds
    slow = [event["text"] for event in document["events"] if event["kind"] == "box-slow"]
    assert len(slow) == 500
    assert slow[-1] == "number 2999"


async def test_connections_that_ask_nothing_shut_nobody_out(site: World) -> None:
    """They have finished TLS, without a certificate, as anyone may for /livez."""
    assert site.coordinator is not None
    context = ssl.create_default_context(cafile=str(site.ca.path))
    name, port = server_name("control", "demo"), site.coordinator.http_port
    opened: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []

    def ended() -> int:
        return sum(reader.at_eof() or reader.exception() is not None for reader, _ in opened)

    for most in (100, 300):
        while len(opened) < most:
            opened.append(await asyncio.open_connection("127.0.0.1", port, ssl=context, server_hostname=name))
        assert (await site.ask("GET", "/v1/site"))[0] == 200
        await until(lambda most=most: ended() >= most - 128, "the oldest are ended")
        assert ended() <= max(0, most - 128 + 1)  # one made room for the question
    for _, writer in opened:
        writer.transport.abort()


@pytest.mark.parametrize("port", ["port", "http_port"])
async def test_half_open_and_silent_connections_shut_nobody_out(site: World, port: str) -> None:
    """More of them than a process has descriptors by default; each sends half a TLS hello, or nothing."""
    assert site.coordinator is not None
    address = ("127.0.0.1", getattr(site.coordinator, port))
    silent: list[socket.socket] = []
    try:
        for number in range(1500):
            connection = socket.socket()
            connection.setblocking(False)
            silent.append(connection)
            await asyncio.get_running_loop().sock_connect(connection, address)
            if number % 2:
                await asyncio.get_running_loop().sock_sendall(connection, b"\x16\x03\x01\x02\x00\x01")
        status, _ = await site.ask("GET", "/v1/site")
        assert status == 200
        await site.stages["box2"].kill()
        await site.connect("box2")
        await until(lambda: site.coordinator and site.coordinator.context.boxes["box2"].peer, "box2 is back")
        ended = 0
        for connection in silent:
            try:
                ended += connection.recv(10) == b""
            except BlockingIOError:
                pass
            except OSError:
                ended += 1
        assert ended >= 1000
    finally:
        for connection in silent:
            connection.close()


async def test_a_stage_that_never_reads_is_given_up(site: World) -> None:
    """Its heartbeats come on time; what it is told waits, up to a bound, and then it is as good as gone."""
    before, stage = site.epoch, site.stages["box2"]
    assert stage.link is not None and stage._task is not None and site.coordinator is not None
    stage._task.cancel()
    box = site.coordinator.context.boxes["box2"]
    peer, posted = box.peer, 0
    assert peer is not None
    order = Retire(0, "x" * 10_000)
    while not peer.link.closed_reason and posted < 20_000:
        for _ in range(100):
            peer.post(FrameType.RETIRE, order)
            posted += 1
        await asyncio.sleep(0)
    assert "does not read" in peer.link.closed_reason
    assert posted < 3000  # some ten kibibytes each: the buffers of both sides, and 512 that wait
    await site.stages["box1"].report("box2", "silent")
    await site.serving(before + 1, {"box1", "box3"})


async def test_a_gateway_that_never_reads_holds_up_nobody(site: World) -> None:
    mute = ScriptedGateway(site.ca, "control")
    await site.gateway.close()
    await mute.connect(site.coordinator.port)
    assert mute._task is not None
    mute._task.cancel()
    before = site.epoch
    await site.stages["box2"].kill()
    await site.stages["box1"].report("box2", "closed")
    await until(lambda: site.epoch == before + 1, "healed")
    await site.ask("POST", "/v1/boxes/box1/drain")
    await until(
        lambda: site.epoch == before + 2 and site.pipeline.switching.draining is None, "drained when time is up"
    )
    await mute.close()
    site.gateway = None
