"""The HTTPS listener of our programs: whoever dials without end uses up nobody's descriptors."""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from typing import Literal

from aiohttp import web

from stage_runtime.link.acceptor import Acceptor

log = logging.getLogger(__name__)

HANDSHAKE_SECONDS = 5.0


class HttpsListener:
    """Accepts for an aiohttp server, whose own listener takes any number of connections and of handshakes.

    Args:
        runner: set up; its server takes the connections.
        context: of TLS.
        most: connections that have finished TLS.
        crowded: which one goes when there are more: the "oldest" of pages that take milliseconds, the "newest" where
            an old one may be an open answer.
    """

    def __init__(
        self, runner: web.AppRunner, context: ssl.SSLContext, *, most: int, crowded: Literal["oldest", "newest"]
    ) -> None:
        self.runner = runner
        self._context = context
        self._most = most
        self._crowded = crowded
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
        connections = server.connections  # oldest first
        surplus = connections[: -self._most] if self._crowded == "oldest" else connections[self._most :]
        for connected in surplus:
            if connected.transport is not None:
                connected.transport.abort()

    @staticmethod
    def _refused(address: str, reason: str) -> None:
        log.debug("HTTPS from %s: %s", address, reason)
