"""Neighbours that break the rules: silent strangers, refused peers that stay, a last stage that lies."""

from __future__ import annotations

import asyncio
import gc
import math
import socket
import ssl
from collections.abc import Callable, Iterator
from dataclasses import replace

import psutil
import pytest

from stage_runtime.link.acceptor import HANDSHAKES_AT_ONCE
from stage_runtime.link.connection import Link, LinkError, LinkTiming
from stage_runtime.link.control import PROTOCOL, encode_control
from stage_runtime.link.endpoints import BoxAddress, LinkServer, LinkSettings, dial
from stage_runtime.link.frames import Frame, FrameError, FrameType, encode_frame
from stage_runtime.link.messages import GenerateRequest, Hello, SamplingParameters, TokenLogprob
from stage_runtime.link.steps import (
    PROBE_STEPS_ID,
    Output,
    Step,
    StepEntry,
    TokenKind,
    TokenResult,
    Tokens,
    decode_step,
    decode_tokens,
    encode_step,
    encode_tokens,
)
from stage_runtime.link.tls import TlsIdentity, server_name
from tests.stage_runtime.conftest import Served
from tests.stage_runtime.pki import SiteCa
from tests.stage_runtime.site import StageSite, answer, connected, eventually, request
from tests.stage_runtime.test_link import CLIENT_HELLO, SERVER_HELLO, TIMING, Listener, listener  # noqa: F401 - a fixture
from tests.stage_runtime.tiny import TinyModel


@pytest.fixture(scope="module")
def ca(tmp_path_factory: pytest.TempPathFactory) -> SiteCa:
    return SiteCa(tmp_path_factory.mktemp("pki"), "lab")


def refused_and_stays(tls: TlsIdentity, address: BoxAddress) -> ssl.SSLSocket:
    """A peer with a certificate whose hello is refused; it neither reads nor closes."""
    raw = socket.create_connection((address.host, address.port))
    secured = tls.client_context().wrap_socket(raw, server_hostname=server_name("box1", "lab"))
    hello = replace(CLIENT_HELLO, protocol=CLIENT_HELLO.protocol + 1)
    secured.sendall(encode_frame(Frame(FrameType.HELLO, encode_control(hello))))
    return secured


async def test_refused_peers_that_stay_take_nothing_from_others(ca: SiteCa) -> None:
    tls = ca.issue("box2")
    refused: list[str] = []
    impatient = LinkSettings(SERVER_HELLO, ca.issue("box1"), replace(TIMING, handshake_seconds=0.3))
    server = LinkServer(impatient, lambda _: "", Link.wait_closed, lambda _, reason: refused.append(reason))
    server.start("127.0.0.1", 0)
    address = BoxAddress("box1", "127.0.0.1", server.port)
    try:
        before = psutil.Process().num_fds()
        peers = [await asyncio.to_thread(refused_and_stays, tls, address) for _ in range(4)]
        await eventually(lambda: len(refused) == len(peers), lambda: refused)
        assert all("protocol differs" in reason for reason in refused)
        links = [await dial(LinkSettings(CLIENT_HELLO, tls, TIMING), address) for _ in range(8)]
        assert [link.closed_reason for link in links] == [""] * 8
        for end in (*links, *peers):
            end.close("done") if isinstance(end, Link) else end.close()
        await eventually(lambda: psutil.Process().num_fds() <= before, lambda: psutil.Process().num_fds())
    finally:
        await server.close()


async def test_strangers_that_say_nothing_do_not_keep_neighbours_out(
    ca: SiteCa,
    listener: tuple[Listener, BoxAddress],  # noqa: F811 - the fixture
) -> None:
    server, address = listener
    where = (address.host, address.port)
    strangers = [await asyncio.to_thread(socket.create_connection, where) for _ in range(HANDSHAKES_AT_ONCE + 20)]
    assert "newer connections say nothing" in await server.reason(20)
    link = await dial(LinkSettings(CLIENT_HELLO, ca.issue("box2"), TIMING), address)
    assert not link.closed_reason
    link.close("done")
    for stranger in strangers:
        stranger.close()


async def test_a_reason_is_short_however_much_the_peer_said(
    ca: SiteCa,
    listener: tuple[Listener, BoxAddress],  # noqa: F811 - the fixture
) -> None:
    hello = replace(CLIENT_HELLO, model_digest="é" * 5000)
    with pytest.raises(LinkError, match="refused by the peer: model digest differs"):
        await dial(LinkSettings(hello, ca.issue("box2"), TIMING), listener[1])


async def test_dialling_for_years_keeps_no_contexts(ca: SiteCa) -> None:
    def contexts() -> int:
        gc.collect()
        return sum(type(thing) is ssl.SSLContext for thing in gc.get_objects())

    settings = LinkSettings(CLIENT_HELLO, ca.issue("box2"), TIMING)
    nobody = BoxAddress("box1", "127.0.0.1", 1)
    before = contexts()
    for _ in range(20):
        with pytest.raises(LinkError, match="can't reach"):
            await dial(settings, nobody)
    assert contexts() <= before + 1


@pytest.mark.parametrize("greeting", [b"SSH-2.0-x\r\n", b"HTTP/1.1 400 Bad Request\r\n\r\n", b""])
async def test_a_port_held_by_another_program_is_a_reason(ca: SiteCa, greeting: bytes) -> None:
    async def greet(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(greeting)
        writer.close()

    server = await asyncio.start_server(greet, "127.0.0.1", 0)
    address = BoxAddress("box1", "127.0.0.1", server.sockets[0].getsockname()[1])
    with pytest.raises(LinkError, match=r"can't reach box1 \(127\.0\.0\.1:"):
        await dial(LinkSettings(CLIENT_HELLO, ca.issue("box2"), TIMING), address)
    server.close()


async def test_a_host_that_is_no_name_is_a_reason(ca: SiteCa) -> None:
    with pytest.raises(LinkError, match="can't reach"):
        await dial(LinkSettings(CLIENT_HELLO, ca.issue("box2"), TIMING), BoxAddress("box1", "no..name", 7401))


def test_a_sequence_occurs_once_in_a_micro_batch() -> None:
    entry = StepEntry(5, 0, 1, Output.LAST)
    with pytest.raises(FrameError, match="twice"):
        decode_step(encode_step(Step((entry, entry), bytes(16), 2, 1)), 2)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_values_that_json_cannot_carry_are_refused(value: float) -> None:
    for result in (
        TokenResult(1, 0, TokenKind.TOKEN_WITH_LOGPROB, value=value),
        TokenResult(1, 0, TokenKind.TOKEN_WITH_LOGPROB, alternatives=(TokenLogprob(3, value),)),
    ):
        with pytest.raises(FrameError, match="not finite"):
            decode_tokens(encode_tokens(Tokens((result,), 1)))


Lie = Callable[[Step], list[TokenResult]]


class LyingLastStage:
    """box2 of a ring of two, with a valid certificate; it passes the probe without computing, then lies."""

    def __init__(self, site: StageSite, lie: Lie) -> None:
        hello = Hello(PROTOCOL, "stage", "box2", "lab", site.model_digest, "exact", 1, "test")
        timing = LinkTiming()
        self._settings = LinkSettings(hello, site.ca.issue("box2"), timing)
        self._first = BoxAddress("box1", "127.0.0.1", site.ring_ports["box1"])
        self._lie = lie
        self._server = LinkServer(self._settings, lambda _: "", self._serve, lambda *_: None)
        self._server.start("127.0.0.1", site.ring_ports["box2"])

    async def close(self) -> None:
        await self._server.close()

    async def _serve(self, link: Link) -> None:
        try:
            hello = replace(self._settings.own, epoch=1, extra=link.peer.extra)
            first = await dial(self._settings, self._first, hello)
            while True:
                frame = await link.receive()
                if frame.type is FrameType.SURVEY:
                    await first.send(frame)
                if frame.type is FrameType.STEP:
                    step = decode_step(frame.body, 64)
                    body = encode_tokens(Tokens(tuple(self._results(step)), 8))
                    await first.send(Frame(FrameType.TOKENS, body, 1, frame.micro_batch))
        except LinkError:
            return

    def _results(self, step: Step) -> list[TokenResult]:
        if step.entries[0].sequence_id >= PROBE_STEPS_ID:
            return [TokenResult(entry.sequence_id, entry.position, TokenKind.PROBE) for entry in step.entries]
        return self._lie(step)


def tokens_of(step: Step, **changes: int) -> list[TokenResult]:
    """A plain answer to every entry, changed."""
    return [
        replace(TokenResult(entry.sequence_id, entry.position, TokenKind.TOKEN), **changes)  # type: ignore[arg-type]
        for entry in step.entries
    ]


@pytest.fixture(scope="module")
def lied_to(tmp_path_factory: pytest.TempPathFactory, untied_model: TinyModel) -> Iterator[Served]:
    """The first of two stages; the other one is the test's."""
    directory = tmp_path_factory.mktemp("lied_to")
    site = StageSite(
        directory, untied_model.directory, untied_model.digest, layers=6, tied=False, stages=2, gives_plan=False
    )
    site.start("box1")
    site.giver.wait_registered("box1")
    addresses = {box: f"127.0.0.1:{port}" for box, port in site.ring_ports.items()}
    site.giver.prepare(1, site.plan.pipelines["main"], addresses=addresses)
    assert site.giver.votes(1)["box1"].yes
    site.giver.commit(1)
    yield Served(site, untied_model)
    site.stop()


@pytest.mark.parametrize(
    ("lie", "reason"),
    [
        (lambda step: tokens_of(step, token_id=1_000_000), "outside the vocabulary"),
        (lambda step: tokens_of(step, sequence_id=3), "other entries"),
        (lambda step: tokens_of(step, position=9), "other entries"),
        (lambda step: [], "other entries"),
        (lambda step: tokens_of(step, value=math.nan), "not finite"),
    ],
)
async def test_a_last_stage_that_lies_breaks_the_ring_and_nothing_else(lied_to: Served, lie: Lie, reason: str) -> None:
    box2 = LyingLastStage(lied_to.site, lie)
    try:
        async with connected(lied_to.site.client()) as client:
            tokens, end = await answer(client, request([5, 6], 4, logprobs=2))
            assert (tokens, end.reason) == ([], "unavailable")
            assert reason in end.message
            await eventually(lambda: client.status.ready, lambda: client.status)  # it forms anew
        assert lied_to.site.processes["box1"].poll() is None
    finally:
        await box2.close()


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"request_id": "r" * 70_000}, "request id"),
        ({"stop_token_ids": tuple(range(300))}, "300 stop tokens"),
        ({"sampling": SamplingParameters(temperature=1.0, frequency_penalty=1e308)}, "frequency_penalty"),
    ],
)
async def test_a_gateway_cannot_break_the_ring_by_what_it_asks(
    untied: Served, changes: dict[str, object], reason: str
) -> None:
    async with connected(untied.site.client()) as client:
        wanted: GenerateRequest = replace(request([5, 6], 4), **changes)  # type: ignore[arg-type]
        bystander = asyncio.ensure_future(answer(client, request([7], 30)))
        _, end = await answer(client, wanted)
        assert end.reason == "invalid"
        assert reason in end.message
        assert (await bystander)[0] == untied.model.greedy([7], 30)
