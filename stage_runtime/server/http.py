"""HTTPS on the metrics port: /livez for anyone, /health and /metrics for holders of a site certificate."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from stage_runtime.link.acceptor import Acceptor
from stage_runtime.link.tls import peer_identity
from stage_runtime.server.metrics import make_registry
from stage_runtime.server.state import StageState

log = logging.getLogger(__name__)

# Silent connections end after it: anyone may open some, and descriptors are needed for the ring.
KEEPALIVE_SECONDS = 75.0
# A page takes milliseconds; whoever reads one more slowly does not hold up a stop.
SHUTDOWN_SECONDS = 2.0

# Anyone may connect, as /livez is open; scrapers and operators are few.
CONNECTIONS_AT_ONCE = 64

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def make_app(state: StageState) -> web.Application:
    """The three pages of a stage."""
    registry = make_registry(state)

    async def livez(_: web.Request) -> web.Response:
        return web.Response(text="ok\n")

    async def health(_: web.Request) -> web.Response:
        return web.json_response(state.health(), status=200 if state.state in ("loaded", "ready") else 503)

    async def metrics(_: web.Request) -> web.Response:
        return web.Response(body=generate_latest(registry), headers={"Content-Type": CONTENT_TYPE_LATEST})

    @web.middleware
    async def require_certificate(request: web.Request, handler: Handler) -> web.StreamResponse:
        ssl_object = request.transport.get_extra_info("ssl_object") if request.transport else None
        identity = peer_identity(ssl_object)
        if request.path != "/livez" and (identity is None or identity.site != state.config.site):
            return web.Response(status=403, text="a certificate of this site is needed\n")
        return await handler(request)

    app = web.Application(middlewares=[require_certificate])
    app.router.add_get("/livez", livez)
    app.router.add_get("/health", health)
    app.router.add_get("/metrics", metrics)
    return app


class HttpServer:
    """Listens on the metrics port; strangers can take only so many descriptors.

    Args:
        state: what the pages show.
    """

    def __init__(self, state: StageState) -> None:
        self._config = state.config
        self._runner = web.AppRunner(
            make_app(state), access_log=None, keepalive_timeout=KEEPALIVE_SECONDS, shutdown_timeout=SHUTDOWN_SECONDS
        )
        self._acceptor = Acceptor(self._serve, self._refused)

    async def start(self) -> None:
        """Listen.

        Raises:
            OSError: the address is taken, or a certificate file can't be read.
        """
        self._context = self._config.tls.server_context(require_certificate=False)
        await self._runner.setup()
        self._acceptor.start(self._config.metrics.host, self._config.metrics.port)

    async def close(self) -> None:
        """End every connection."""
        await self._acceptor.close()
        await self._runner.cleanup()

    async def _serve(self, connection: socket.socket, address: str) -> None:
        server = self._runner.server
        if server is None:
            connection.close()
            return
        try:
            await asyncio.get_running_loop().connect_accepted_socket(
                server,
                connection,
                ssl=self._context,
                ssl_handshake_timeout=self._config.link_timing.handshake_seconds,
            )
        except OSError as error:  # an ssl.SSLError is one
            self._refused(address, f"TLS: {error.strerror or error}")
            return
        for oldest in server.connections[:-CONNECTIONS_AT_ONCE]:
            oldest.force_close()

    @staticmethod
    def _refused(address: str, reason: str) -> None:
        log.debug("metrics port: connection from %s is closed: %s", address, reason)
