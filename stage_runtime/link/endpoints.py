"""Making links: dialling a box, listening for links."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from stage_runtime.link.acceptor import Acceptor
from stage_runtime.link.connection import READ_BUFFER_BYTES, Link, LinkError, LinkProtocol, LinkTiming
from stage_runtime.link.handshake import HelloCheck, shake_hands
from stage_runtime.link.messages import Hello
from stage_runtime.link.tasks import within
from stage_runtime.link.tls import TlsIdentity, server_name

# A box needs one for each epoch that lives, a few while it restarts. Whoever opens more has a bug, or bad intentions,
# and gets no further descriptors for it.
LINKS_OF_A_BOX = 64


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
    """Socket options of a link.

    Raises:
        LinkError: the peer has closed the connection already.
    """
    raw = writer.get_extra_info("socket")  # None once the transport is closed
    try:
        if raw is None:
            raise OSError("closed by the peer right after TLS")
        raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # unacknowledged data for that long means a dead peer; the kernel's own retries go on for minutes
        raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(timing.silence_seconds * 1000))
    except OSError as error:
        writer.transport.abort()
        raise LinkError(f"handshake: {error}") from None


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
        context = await asyncio.to_thread(settings.tls.client_context)  # reads files; a worn card may take its time
        transport, _ = await within(
            timing.connect_seconds,
            loop.create_connection(
                lambda: protocol,
                peer.host,
                peer.port,
                ssl=context,
                server_hostname=server_name(peer.box, hello.site),
            ),
        )
    except asyncio.CancelledError:
        if protocol.transport is not None:
            protocol.transport.close()
        raise
    except asyncio.TimeoutError:
        raise LinkError(f"no answer from {peer} within {timing.connect_seconds:g} s", "unreachable") from None
    except ssl.SSLCertVerificationError as error:
        raise LinkError(f"{peer}: certificate refused: {error.verify_message}", "unreachable") from None
    except OSError as error:
        raise LinkError(f"can't reach {peer}: {error.strerror or error}", "unreachable") from None
    except (ValueError, OverflowError) as error:  # a host name or a port that no resolver and no socket takes
        raise LinkError(f"can't reach {peer}: {error}", "unreachable") from None
    writer = asyncio.StreamWriter(transport, protocol, reader, loop)
    try:
        _tune(writer, timing)
        return await shake_hands(reader, writer, hello, check, timing, dialled=True)
    except LinkError as error:
        raise LinkError(f"{peer}: {error}", error.kind) from None


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
        self._acceptor = Acceptor(self._serve, on_refused)
        self._links: dict[str, list[Link]] = {}  # by the peer's box, oldest first

    def start(self, host: str, port: int) -> None:
        """Start to listen.

        Raises:
            OSError: the address is in use or not ours, or a certificate file can't be read.
        """
        self._context = self._settings.tls.server_context()
        self._acceptor.start(host, port)

    @property
    def port(self) -> int:
        """The port it listens on (useful when 0 was asked for)."""
        return self._acceptor.port

    async def _connect(self, connection: socket.socket) -> Link:
        loop = asyncio.get_running_loop()
        timing = self._settings.timing
        reader = asyncio.StreamReader(limit=READ_BUFFER_BYTES)
        try:
            transport, protocol = await loop.connect_accepted_socket(
                lambda: LinkProtocol(reader),
                connection,
                ssl=self._context,
                ssl_handshake_timeout=timing.handshake_seconds,
            )
        except OSError as error:  # an ssl.SSLError is one
            raise LinkError(f"TLS: {error.strerror or error}") from None
        writer = asyncio.StreamWriter(transport, protocol, reader, loop)
        _tune(writer, timing)
        return await shake_hands(reader, writer, self._settings.own, self._check, timing, dialled=False)

    async def _serve(self, connection: socket.socket, address: str) -> None:
        try:
            link = await self._connect(connection)
        except LinkError as error:
            # the connection is its transport's to close: a descriptor closed here could be a new link's by the time
            # that the transport lets go of it
            self._on_refused(address, str(error))
            return
        self._acceptor.settled()
        links = self._links.setdefault(link.peer.box, [])
        links.append(link)
        if len(links) > LINKS_OF_A_BOX:
            self._on_refused(address, f"{links[0].peer.box} has {LINKS_OF_A_BOX} newer links")
            links[0].close(f"{links[0].peer.box} has {LINKS_OF_A_BOX} newer links")
        try:
            await self._handle(link)
        finally:
            link.close("no longer served")
            links.remove(link)
            if not links:
                del self._links[link.peer.box]

    async def close(self) -> None:
        """Stop listening and end every link."""
        await self._acceptor.close()
