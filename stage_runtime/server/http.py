"""HTTPS on the metrics port: /livez for anyone, /health and /metrics for holders of a site certificate."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from stage_runtime.link.https import HttpsListener
from stage_runtime.link.tls import peer_identity
from stage_runtime.server.metrics import make_registry
from stage_runtime.server.state import StageState

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


async def start_http(state: StageState) -> HttpsListener:
    """Listen on the metrics port; the caller closes what it gets.

    Raises:
        OSError: the address is taken, or a certificate file can't be read.
    """
    config = state.config
    context = config.tls.server_context(require_certificate=False)
    runner = web.AppRunner(
        make_app(state), access_log=None, keepalive_timeout=KEEPALIVE_SECONDS, shutdown_timeout=SHUTDOWN_SECONDS
    )
    await runner.setup()
    listener = HttpsListener(runner, context, most=CONNECTIONS_AT_ONCE)
    try:
        listener.start(config.metrics.host, config.metrics.port)
    except OSError:
        await listener.close()
        raise
    return listener
