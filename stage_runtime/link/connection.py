"""A live link: frames over TCP and TLS, pings on idle, a deadline on silence."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from stage_runtime.link.frames import Frame, FrameError, FrameType, encode_frame, read_frame
from stage_runtime.link.messages import Hello
from stage_runtime.link.silence import Silence, ping_due

READ_BUFFER_BYTES = 1024 * 1024
WRITE_BUFFER_BYTES = 8 * 1024 * 1024  # a few prefill chunks may wait for a busy neighbour before sending blocks


@dataclass(frozen=True)
class LinkTiming:
    """Deadlines and periods of a link in seconds; the `ring_*` fields of the inventory's timing."""

    connect_seconds: float = 3.0
    handshake_seconds: float = 5.0
    reconnect_seconds: float = 0.25
    reconnect_max_seconds: float = 3.0
    ping_seconds: float = 0.2
    silence_least_seconds: float = 0.8
    silence_seconds: float = 3.0

    @staticmethod
    def from_config(timing: Mapping[str, float]) -> LinkTiming:
        """From the `timing` mapping of stage.json or gateway.json; other keys are ignored.

        Raises:
            KeyError: a `ring_*` field is missing.
        """
        names = ("connect", "handshake", "reconnect", "reconnect_max", "ping", "silence_least", "silence")
        return LinkTiming(**{f"{name}_seconds": float(timing[f"ring_{name}_seconds"]) for name in names})


# closed: the connection ended; silent: nothing came in time; refused: the peer does not want this link;
# unreachable: no connection, or no trust in who answers
LinkTrouble = Literal["closed", "silent", "refused", "unreachable"]
# Nobody waits more often than this for a deadline that has nearly come.
LEAST_WAIT_SECONDS = 0.005
# Times as many pings as fit into a silence are a flood: what a pause of this process piles up is one silence's worth.
MOST_PINGS = 20


class LinkError(Exception):
    """A link could not be made or has ended; the message is the reason, for people and logs.

    Args:
        reason: see above.
        kind: what happened.
        silent_seconds: how long nothing had come in; 0 unless `kind` is "silent".
    """

    def __init__(self, reason: str, kind: LinkTrouble = "closed", silent_seconds: float = 0.0) -> None:
        super().__init__(reason)
        self.kind: LinkTrouble = kind
        self.silent_seconds = silent_seconds


class LinkProtocol(asyncio.StreamReaderProtocol):
    """Notes whenever bytes come in, so that a long frame on a slow link does not count as silence."""

    silence: Silence | None = None
    transport: asyncio.BaseTransport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport
        super().connection_made(transport)

    def data_received(self, data: bytes) -> None:
        if self.silence is not None:
            self.silence.heard(asyncio.get_running_loop().time())
        super().data_received(data)


class Link:
    """One connection after its handshake.

    Attributes:
        peer: what the other side's Hello said.
        closed_reason: why it ended; empty while it lives.
        ended_by_peer: what ended it, when that was not this side's own decision.
    """

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, peer: Hello, timing: LinkTiming
    ) -> None:
        self.peer = peer
        self.closed_reason = ""
        self.ended_by_peer: LinkError | None = None
        self._closed = asyncio.Event()
        self._reader = reader
        self._writer = writer
        self._timing = timing
        self._last_sent = 0.0
        self._pings = 0  # since `_pings_since`
        self._pings_since = 0.0
        self._draining = asyncio.Lock()  # Python 3.10's drain() takes one waiter
        writer.transport.set_write_buffer_limits(high=WRITE_BUFFER_BYTES)
        now = asyncio.get_running_loop().time()
        self._silence = Silence(timing.silence_least_seconds, timing.silence_seconds, timing.ping_seconds, now)
        protocol = writer.transport.get_protocol()
        if isinstance(protocol, LinkProtocol):
            protocol.silence = self._silence
        # a timer and no task: links are many in the coordinator, and a task costs a turn of the event loop more
        self._keepalive = asyncio.get_running_loop().call_later(0, self._keep_alive)

    @property
    def peer_host(self) -> str:
        """The address that the connection came from or went to; empty once it is closed."""
        name = self._writer.get_extra_info("peername")
        return str(name[0]) if name else ""

    async def send(self, frame: Frame) -> None:
        """Queue a frame for sending; waits only while the peer is more than `WRITE_BUFFER_BYTES` behind.

        Raises:
            LinkError: the link has ended.
            FrameError: the body is longer than its type allows; the link lives.
        """
        self._raise_if_closed()
        data = encode_frame(frame)
        self._last_sent = asyncio.get_running_loop().time()
        self._writer.write(data)
        try:
            async with self._draining:
                await self._writer.drain()
        except OSError as error:
            self._end(LinkError(f"link with {self.peer.box}: {error}"))
            self._raise_if_closed()

    async def receive(self) -> Frame:
        """The next frame that is not a ping.

        Raises:
            LinkError: closed by either side, silent for too long, or bytes that are no frame.
        """
        while True:
            try:
                frame = await read_frame(self._reader)
            except (FrameError, EOFError, OSError) as error:
                self._end(LinkError(f"link with {self.peer.box}: {error or type(error).__name__}"))
                raise self._error() from None
            if frame.type is not FrameType.PING:
                return frame
            self._count_ping()

    def _count_ping(self) -> None:
        """LinkError once the peer sends nothing but pings, and more of them than any pause of ours could pile up."""
        now = asyncio.get_running_loop().time()
        if now - self._pings_since >= self._timing.silence_seconds:
            self._pings, self._pings_since = 0, now
        self._pings += 1
        if self._pings > MOST_PINGS * self._timing.silence_seconds / self._timing.ping_seconds:
            self._end(LinkError(f"link with {self.peer.box}: it floods with pings"))
            self._raise_if_closed()

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

    def _end(self, error: LinkError) -> None:
        """The peer or the network ended it, unless this side has closed it already."""
        if not self.closed_reason:
            self.ended_by_peer = error
            self.close(str(error))

    def _error(self) -> LinkError:
        return self.ended_by_peer or LinkError(self.closed_reason)

    def _raise_if_closed(self) -> None:
        if self.closed_reason:
            raise self._error()

    def _keep_alive(self) -> None:
        """Judge the peer's silence, end one's own, and come again when either may be due."""
        loop, ping = asyncio.get_running_loop(), self._timing.ping_seconds
        now = loop.time()
        self._silence.ran(now)
        if (left := self._silence.left_seconds(now)) <= 0:
            silent = self._silence.silent_seconds(now)
            self._end(LinkError(f"{self.peer.box} was silent for {silent:.1f} s", "silent", silent))
            return
        if now >= (due := ping_due(self._last_sent, ping)):
            self._last_sent, due = now, ping_due(now, ping)
            self._writer.write(encode_frame(Frame(FrameType.PING, epoch=self.peer.epoch)))
        self._keepalive = loop.call_later(max(LEAST_WAIT_SECONDS, min(due - now, left)), self._keep_alive)
