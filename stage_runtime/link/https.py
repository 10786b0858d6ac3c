"""The HTTPS listener of our programs: whoever dials without end uses up nobody's descriptors."""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
import weakref
from collections.abc import Awaitable, Callable

from aiohttp import web

from stage_runtime.link.acceptor import Acceptor

log = logging.getLogger(__name__)

HANDSHAKE_SECONDS = 5.0

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class BusyConnections:
    """Which connections have a request under way; `note` is a middleware of the application."""

    def __init__(self) -> None:
        self._transports: weakref.WeakSet[asyncio.BaseTransport] = weakref.WeakSet()

    def __contains__(self, transport: asyncio.BaseTransport) -> bool:
        return transport in self._transports

    @web.middleware
    async def note(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Around every request."""
        transport = request.transport
        if transport is None:
            return await handler(request)
        self._transports.add(transport)
        try:
            return await handler(request)
        finally:
            self._transports.discard(transport)


class HttpsListener:
    """Accepts for an aiohttp server, whose own listener takes any number of connections and of handshakes.

    Args:
        runner: set up; its server takes the connections.
        context: of TLS.
        most: connections that have finished TLS; when there are more, the oldest goes that asks nothing just now.
        busy: those with a request under way, where one may be an open answer; only when all are busy, the newest goes.
    """

    def __init__(
        self, runner: web.AppRunner, context: ssl.SSLContext, *, most: int, busy: BusyConnections | None = None
    ) -> None:
        self.runner = runner
        self._context = context
        self._most = most
        self._busy = busy or BusyConnections()
        self._acceptor = Acceptor(self._serve, self._refused)

    def start(self, host: str, port: int) -> None:
        """Start to listen.

        Raises:
            OSError: the address is in use or not ours.
        """
        self._acceptor.start(host, port)

    @property
    def port(self) -> int:
        """The port it listens on (useful when 0 was asked for)."""
        return self._acceptor.port

    async def close(self) -> None:
        """Stop to listen, end every connection, and clean the runner up."""
        await self._acceptor.close()
        await self.runner.cleanup()

    async def _serve(self, connection: socket.socket, address: str) -> None:
        """Hand a connection over to the server, which owns it once TLS stands."""
        server = self.runner.server
        if server is None:
            connection.close()
            return
        try:
            await asyncio.get_running_loop().connect_accepted_socket(
                server, connection, ssl=self._context, ssl_handshake_timeout=HANDSHAKE_SECONDS
            )
        except OSError as error:  # an ssl.SSLError is one; the connection is its transport's to close
            self._refused(address, f"TLS: {error.strerror or error}")
            return
        transports = [each.transport for each in server.connections if each.transport is not None]  # oldest first
        transports.sort(key=lambda transport: transport in self._busy)  # stable: the idle ones first
        idle = sum(transport not in self._busy for transport in transports)
        surplus = max(0, len(transports) - self._most)
        for transport in transports[: min(surplus, idle)] + transports[len(transports) - max(0, surplus - idle) :]:
            transport.abort()

    @staticmethod
    def _refused(address: str, reason: str) -> None:
        log.debug("HTTPS from %s: %s", address, reason)
