"""The listener of an HTTPS server with a most of everything: whoever dials without end uses up nobody's descriptors."""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from collections.abc import Coroutine
from typing import Any

from aiohttp import web

log = logging.getLogger("fleet.coordinator")

# TLS handshakes at once, and connections; the oldest goes first. An operator and a scrape need a handful, for
# milliseconds, and the links of stages and gateways need descriptors too.
HANDSHAKES_AT_ONCE = 64
CONNECTIONS_AT_ONCE = 128
HANDSHAKE_SECONDS = 5.0
BACKLOG = 128
ACCEPT_RETRY_SECONDS = 0.1


class HttpsListener:
    """Accepts by hand: asyncio's own server bounds neither.

    Args:
        runner: set up; its server takes the connections.
        context: of TLS.
    """

    def __init__(self, runner: web.AppRunner, context: ssl.SSLContext) -> None:
        self._runner = runner
        self._context = context
        self._socket: socket.socket | None = None
        self._accepting: asyncio.Task[None] | None = None
        self._handshakes: dict[asyncio.Task[None], None] = {}  # oldest first

    def start(self, host: str, port: int) -> None:
        """Start to listen.

        Raises:
            OSError: the address is in use or not ours.
        """
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket = socket.create_server((host, port), family=family, backlog=BACKLOG)
        self._socket.setblocking(False)
        self._accepting = asyncio.ensure_future(self._accept(self._socket))

    @property
    def port(self) -> int:
        """The port it listens on (useful when 0 was asked for)."""
        if self._socket is None:
            raise RuntimeError("not listening")
        return int(self._socket.getsockname()[1])

    async def close(self) -> None:
        """Stop to listen, and end every connection."""
        tasks = [*self._handshakes, *([self._accepting] if self._accepting else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._socket is not None:
            self._socket.close()
        await self._runner.cleanup()

    async def _accept(self, listening: socket.socket) -> None:
        while True:
            try:
                connection, _ = await asyncio.get_running_loop().sock_accept(listening)
            except OSError as error:  # e.g. no file descriptor left: this goes on when there is one
                log.warning("accept: %s", error)
                await asyncio.sleep(ACCEPT_RETRY_SECONDS)
                continue
            if len(self._handshakes) >= HANDSHAKES_AT_ONCE:
                oldest = next(iter(self._handshakes))
                del self._handshakes[oldest]
                oldest.cancel()
            self._make_room()
            self._own(self._shake_hands(connection))

    def _own(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(coroutine)
        self._handshakes[task] = None
        task.add_done_callback(lambda done: self._handshakes.pop(done, None))

    def _make_room(self) -> None:
        server = self._runner.server
        connections = server.connections if server is not None else []
        if len(connections) >= CONNECTIONS_AT_ONCE and (transport := connections[0].transport) is not None:
            transport.abort()

    async def _shake_hands(self, connection: socket.socket) -> None:
        server = self._runner.server
        if server is None:
            connection.close()
            return
        try:
            await asyncio.get_running_loop().connect_accepted_socket(
                server, connection, ssl=self._context, ssl_handshake_timeout=HANDSHAKE_SECONDS
            )
        except OSError as error:  # an ssl.SSLError is one; the connection is its transport's to close
            log.debug("TLS: %s", error)
