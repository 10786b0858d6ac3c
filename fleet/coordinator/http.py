"""The coordinator over HTTPS: /livez for anyone, the rest with a site certificate; orders from the operator only, and
leases for the box that asks."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from fleet.coordinator.context import Context
from fleet.coordinator.database import StoreError
from fleet.coordinator.documents import box_document, events_document, health_document, site_document
from fleet.coordinator.leases import LONGEST_SECONDS, LeaseRefused
from fleet.coordinator.orders import DrainRefused
from fleet.coordinator.pipeline import Pipeline
from fleet.coordinator.routes import missing_mebibytes
from fleet.coordinator.state import BoxState
from fleet.coordinator.text import line
from fleet.errors import FleetError
from stage_runtime.link.https import HttpsListener
from stage_runtime.link.section import Section
from stage_runtime.link.tls import peer_identity

OPERATOR = "operator"
# Silent connections end after it: anyone may open some, and descriptors are needed for the links.
KEEPALIVE_SECONDS = 75.0
# A page takes milliseconds; whoever reads one more slowly does not hold up a stop.
SHUTDOWN_SECONDS = 2.0
# An operator and a scrape need a handful, for milliseconds, and the links of stages and gateways need descriptors too.
CONNECTIONS_AT_ONCE = 128
MAX_BODY_BYTES = 4096  # drains have no body, leases a small one
MOST_REASON_CHARACTERS = 200
MOST_EVENTS_A_PAGE = 1000
LARGEST_ID = 2**63 - 1

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Api:
    """Handlers and what they show."""

    def __init__(self, context: Context, pipelines: Mapping[str, Pipeline]) -> None:
        self._context = context
        self._pipelines = pipelines

    def application(self) -> web.Application:
        """The aiohttp application with all routes."""
        application = web.Application(middlewares=[self._authorise], client_max_size=MAX_BODY_BYTES)
        application.add_routes(
            [
                web.get("/livez", self._livez),
                web.get("/health", self._health),
                web.get("/metrics", self._metrics),
                web.get("/v1/site", self._site),
                web.get("/v1/events", self._events),
                web.post("/v1/boxes/{box}/drain", self._drain),
                web.post("/v1/boxes/{box}/undrain", self._undrain),
                web.post("/v1/boxes/{box}/lease", self._take_lease),
                web.delete("/v1/boxes/{box}/lease/{lease}", self._give_back),
            ]
        )
        return application

    async def start(self) -> HttpsListener:
        """Listen; the caller closes what it gets.

        Raises:
            FleetError: the address can't be listened on, or a certificate file can't be read.
        """
        config = self._context.config
        try:
            context = config.tls.server_context(require_certificate=False)
        except OSError as error:
            raise FleetError(
                f"{config.tls.certificate}: cannot use this certificate: {error}", hint="run fleet provision again"
            ) from None
        runner = web.AppRunner(
            self.application(), access_log=None, keepalive_timeout=KEEPALIVE_SECONDS, shutdown_timeout=SHUTDOWN_SECONDS
        )
        await runner.setup()
        listener = HttpsListener(runner, context, most=CONNECTIONS_AT_ONCE)
        try:
            listener.start(config.http.host, config.http.port)
        except OSError as error:
            await listener.close()
            raise FleetError(
                f"cannot listen on {config.http.host}:{config.http.port}: {error.strerror}",
                hint=f"see who has the port: ss -ltnp 'sport = :{config.http.port}'",
            ) from None
        return listener

    @web.middleware
    async def _authorise(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        identity = peer_identity(request.transport.get_extra_info("ssl_object") if request.transport else None)
        if request.path != "/livez":
            if identity is None or identity.site != self._context.config.site:
                return _problem(403, "a certificate of this site is needed")
            own = (
                request.match_info.handler in (self._take_lease, self._give_back)
                and identity.box == request.match_info["box"]
            )
            if request.method not in ("GET", "HEAD") and identity.box != OPERATOR and not own:
                return _problem(403, f"{identity.box} may not order: only {OPERATOR} may")
        try:
            return await handler(request)
        except web.HTTPException as error:
            return _problem(error.status, f"{request.method} {request.path[:200]}: {error.reason}")

    async def _livez(self, _: web.Request) -> web.Response:
        return web.Response(text="ok\n")

    async def _health(self, _: web.Request) -> web.Response:
        serves, document = health_document(self._context, self._pipelines)
        return web.json_response(document, status=200 if serves else 503)

    async def _metrics(self, _: web.Request) -> web.Response:
        body = generate_latest(self._context.metrics.registry)
        return web.Response(body=body, headers={"Content-Type": CONTENT_TYPE_LATEST})

    async def _site(self, _: web.Request) -> web.Response:
        return web.json_response(site_document(self._context, self._pipelines))

    async def _events(self, request: web.Request) -> web.Response:
        try:
            after, limit = int(request.query.get("after", "0")), int(request.query.get("limit", "100"))
        except ValueError:
            return _problem(400, "after and limit are whole numbers")
        if not (0 <= after <= LARGEST_ID and limit > 0):
            return _problem(400, "after is at least 0, limit at least 1")
        try:
            events = await self._context.store.events(after, min(limit, MOST_EVENTS_A_PAGE))
        except StoreError as error:
            return _problem(503, str(error))
        return web.json_response(events_document(events))

    async def _drain(self, request: web.Request) -> web.Response:
        return await self._order(request, "drain")

    async def _undrain(self, request: web.Request) -> web.Response:
        return await self._order(request, "undrain")

    async def _order(self, request: web.Request, what: str) -> web.Response:
        box, pipeline = self._find(request.match_info["box"])
        if box is None or pipeline is None:
            return _problem(404, f"no box {request.match_info['box'][:100]!r} in any pipeline")
        try:
            await (pipeline.orders.drain(box) if what == "drain" else pipeline.orders.undrain(box))
        except DrainRefused as error:
            body = {"reason": error.refusal.reason, "missing_mebibytes": missing_mebibytes(error.refusal)}
            return web.json_response(body, status=409)
        except StoreError as error:
            return _problem(503, str(error))
        return web.json_response(box_document(box, pipeline, self._context), status=202)

    async def _take_lease(self, request: web.Request) -> web.Response:
        box, pipeline = self._find(request.match_info["box"])
        if box is None or pipeline is None:
            return _problem(404, f"no box {request.match_info['box'][:100]!r} in any pipeline")
        try:
            body = Section(json.loads(await request.read())).only("because", "seconds")
            because, seconds = line(body.text("because"), MOST_REASON_CHARACTERS), body.seconds("seconds")
        except (ValueError, RecursionError) as error:
            return _problem(400, f"expected because and seconds: {str(error)[:200]}")
        try:
            lease = await pipeline.leases.take(box, because, min(seconds, LONGEST_SECONDS))
        except LeaseRefused as error:
            return _problem(409, str(error))
        except StoreError as error:
            return _problem(503, str(error))
        return web.json_response({"lease": lease.id, "seconds": min(seconds, LONGEST_SECONDS)})

    async def _give_back(self, request: web.Request) -> web.Response:
        box, pipeline = self._find(request.match_info["box"])
        if box is None or pipeline is None or not pipeline.leases.give_back(box, request.match_info["lease"]):
            return _problem(404, "no such lease: it was given back, or its time has passed")
        return web.Response(status=204)

    def _find(self, name: str) -> tuple[BoxState | None, Pipeline | None]:
        box = self._context.boxes.get(name)
        return box, self._pipelines.get(box.pipeline) if box is not None else None


def _problem(status: int, reason: str) -> web.Response:
    return web.json_response({"reason": reason}, status=status)
