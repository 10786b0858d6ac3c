"""Routes over the real control channel, sequences over real links: a coordinator and first stages that are scripted."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fleet.gateway.channel import RouteChannel
from fleet.gateway.config import GatewayConfig, parse_config
from fleet.gateway.healing import HealingPipeline
from fleet.gateway.links import make_channel, make_pipelines
from fleet.gateway.metrics import GatewayMetrics
from fleet.gateway.routes import ROUTES_FILE, RouteStore, decode_route
from stage_runtime.link.connection import Link, LinkError, LinkTiming
from stage_runtime.link.control import (
    PROTOCOL,
    Cancel,
    FinishedMessage,
    TokenMessage,
    decode_control,
    encode_control,
)
from stage_runtime.link.endpoints import LinkServer, LinkSettings
from stage_runtime.link.frames import Frame, FrameError, FrameType
from stage_runtime.link.membership import Drained, Route
from stage_runtime.link.messages import (
    FinishedEvent,
    GenerateRequest,
    Hello,
    PipelineStatus,
    SamplingParameters,
    TokenEvent,
)
from stage_runtime.link.tls import TlsIdentity
from tests.gateway.site import BOX, SITE, Pki, config_data, make_pki, route

DIGEST = "ab" * 32
TIMING = {
    "ring_connect_seconds": 3.0,
    "ring_handshake_seconds": 5.0,
    "ring_reconnect_seconds": 0.01,
    "ring_reconnect_max_seconds": 0.05,
    "ring_ping_seconds": 0.5,
    "ring_silence_least_seconds": 5.0,
    "ring_silence_seconds": 10.0,
}


async def until(condition: Callable[[], object]) -> None:
    while not condition():  # noqa: ASYNC110 - what is waited for has no event
        await asyncio.sleep(0.001)


@dataclass
class Peer:
    """A listening box: keeps what comes, says what the test wants."""

    box: str
    hello: Hello
    settings: LinkSettings
    greeting: list[Frame] = field(default_factory=list)
    frames: list[Frame] = field(default_factory=list)
    links: list[Link] = field(default_factory=list)
    peers: list[Hello] = field(default_factory=list)
    server: LinkServer | None = None
    port: int = 0

    def listen(self) -> None:
        self.server = LinkServer(self.settings, lambda _: "", self._serve, lambda address, reason: None)
        self.server.start("127.0.0.1", self.port)
        self.port = self.server.port

    async def _serve(self, link: Link) -> None:
        self.links.append(link)
        self.peers.append(link.peer)
        try:
            for frame in self.greeting:
                await link.send(frame)
            while True:
                self.frames.append(await link.receive())
        except LinkError:
            self.links.remove(link)

    async def say(self, kind: FrameType, message: object) -> None:
        for link in list(self.links):
            await link.send(Frame(kind, encode_control(message)))

    def heard(self, kind: FrameType) -> list[bytes]:
        return [frame.body for frame in self.frames if frame.type is kind]

    def requests(self) -> list[GenerateRequest]:
        return [decode_control(GenerateRequest, body) for body in self.heard(FrameType.GENERATE)]

    def drained(self) -> list[Drained]:
        return [decode_control(Drained, body) for body in self.heard(FrameType.DRAINED)]

    async def close(self) -> None:
        if self.server is not None:
            await self.server.close()
            self.server = None


@dataclass
class Wire:
    """A gateway's links and whom they lead to."""

    config: GatewayConfig
    coordinator: Peer
    stages: dict[str, Peer]
    pipeline: HealingPipeline
    channel: RouteChannel

    def route(self, epoch: int, box: str, **changes: object) -> Route:
        return route(epoch, first_stage=box, port=self.stages[box].port, **changes)

    async def token(self, box: str, index: int) -> None:
        await self.stages[box].say(FrameType.TOKEN, TokenMessage(7, TokenEvent(index, 50 + index)))

    async def end(self, box: str, reason: str) -> None:
        event = FinishedEvent(reason)  # type: ignore[arg-type]
        await self.stages[box].say(FrameType.FINISHED, FinishedMessage(7, event))


def peer(pki: Pki, box: str, role: str, digest: str, policy: str) -> Peer:
    identity = pki if box == BOX else make_pki(pki.ca.parents[1], box=box)
    hello = Hello(PROTOCOL, role, box, SITE, digest, policy, 0, "test")
    tls = TlsIdentity(identity.ca, identity.certificate, identity.key)
    return Peer(box, hello, LinkSettings(hello, tls, LinkTiming.from_config(TIMING)))


@asynccontextmanager
async def wire(directory: Path, pki: Pki) -> AsyncIterator[Wire]:
    """All peers listen; the gateway's side runs until the block ends."""
    coordinator = peer(pki, "control", "coordinator", "", "")
    coordinator.listen()
    stages = {box: peer(pki, box, "stage", DIGEST, "exact") for box in ("box1", "box2")}
    for stage in stages.values():
        stage.greeting = [Frame(FrameType.STATUS, encode_control(PipelineStatus(ready=True, reason="")))]
        stage.listen()
    address = {"box": "control", "host": "127.0.0.1", "port": coordinator.port}
    config = parse_config(config_data(directory, pki, coordinator=address, timing=TIMING))
    pipelines = make_pipelines(config, GatewayMetrics(["main"]))
    channel = make_channel(config, pipelines)
    channel.recall()
    tasks = [asyncio.ensure_future(each) for each in (channel.run(), pipelines["main"].run())]
    try:
        yield Wire(config, coordinator, stages, pipelines["main"], channel)
    finally:
        for task in tasks:
            task.cancel()
        ends = await asyncio.gather(*tasks, return_exceptions=True)
        for each in (coordinator, *stages.values()):
            await each.close()
        assert all(isinstance(end, asyncio.CancelledError) for end in ends), ends


def generate(pipeline: HealingPipeline) -> asyncio.Task[list[TokenEvent | FinishedEvent]]:
    wanted = GenerateRequest(7, "r", (1, 2), 100, (0,), SamplingParameters(seed=3))

    async def collect() -> list[TokenEvent | FinishedEvent]:
        return [event async for event in pipeline.generate(wanted)]

    return asyncio.ensure_future(collect())


async def test_a_sequence_moves_from_a_first_stage_that_dies_to_the_next(directory: Path, pki: Pki) -> None:
    async with wire(directory, pki) as site:
        await until(lambda: site.coordinator.links)
        hello = site.coordinator.peers[0]
        assert (hello.role, hello.epoch, hello.model_digest, hello.policy) == ("gateway", 0, "", "")
        await site.coordinator.say(FrameType.ROUTE, site.route(3, "box1"))
        answer = generate(site.pipeline)
        await until(site.stages["box1"].requests)
        assert site.stages["box1"].peers[0].epoch == 3
        await site.token("box1", 0)
        await site.token("box1", 1)
        await site.stages["box1"].close()
        await site.coordinator.say(FrameType.ROUTE, site.route(3, "box1", state="replanning", reason="box1 is dead"))
        await until(lambda: "box1 is dead" in site.pipeline.status.reason)
        await site.coordinator.say(FrameType.ROUTE, site.route(4, "box2"))
        await until(site.stages["box2"].requests)
        [again] = site.stages["box2"].requests()
        assert (again.sequence_id, again.generated, again.sampling.seed) == (7, (50, 51), 3)
        await site.token("box2", 2)
        await site.end("box2", "stop")
        events = await answer
        assert [event.token_id for event in events if isinstance(event, TokenEvent)] == [50, 51, 52]
        assert events[-1] == FinishedEvent("stop", "", 0, 3)


async def test_drained_is_said_when_the_old_epoch_is_empty_and_on_every_new_link(directory: Path, pki: Pki) -> None:
    async with wire(directory, pki) as site:
        await until(lambda: site.coordinator.links)
        await site.coordinator.say(FrameType.ROUTE, site.route(3, "box1"))
        answer = generate(site.pipeline)
        await until(site.stages["box1"].requests)
        await site.coordinator.say(FrameType.ROUTE, site.route(5, "box2", planned=True))
        await until(lambda: site.pipeline.situation.epoch == 5)
        assert Drained("main", 4) not in site.coordinator.drained()
        await site.end("box1", "stop")
        await answer
        await until(lambda: Drained("main", 4) in site.coordinator.drained())
        await until(lambda: not site.stages["box1"].links)
        await site.coordinator.say(FrameType.ROUTE, site.route(6, "box1", planned=True))  # nothing is open: at once
        await until(lambda: Drained("main", 5) in site.coordinator.drained())
        site.coordinator.frames.clear()
        await site.coordinator.close()
        site.coordinator.greeting = [Frame(FrameType.ROUTE, encode_control(site.route(6, "box1", planned=True)))]
        site.coordinator.listen()
        await until(lambda: Drained("main", 5) in site.coordinator.drained())
        assert site.channel.connected


async def test_without_a_coordinator_the_last_route_stands_even_over_a_restart(directory: Path, pki: Pki) -> None:
    async with wire(directory, pki) as site:
        await until(lambda: site.coordinator.links)
        await site.coordinator.say(FrameType.ROUTE, site.route(3, "box1"))
        await until((directory / "journal" / ROUTES_FILE).exists)
        kept = site.route(3, "box1")
        await site.coordinator.close()
        await until(lambda: not site.channel.connected)
        answer = generate(site.pipeline)
        await until(site.stages["box1"].requests)
        await site.end("box1", "stop")
        assert (await answer)[-1] == FinishedEvent("stop", "", 0, 0)
    store = RouteStore(directory / "journal")
    assert store.load() == {"main": kept}
    async with wire(directory, pki) as site:  # its stages have other ports: only the old route can have said this one
        assert site.pipeline.situation.first_stage == "box1"
        assert site.pipeline.situation.epoch == 3


@pytest.mark.parametrize("damage", [b"", b"{", b'{"schema":1,"routes":[{}]}', b"[]", b"\xff", b'{"schema":7}'])
def test_routes_that_can_not_be_read_are_none(tmp_path: Path, damage: bytes) -> None:
    (tmp_path / ROUTES_FILE).write_bytes(damage)
    store = RouteStore(tmp_path)
    assert store.load() == {}
    store.save(route(5))
    assert RouteStore(tmp_path).load() == {"main": route(5)}


NOWHERE: list[dict[str, Any]] = [
    {"port": 0},
    {"port": 65_536},
    {"port": 2**63},
    {"host": ""},
    {"first_stage": ""},
]


@pytest.mark.parametrize("changes", NOWHERE)
def test_a_route_to_nowhere_is_none(tmp_path: Path, changes: dict[str, Any]) -> None:
    """Followed, it would end the process; kept, every start of it."""
    RouteStore(tmp_path).save(route(5, **changes))
    assert RouteStore(tmp_path).load() == {}
    with pytest.raises(FrameError, match="serves under no address"):
        decode_route(encode_control(route(5, **changes)))
    assert decode_route(encode_control(route(5, state="refused", **changes))).state == "refused"


@pytest.mark.parametrize("host", ["a\0b", "x" * 300, "\udcff", "..", "300.1.1.1"])
async def test_a_host_that_is_none_is_a_link_that_is_not_there(directory: Path, pki: Pki, host: str) -> None:
    async with wire(directory, pki) as site:
        await until(lambda: site.coordinator.links)
        await site.coordinator.say(FrameType.ROUTE, replace(site.route(3, "box1"), host=host))
        await until(lambda: site.pipeline.status.reason not in ("not connected", "no route from the coordinator yet"))
        await site.coordinator.say(FrameType.ROUTE, site.route(4, "box1"))
        await until(lambda: site.pipeline.status.ready)


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 10_000), st.binary(max_size=4)), min_size=1, max_size=4))
def test_whatever_bytes_change_in_the_routes_they_are_read_or_not_used(changes: list[tuple[int, bytes]]) -> None:
    with tempfile.TemporaryDirectory() as name:
        RouteStore(Path(name)).save(route(5, missing_mebibytes={"box1": "12"}))
        file = Path(name) / ROUTES_FILE
        data = bytearray(file.read_bytes())
        for place, content in changes:
            at = place % len(data)
            data[at : at + len(content) or at + 1] = content
        file.write_bytes(data)
        for found in RouteStore(Path(name)).load().values():
            assert found.state != "serving" or 0 < found.port < 2**16


def test_a_disk_that_takes_no_route_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    RouteStore(tmp_path / "file").save(route(5))
    assert "is not kept" in caplog.text


async def test_frames_that_are_no_routes_end_the_link_and_it_is_dialled_again(directory: Path, pki: Pki) -> None:
    async with wire(directory, pki) as site:
        await until(lambda: site.coordinator.links)
        await site.coordinator.say(FrameType.DRAINED, Drained("main", 1))
        await until(lambda: len(site.coordinator.peers) == 2 and site.coordinator.links)
        await site.coordinator.say(FrameType.ROUTE, Cancel(1))
        await until(lambda: len(site.coordinator.peers) == 3 and site.coordinator.links)
        await site.coordinator.say(FrameType.ROUTE, replace(site.route(3, "box1"), pipeline="other"))
        await site.coordinator.say(FrameType.ROUTE, site.route(3, "box1"))
        await until(lambda: site.pipeline.status.ready)
        assert len(site.coordinator.peers) == 3


async def test_sessions_that_fail_at_once_are_fewer_and_fewer(directory: Path, pki: Pki) -> None:
    """A coordinator of another release, whose routes mean nothing here: each session is two events of its history."""
    coordinator = peer(pki, "control", "coordinator", "", "")
    coordinator.greeting = [Frame(FrameType.ROUTE, b"{}")]
    coordinator.listen()
    address = {"box": "control", "host": "127.0.0.1", "port": coordinator.port}
    timing = TIMING | {"ring_reconnect_max_seconds": 10.0}
    config = parse_config(config_data(directory, pki, coordinator=address, timing=timing))
    channel = make_channel(config, make_pipelines(config, GatewayMetrics(["main"])))
    task = asyncio.ensure_future(channel.run())
    await asyncio.sleep(3.0)
    assert 1 <= len(coordinator.peers) <= 12
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await coordinator.close()
