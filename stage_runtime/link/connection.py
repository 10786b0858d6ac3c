"""A live link: frames over TCP and TLS, pings on idle, a deadline on silence."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass

from stage_runtime.link.frames import Frame, FrameError, FrameType, encode_frame, read_frame
from stage_runtime.link.messages import Hello

READ_BUFFER_BYTES = 1024 * 1024
WRITE_BUFFER_BYTES = 8 * 1024 * 1024  # a few prefill chunks may wait for a busy neighbour before sending blocks


@dataclass(frozen=True)
class LinkTiming:
    """Deadlines and periods of a link in seconds; the `ring_*` fields of the inventory's timing."""

    connect_seconds: float = 3.0
    handshake_seconds: float = 5.0
    reconnect_seconds: float = 0.25
    reconnect_max_seconds: float = 3.0
    ping_seconds: float = 0.5
    silence_seconds: float = 3.0

    @staticmethod
    def from_config(timing: Mapping[str, float]) -> LinkTiming:
        """From the `timing` mapping of stage.json or gateway.json; other keys are ignored.

        Raises:
            KeyError: a `ring_*` field is missing.
        """
        names = ("connect", "handshake", "reconnect", "reconnect_max", "ping", "silence")
        return LinkTiming(**{f"{name}_seconds": float(timing[f"ring_{name}_seconds"]) for name in names})


class LinkError(Exception):
    """A link could not be made or has ended; the message is the reason, for people and logs."""


class LinkProtocol(asyncio.StreamReaderProtocol):
    """Remembers when bytes last came in, so that a long frame on a slow link does not count as silence."""

    last_received: float = 0.0
    transport: asyncio.BaseTransport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport
        super().connection_made(transport)

    def data_received(self, data: bytes) -> None:
        self.last_received = asyncio.get_running_loop().time()
        super().data_received(data)


class Link:
    """One connection after its handshake.

    Attributes:
        peer: what the other side's Hello said.
        closed_reason: why it ended; empty while it lives.
    """

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, peer: Hello, timing: LinkTiming
    ) -> None:
        self.peer = peer
        self.closed_reason = ""
        self._closed = asyncio.Event()
        self._reader = reader
        self._writer = writer
        self._timing = timing
        self._last_sent = 0.0
        self._draining = asyncio.Lock()  # Python 3.10's drain() takes one waiter
        writer.transport.set_write_buffer_limits(high=WRITE_BUFFER_BYTES)
        self._keepalive = asyncio.ensure_future(self._keep_alive())

    async def send(self, frame: Frame) -> None:
        """Queue a frame for sending; waits only while the peer is more than `WRITE_BUFFER_BYTES` behind.

        Raises:
            LinkError: the link has ended.
        """
        if self.closed_reason:
            raise LinkError(self.closed_reason)
        self._last_sent = asyncio.get_running_loop().time()
        self._writer.write(encode_frame(frame))
        try:
            async with self._draining:
                await self._writer.drain()
        except OSError as error:
            self.close(f"link with {self.peer.box}: {error}")
            raise LinkError(self.closed_reason) from None

    async def receive(self) -> Frame:
        """The next frame that is not a ping.

        Raises:
            LinkError: closed by either side, silent for too long, or bytes that are no frame.
        """
        while True:
            try:
                frame = await read_frame(self._reader)
            except (FrameError, EOFError, OSError) as error:
                self.close(f"link with {self.peer.box}: {error or type(error).__name__}")
                raise LinkError(self.closed_reason) from None
            if frame.type is not FrameType.PING:
                return frame

    def close(self, reason: str) -> None:
        """End the link at once; the first reason stands."""
        if not self.closed_reason:
            self.closed_reason = reason
            self._closed.set()
            self._keepalive.cancel()
            self._writer.transport.abort()

    async def wait_closed(self) -> None:
        """Until either side has ended the link."""
        await self._closed.wait()

    async def _keep_alive(self) -> None:
        loop = asyncio.get_running_loop()
        protocol = self._writer.transport.get_protocol()
        started = loop.time()
        while True:
            await asyncio.sleep(self._timing.ping_seconds)
            heard = max(started, protocol.last_received if isinstance(protocol, LinkProtocol) else 0.0)
            if loop.time() - heard > self._timing.silence_seconds:
                self.close(f"{self.peer.box} was silent for {self._timing.silence_seconds:g} s")
                return
            if loop.time() - self._last_sent >= self._timing.ping_seconds:
                self._last_sent = loop.time()
                self._writer.write(encode_frame(Frame(FrameType.PING, epoch=self.peer.epoch)))
