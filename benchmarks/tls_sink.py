"""A peer of the coordinator's control channel: what asyncio and TLS alone take for the same frames.

A process that accepts TLS connections, drops what comes in, and sends every connection a ping each ping period, all at
once. It parses, judges and plans nothing, so a coordinator on asyncio hardly takes less for these frames.
"""

from __future__ import annotations

import asyncio
import multiprocessing
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

from fleet.inventory.model import Timing
from stage_runtime.link.control import encode_control
from stage_runtime.link.frames import Frame, FrameType, encode_frame
from stage_runtime.link.membership import Heartbeat
from stage_runtime.link.tls import TlsIdentity, server_name
from tests.coordinator.site import SITE
from tests.stage_runtime.pki import SiteCa

BUFFER_BYTES = 64 * 1024
DIAL_SECONDS = 0.05
START_SECONDS = 60.0
HEARTBEAT = Heartbeat(1, "ready", "", 0, 0, 0, 0.0, 0, 1, 0.0, None, 0.01, 0, 0, None, "")


class _Drop(asyncio.BufferedProtocol):
    """Reads into one buffer, and looks at nothing."""

    def __init__(self, transports: list[asyncio.Transport]) -> None:
        self._transports = transports
        self._buffer = bytearray(BUFFER_BYTES)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transports.append(transport)

    def get_buffer(self, sizehint: int) -> bytearray:
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        """It came."""


async def _serve(port: int, tls: TlsIdentity) -> None:
    transports: list[asyncio.Transport] = []
    server = await asyncio.get_running_loop().create_server(
        lambda: _Drop(transports), "127.0.0.1", port, ssl=tls.server_context()
    )
    ping = encode_frame(Frame(FrameType.PING))
    async with server:
        while True:
            await asyncio.sleep(Timing().ring_ping_seconds)
            for transport in transports:
                transport.write(ping)


def _main(port: int, ca: Path, certificate: Path, key: Path) -> None:
    asyncio.run(_serve(port, TlsIdentity(ca, certificate, key)))


@contextmanager
def sink_process(ca: SiteCa, port: int) -> Iterator[int]:
    """The sink, in a process of its own; gives its process id."""
    tls = ca.issue("control")
    arguments = (port, tls.ca, tls.certificate, tls.key)
    process = multiprocessing.get_context("spawn").Process(target=_main, args=arguments, daemon=True)
    process.start()
    try:
        assert process.pid is not None
        yield process.pid
    finally:
        process.kill()
        process.join()


@asynccontextmanager
async def beating(ca: SiteCa, port: int, boxes: list[str]) -> AsyncIterator[None]:
    """One connection a box, with a heartbeat on it every heartbeat period; all are there.

    Raises:
        OSError: the sink does not listen.
    """
    heartbeat = encode_frame(Frame(FrameType.HEARTBEAT, encode_control(HEARTBEAT), 1))
    period = Timing().heartbeat_seconds

    async def beat(writer: asyncio.StreamWriter) -> None:
        while True:
            writer.write(heartbeat)
            await asyncio.sleep(period)

    async def drop(reader: asyncio.StreamReader) -> None:
        while await reader.read(BUFFER_BYTES):
            pass

    tasks: list[asyncio.Task[None]] = []
    try:
        for number, box in enumerate(boxes):
            reader, writer = await _dial(ca, port, box, patient=number == 0)
            tasks += [asyncio.ensure_future(beat(writer)), asyncio.ensure_future(drop(reader))]
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _dial(ca: SiteCa, port: int, box: str, *, patient: bool) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    context, deadline = ca.issue(box).client_context(), asyncio.get_running_loop().time() + START_SECONDS
    while True:
        try:
            return await asyncio.open_connection(
                "127.0.0.1", port, ssl=context, server_hostname=server_name("control", SITE)
            )
        except ConnectionRefusedError:  # its process starts
            if not patient or asyncio.get_running_loop().time() >= deadline:
                raise
            await asyncio.sleep(DIAL_SECONDS)
