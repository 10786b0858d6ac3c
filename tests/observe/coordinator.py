"""A coordinator's HTTP API over the site's certificates, driven by the test: real TLS, real JSON, scripted answers."""

from __future__ import annotations

import copy
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from stage_runtime.link.tls import TlsIdentity
from tests.gateway.site import Pki

HEARTBEAT = {
    "epoch": 3, "state": "ready", "reason": "", "start": 0, "end": 10, "ready_layers": 20, "load": 0.25,
    "open_sequences": 1, "progress": 17, "working_seconds": 0.0, "step_seconds": 0.01, "usual_step_seconds": 0.01,
    "memory_available_bytes": 2**30, "resident_bytes": 2**29, "temperature_celsius": 51.5, "guard_state": "",
}  # fmt: skip


def stage(box: str, start: int, end: int) -> dict[str, Any]:
    """A stage of a plan."""
    return {"box": box, "layers": [start, end], "embedding": start == 0, "head": start == 0}


def member(state: str = "serving", **changes: Any) -> dict[str, Any]:
    """A box as `/v1/site` shows it."""
    return {
        "pipeline": "main", "state": state, "reason": "", "since_seconds": 300.0, "slow": False, "incarnation": 1,
        "address": "127.0.0.1:7401", "hold_down_seconds_left": 0.0, "heartbeat": HEARTBEAT, **changes,
    }  # fmt: skip


def site_document() -> dict[str, Any]:
    """Three boxes that serve 30 layers."""
    pipeline = {
        "model": "tiny", "state": "serving", "reason": "", "epoch": 3, "policy": "exact", "degraded": "",
        "switching": None, "stages": [stage("box1", 0, 10), stage("box2", 10, 20), stage("box3", 20, 30)],
        "spares": [], "missing_mebibytes": {}, "unsurvivable": [],
    }  # fmt: skip
    boxes = {f"box{number}": member() for number in (1, 2, 3)}
    return {"schema": 1, "site": "demo", "pipelines": {"main": pipeline}, "boxes": boxes, "gateways": ["control"]}


@dataclass
class ScriptedCoordinator:
    """What it answers.

    Attributes:
        document: of `/v1/site` now. events: all of them. orders: (box, order) as they came in.
        on_order: changes the state and returns status and body of an order.
        upcoming: documents that follow, one a question, after an order.
    """

    document: dict[str, Any] = field(default_factory=site_document)
    events: list[dict[str, Any]] = field(default_factory=list)
    orders: list[tuple[str, str]] = field(default_factory=list)
    on_order: Callable[[str, str], tuple[int, dict[str, Any]]] | None = None
    upcoming: list[dict[str, Any]] = field(default_factory=list)

    async def site(self, request: web.Request) -> web.Response:
        if self.orders and self.upcoming:
            self.document = self.upcoming.pop(0)
        return web.json_response(self.document)

    async def list_events(self, request: web.Request) -> web.Response:
        after, limit = int(request.query["after"]), int(request.query["limit"])
        page = [event for event in self.events if event["id"] > after][:limit]
        return web.json_response({"schema": 1, "events": page})

    async def order(self, request: web.Request) -> web.Response:
        peer = request.transport.get_extra_info("peercert") if request.transport else None
        names = {key: value for part in peer["subject"] for key, value in part} if peer else {}
        box, what = request.match_info["box"], request.match_info["what"]
        if names.get("commonName") != "operator":
            return web.json_response({"error": f"{names.get('commonName')} may not order"}, status=403)
        if box not in self.document["boxes"]:
            return web.json_response({"error": f"no box {box}"}, status=404)
        self.orders.append((box, what))
        if self.on_order is not None:
            status, body = self.on_order(box, what)
            return web.json_response(body, status=status)
        return web.json_response(self.document["boxes"][box], status=202)

    def with_box(self, box: str, **changes: Any) -> dict[str, Any]:
        """A copy of the document with a box changed."""
        document = copy.deepcopy(self.document)
        document["boxes"][box].update(changes)
        return document


@asynccontextmanager
async def serving(coordinator: ScriptedCoordinator, pki: Pki) -> AsyncIterator[int]:
    """Serve it over mutual TLS on a port of the system's choice."""
    application = web.Application()
    application.add_routes(
        [
            web.get("/v1/site", coordinator.site),
            web.get("/v1/events", coordinator.list_events),
            web.post("/v1/boxes/{box}/{what:drain|undrain}", coordinator.order),
        ]
    )
    runner = web.AppRunner(application)
    await runner.setup()
    context = TlsIdentity(pki.ca, pki.certificate, pki.key).server_context()
    await web.TCPSite(runner, "127.0.0.1", 0, ssl_context=context).start()
    try:
        yield runner.addresses[0][1]
    finally:
        await runner.cleanup()
