"""Making links: dialling a box, listening for links."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from stage_runtime.link.connection import READ_BUFFER_BYTES, Link, LinkError, LinkProtocol, LinkTiming
from stage_runtime.link.handshake import HelloCheck, shake_hands
from stage_runtime.link.messages import Hello
from stage_runtime.link.tls import TlsIdentity, server_name


@dataclass(frozen=True)
class BoxAddress:
    """Where a box listens for links; its certificate and its Hello must carry its name."""

    box: str
    host: str
    port: int

    def __str__(self) -> str:
        return f"{self.box} ({self.host}:{self.port})"


@dataclass(frozen=True)
class LinkSettings:
    """This side of every link of a process."""

    own: Hello
    tls: TlsIdentity
    timing: LinkTiming


def _tune(writer: asyncio.StreamWriter, timing: LinkTiming) -> None:
    raw = writer.get_extra_info("socket")
    raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    # unacknowledged data for that long means a dead peer; the kernel's own retries go on for minutes
    raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(timing.silence_seconds * 1000))


async def dial(settings: LinkSettings, peer: BoxAddress, own: Hello | None = None) -> Link:
    """Connect to a box and shake hands.

    Args:
        settings: this side.
        peer: the box to reach.
        own: Hello to say instead of the one in `settings`.

    Raises:
        LinkError: no connection, no valid certificate, or refused by either side; says why.
    """
    hello = own or settings.own
    timing = settings.timing

    def check(other: Hello) -> str:
        return "" if other.box == peer.box else f"expected box {peer.box!r}, reached {other.box!r}"

    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader(limit=READ_BUFFER_BYTES)
    protocol = LinkProtocol(reader)
    try:
        transport, _ = await asyncio.wait_for(
            loop.create_connection(
                lambda: protocol,
                peer.host,
                peer.port,
                ssl=settings.tls.client_context(),
                server_hostname=server_name(peer.box, hello.site),
            ),
            timing.connect_seconds,
        )
    except asyncio.TimeoutError:
        raise LinkError(f"no answer from {peer} within {timing.connect_seconds:g} s") from None
    except ssl.SSLCertVerificationError as error:
        raise LinkError(f"{peer}: certificate refused: {error.verify_message}") from None
    except OSError as error:
        raise LinkError(f"can't reach {peer}: {error.strerror or error}") from None
    writer = asyncio.StreamWriter(transport, protocol, reader, loop)
    _tune(writer, timing)
    return await shake_hands(reader, writer, hello, check, timing, dialled=True)


class LinkServer:
    """Listens for links; each accepted one is handled by a task that this server owns.

    Args:
        settings: this side.
        check: further conditions on a peer's Hello; returns the problem or "".
        handle: takes over a link until it ends.
        on_refused: told the address and the reason of every connection that did not become a link.
    """

    def __init__(
        self,
        settings: LinkSettings,
        check: HelloCheck,
        handle: Callable[[Link], Awaitable[None]],
        on_refused: Callable[[str, str], None],
    ) -> None:
        self._settings = settings
        self._check = check
        self._handle = handle
        self._on_refused = on_refused
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self, host: str, port: int) -> None:
        """Start to listen.

        Raises:
            OSError: the address is in use or not ours.
        """
        loop = asyncio.get_running_loop()
        context = self._settings.tls.server_context()

        def protocol() -> LinkProtocol:
            return LinkProtocol(asyncio.StreamReader(limit=READ_BUFFER_BYTES), self._accept)

        self._server = await loop.create_server(
            protocol, host, port, ssl=context, ssl_handshake_timeout=self._settings.timing.handshake_seconds
        )

    @property
    def port(self) -> int:
        """The port it listens on (useful when 0 was asked for)."""
        if self._server is None:
            raise RuntimeError("not listening")
        return int(self._server.sockets[0].getsockname()[1])

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.ensure_future(self._serve(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        address = str(writer.get_extra_info("peername"))
        try:
            _tune(writer, self._settings.timing)
            link = await shake_hands(
                reader, writer, self._settings.own, self._check, self._settings.timing, dialled=False
            )
        except (LinkError, OSError) as error:
            writer.transport.abort()
            self._on_refused(address, str(error))
            return
        try:
            await self._handle(link)
        finally:
            link.close("no longer served")

    async def close(self) -> None:
        """Stop listening and end every link."""
        if self._server is not None:
            self._server.close()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
