"""Links over real TLS: who is let in, what is refused, what a broken peer causes."""

from __future__ import annotations

import asyncio
import random
import ssl
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path

import pytest

from stage_runtime.link.connection import MOST_PINGS, Link, LinkError, LinkTiming
from stage_runtime.link.control import Cancel, encode_control
from stage_runtime.link.endpoints import BoxAddress, LinkServer, LinkSettings, dial
from stage_runtime.link.frames import Frame, FrameType, encode_frame
from stage_runtime.link.messages import Hello
from stage_runtime.link.tls import TlsIdentity, server_name
from tests.stage_runtime.pki import SiteCa

TIMING = LinkTiming(reconnect_seconds=0.05, ping_seconds=0.1, silence_least_seconds=1.0, silence_seconds=1.0)
# both ends share one event loop with hundreds of spoilers: on a busy machine it may be late, which is no silence
PATIENT = replace(TIMING, silence_least_seconds=5.0, silence_seconds=5.0)
SERVER_HELLO = Hello(1, "stage", "box1", "lab", "d" * 64, "exact", 4, "0.1.0")
CLIENT_HELLO = Hello(1, "stage", "box2", "lab", "d" * 64, "exact", 4, "0.1.0")


class Listener:
    """A live listener that echoes frames and notes why connections ended."""

    def __init__(self, tls: TlsIdentity, hello: Hello = SERVER_HELLO, timing: LinkTiming = TIMING) -> None:
        self.reasons: list[str] = []
        self.links: list[Link] = []
        self._server = LinkServer(
            LinkSettings(hello, tls, timing), lambda _: "", self._echo, lambda _, reason: self.reasons.append(reason)
        )

    async def start(self) -> BoxAddress:
        self._server.start("127.0.0.1", 0)
        return BoxAddress("box1", "127.0.0.1", self._server.port)

    async def close(self) -> None:
        await self._server.close()

    async def _echo(self, link: Link) -> None:
        self.links.append(link)
        try:
            while True:
                await link.send(await link.receive())
        except LinkError as error:
            self.reasons.append(str(error))

    async def reason(self, count: int = 1) -> str:
        """The latest reason, once there are `count` of them."""
        for _ in range(3000):
            if len(self.reasons) >= count:
                return self.reasons[-1]
            await asyncio.sleep(0.01)
        raise AssertionError(f"{len(self.reasons)} of {count} reasons, the last: {self.reasons[-3:]}")


@pytest.fixture(scope="module")
def ca(tmp_path_factory: pytest.TempPathFactory) -> SiteCa:
    return SiteCa(tmp_path_factory.mktemp("pki"), "lab")


@pytest.fixture
async def listener(ca: SiteCa) -> AsyncIterator[tuple[Listener, BoxAddress]]:
    server = Listener(ca.issue("box1"))
    yield server, await server.start()
    await server.close()


@pytest.fixture
async def patient_listener(ca: SiteCa) -> AsyncIterator[tuple[Listener, BoxAddress]]:
    server = Listener(ca.issue("box1"), timing=PATIENT)
    yield server, await server.start()
    await server.close()


async def test_frames_travel_both_ways(ca: SiteCa, listener: tuple[Listener, BoxAddress]) -> None:
    link = await dial(LinkSettings(CLIENT_HELLO, ca.issue("box2"), TIMING), listener[1])
    assert link.peer == SERVER_HELLO  # its epoch is the dialler's: a link belongs to the epoch that it was made for
    frame = Frame(FrameType.CANCEL, encode_control(Cancel(3)), 4, 9)
    await link.send(frame)
    assert await link.receive() == frame
    link.close("done")
    assert await listener[0].reason()


async def test_an_idle_link_lives_by_pings(ca: SiteCa, listener: tuple[Listener, BoxAddress]) -> None:
    link = await dial(LinkSettings(CLIENT_HELLO, ca.issue("box2"), TIMING), listener[1])
    reading = asyncio.ensure_future(link.receive())
    await asyncio.wait([reading], timeout=TIMING.silence_seconds * 1.5)
    assert not reading.done()
    await link.send(Frame(FrameType.CANCEL, encode_control(Cancel(1))))
    assert (await reading).type is FrameType.CANCEL
    link.close("done")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"protocol": 2}, "protocol differs: box1 has 1, box2 has 2"),
        ({"model_digest": "e" * 64}, f"model digest differs: box1 has '{'d' * 64}', box2 has '{'e' * 64}'"),
        ({"policy": "int8"}, "policy differs: box1 has 'exact', box2 has 'int8'"),
        ({"box": "box3"}, "hello says 'box3', the certificate's CN is 'box2'"),
        ({"site": "else"}, "hello says 'else', the certificate's O is 'lab'"),
    ],
)
async def test_hello_is_refused_with_both_values(
    ca: SiteCa, listener: tuple[Listener, BoxAddress], change: dict[str, object], reason: str
) -> None:
    raw_settings = LinkSettings(replace(CLIENT_HELLO, **change), ca.issue("box2"), TIMING)  # type: ignore[arg-type]
    settings = LinkSettings(replace(raw_settings.own, site="lab"), raw_settings.tls, TIMING)
    if "site" in change:
        _, writer = await open_tls(ca, listener[1])
        writer.write(encode_frame(Frame(FrameType.HELLO, encode_control(raw_settings.own))))
        assert reason in await listener[0].reason()
        writer.close()
        return
    with pytest.raises(LinkError, match="refused by the peer") as error:
        await dial(settings, listener[1])
    assert reason in str(error.value)
    assert reason in await listener[0].reason()


async def open_tls(ca: SiteCa, address: BoxAddress) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A TLS connection that has not said hello yet."""
    return await asyncio.open_connection(
        address.host,
        address.port,
        ssl=ca.issue("box2").client_context(),
        server_hostname=server_name("box1", "lab"),
    )


async def test_certificates_of_another_ca_are_refused(
    ca: SiteCa, tmp_path: Path, listener: tuple[Listener, BoxAddress]
) -> None:
    other = SiteCa(tmp_path, "lab").issue("box2")
    with pytest.raises(LinkError, match="certificate refused"):
        await dial(LinkSettings(CLIENT_HELLO, other, TIMING), listener[1])
    stranger = TlsIdentity(ca.path, other.certificate, other.key)
    with pytest.raises(LinkError):
        await dial(LinkSettings(CLIENT_HELLO, stranger, TIMING), listener[1])
    assert listener[0].links == []


async def test_no_certificate_is_refused(ca: SiteCa, listener: tuple[Listener, BoxAddress]) -> None:
    context = ssl.create_default_context(cafile=str(ca.path))
    reader, writer = await asyncio.open_connection(
        listener[1].host, listener[1].port, ssl=context, server_hostname=server_name("box1", "lab")
    )
    writer.write(encode_frame(Frame(FrameType.HELLO, encode_control(CLIENT_HELLO))))
    assert "peer did not return a certificate" in await listener[0].reason()
    assert listener[0].links == []
    assert await reader.read() == b""


async def test_bytes_that_are_no_tls_are_refused_and_noted(listener: tuple[Listener, BoxAddress]) -> None:
    _, writer = await asyncio.open_connection(listener[1].host, listener[1].port)
    writer.write(b"GET / HTTP/1.1\r\n\r\n")
    assert "TLS" in await listener[0].reason()
    writer.close()
    assert listener[0].links == []


async def test_a_listener_with_the_wrong_name_is_not_trusted(ca: SiteCa) -> None:
    server = Listener(ca.issue("box3"), replace(SERVER_HELLO, box="box3"))
    address = await server.start()
    with pytest.raises(LinkError, match="certificate refused: Hostname mismatch"):
        await dial(LinkSettings(CLIENT_HELLO, ca.issue("box2"), TIMING), address)
    await server.close()


@pytest.mark.parametrize("synchronised", [False, True])
async def test_dates_count_once_the_clock_is_synchronised(ca: SiteCa, tmp_path: Path, synchronised: bool) -> None:
    server = Listener(ca.issue("box1", expired=True))
    address = await server.start()
    clock_file = tmp_path / "synchronised"
    tls = ca.issue("box2", clock_file=clock_file)
    if synchronised:
        clock_file.touch()
        with pytest.raises(LinkError, match="certificate has expired"):
            await dial(LinkSettings(CLIENT_HELLO, tls, TIMING), address)
    else:
        link = await dial(LinkSettings(CLIENT_HELLO, tls, TIMING), address)
        link.close("done")
    await server.close()


async def test_a_listener_judges_dates_from_the_moment_its_clock_is_right(ca: SiteCa, tmp_path: Path) -> None:
    clock_file = tmp_path / "synchronised"
    identity = ca.issue("box1", clock_file=clock_file)
    server = Listener(identity)
    address = await server.start()
    settings = LinkSettings(CLIENT_HELLO, ca.issue("box2", expired=True), TIMING)
    link = await dial(settings, address)
    link.close("done")
    clock_file.touch()
    assert identity.clock_synchronised
    with pytest.raises(LinkError):
        await dial(settings, address)
    await server.close()


async def test_a_flood_of_pings_ends_a_link(ca: SiteCa, listener: tuple[Listener, BoxAddress]) -> None:
    live, box = listener
    link = await dial(LinkSettings(CLIENT_HELLO, ca.issue("box2"), TIMING), box)
    for _ in range(MOST_PINGS * 10):
        await link.send(Frame(FrameType.PING, epoch=4))
    await link.send(Frame(FrameType.CANCEL, encode_control(Cancel(7)), epoch=4))
    assert (await link.receive()).type is FrameType.CANCEL  # so many are none
    for _ in range(MOST_PINGS * 10):
        await link.send(Frame(FrameType.PING, epoch=4))
    assert "floods with pings" in await live.reason()


async def test_silence_ends_a_link(ca: SiteCa, listener: tuple[Listener, BoxAddress]) -> None:
    reader, writer = await open_tls(ca, listener[1])
    writer.write(encode_frame(Frame(FrameType.HELLO, encode_control(CLIENT_HELLO))))
    assert (await listener[0].reason()).startswith("box2 was silent for 1.")
    writer.close()
    assert await reader.read(1) != b""  # its hello had come


def mutations(seed: int) -> list[Callable[[bytearray], bytes]]:
    """Ways to spoil a frame."""
    draw = random.Random(seed)  # noqa: S311 - spoils frames, keeps no secret

    def flip(raw: bytearray) -> bytes:
        raw[draw.randrange(len(raw))] ^= 1 << draw.randrange(8)
        return bytes(raw)

    def huge(raw: bytearray) -> bytes:
        raw[20:24] = draw.randrange(2**28, 2**32).to_bytes(4, "little")
        return bytes(raw)

    return [
        flip,
        huge,
        lambda raw: draw.randbytes(draw.randrange(1, 200)).replace(b"FLRG", b"FLR_"),
        lambda raw: b"POST" + bytes(raw[4:]),
        lambda raw: bytes(raw[: draw.randrange(1, len(raw))]),
    ]


async def spoil_frames(ca: SiteCa, server: Listener, address: BoxAddress, count: int, seed: int) -> None:
    """Send `count` spoiled frames, each on a connection of its own; a link of a good peer must not notice."""
    tls = ca.issue("box2")
    context = tls.client_context()
    hello = encode_frame(Frame(FrameType.HELLO, encode_control(CLIENT_HELLO), 4))
    step = encode_frame(Frame(FrameType.STEP, bytes(300), 4, 7))
    spoilers = mutations(seed)
    bystander = await dial(LinkSettings(CLIENT_HELLO, tls, PATIENT), address)

    async def spoil(number: int) -> None:
        _, writer = await asyncio.open_connection(
            address.host, address.port, ssl=context, server_hostname=server_name("box1", "lab")
        )
        spoiled = spoilers[number % len(spoilers)](bytearray(step if number % 2 else hello))
        writer.write(spoiled if number % 2 == 0 else hello + spoiled)
        await writer.drain()
        if number % len(spoilers) == 4:  # half a frame: the peer vanishes inside it
            writer.close()

    for start in range(0, count, 25):
        await asyncio.gather(*(spoil(number) for number in range(start, start + 25)))
    await server.reason(count)
    assert len(server.reasons) == count
    assert all(server.reasons), "every end has a reason"
    await bystander.send(Frame(FrameType.CANCEL, encode_control(Cancel(1))))
    assert (await bystander.receive()).type is FrameType.CANCEL
    bystander.close("done")


async def test_500_spoiled_frames_end_their_connections_and_nothing_else(
    ca: SiteCa, patient_listener: tuple[Listener, BoxAddress]
) -> None:
    await spoil_frames(ca, *patient_listener, count=500, seed=20)


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(100, 110))
async def test_10000_more_spoiled_frames(ca: SiteCa, patient_listener: tuple[Listener, BoxAddress], seed: int) -> None:
    await spoil_frames(ca, *patient_listener, count=1000, seed=seed)


def test_the_link_room_does_not_import_torch() -> None:
    code = "import sys, stage_runtime.link.client, stage_runtime.link.tls; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"
