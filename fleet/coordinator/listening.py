"""The listener of an HTTPS server with a most of everything: whoever dials without end uses up nobody's descriptors."""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl

from aiohttp import web

from stage_runtime.link.acceptor import Acceptor

log = logging.getLogger("fleet.coordinator")

# Connections that have finished TLS; the oldest goes first. An operator and a scrape need a handful, for milliseconds,
# and the links of stages and gateways need descriptors too.
CONNECTIONS_AT_ONCE = 128
HANDSHAKE_SECONDS = 5.0


class HttpsListener:
    """Accepts for an aiohttp server, whose own listener takes any number.

    Args:
        runner: set up; its server takes the connections.
        context: of TLS.
    """

    def __init__(self, runner: web.AppRunner, context: ssl.SSLContext) -> None:
        self._runner = runner
        self._context = context
        self._acceptor = Acceptor(self._serve, lambda address, reason: log.debug("HTTPS from %s: %s", address, reason))

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
        """Stop to listen, and end every connection."""
        await self._acceptor.close()
        await self._runner.cleanup()

    async def _serve(self, connection: socket.socket, address: str) -> None:
        """Hand a connection over to the server, which owns it once TLS stands."""
        server = self._runner.server
        if server is None:
            connection.close()
            return
        try:
            await asyncio.get_running_loop().connect_accepted_socket(
                server, connection, ssl=self._context, ssl_handshake_timeout=HANDSHAKE_SECONDS
            )
        except OSError as error:  # an ssl.SSLError is one; the connection is its transport's to close
            log.debug("TLS with %s: %s", address, error)
            return
        connections = server.connections  # oldest first
        for oldest in connections[: max(0, len(connections) - CONNECTIONS_AT_ONCE)]:
            if oldest.transport is not None:
                oldest.transport.abort()
