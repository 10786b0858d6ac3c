"""The gateway's HTTP application."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from aiohttp import web
from aiohttp.typedefs import Middleware
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from fleet import __version__
from fleet.gateway.answering import Answering
from fleet.gateway.auth import ApiKeys
from fleet.gateway.backend import Backend, health, of_model
from fleet.gateway.channel import RouteChannel
from fleet.gateway.config import GatewayConfig
from fleet.gateway.errors import ApiError, invalid, unsupported
from fleet.gateway.fields import decode_body
from fleet.gateway.journal import Journal
from fleet.gateway.metrics import GatewayMetrics
from fleet.gateway.middleware import make_middleware
from fleet.gateway.requests import ChatRequest, CompletionRequest, parse_chat, parse_completion
from fleet.gateway.streams import StreamRegistry
from fleet.gateway.vocabulary import Vocabulary
from stage_runtime.link.tasks import until_first_ends, within

MAX_BODY_BYTES = 2 * 2**20
BODY_READ_SECONDS = 30.0


@dataclass(frozen=True)
class Gateway:
    """Handlers and what they need.

    Attributes:
        config: what the gateway was told.
        keys: who may ask.
        backends: the pipelines.
        metrics: the gateway's series.
        answering: makes and tells answers.
        channel: to the coordinator.
        registry: streams that can be resumed. journal: where they are kept.
        started: Unix seconds; the `created` of models.
    """

    config: GatewayConfig
    keys: ApiKeys
    backends: Sequence[Backend]
    metrics: GatewayMetrics
    answering: Answering
    channel: RouteChannel
    registry: StreamRegistry
    journal: Journal
    started: int

    def recover(self) -> None:
        """Follow the last routes and take the journal's streams over. Blocks; on the loop, before it serves."""
        self.channel.recall()
        self.registry.restore(self.journal.load(), self.answering.restart)

    async def run(self) -> None:
        """Everything behind the listeners; runs until cancelled, or raises the bug that ended a part of it."""
        pipelines = [backend.pipeline.run() for backend in self.backends]
        await until_first_ends(self.registry.run(), self.journal.run(), self.channel.run(), *pipelines)

    def application(self, *around: Middleware) -> web.Application:
        """The aiohttp application with all routes, and these middlewares around its own."""
        middlewares = [*around, make_middleware(self.keys, self.metrics)]
        application = web.Application(middlewares=middlewares, client_max_size=MAX_BODY_BYTES)
        application.add_routes(
            [
                web.get("/livez", self.livez),
                web.get("/health", self.health),
                web.get("/metrics", self.scrape),
                web.get("/v1/models", self.models),
                web.get("/v1/models/{model}", self.model),
                web.post("/v1/chat/completions", self.chat),
                web.post("/v1/completions", self.completions),
                # no HEAD: events are written as they come, and a body would be taken for the next answer
                web.get("/v1/streams/{stream}", self.answering.resume, allow_head=False),
            ]
        )
        return application

    async def livez(self, request: web.Request) -> web.Response:
        """The process answers; says nothing about pipelines."""
        return web.json_response({"live": True})

    async def health(self, request: web.Request) -> web.Response:
        """200 if every model can be asked, else 503 with the reason."""
        document = health(self.backends, site=self.config.site, box=self.config.box, version=__version__)
        return web.json_response(document, status=200 if document["state"] == "ready" else 503)

    async def scrape(self, request: web.Request) -> web.Response:
        """Prometheus' text format."""
        for backend in self.backends:
            situation = backend.pipeline.situation
            self.metrics.observe_pipeline(
                backend.config.name,
                active=backend.queue.active,
                queued=backend.queue.waiting,
                ready=backend.pipeline.status.ready,
                refused=situation.state == "refused",
                epoch=situation.epoch,
            )
        self.metrics.coordinator_connected.set(int(self.channel.connected))
        body = generate_latest(self.metrics.registry)
        return web.Response(body=body, headers={"Content-Type": CONTENT_TYPE_LATEST})

    async def models(self, request: web.Request) -> web.Response:
        """The models of the site, each once."""
        names = dict.fromkeys(backend.config.model for backend in self.backends)
        return web.json_response({"object": "list", "data": [self._model(name) for name in names]})

    async def model(self, request: web.Request) -> web.Response:
        """One model."""
        name = request.match_info["model"]
        of_model(self.backends, name)
        return web.json_response(self._model(name))

    def _model(self, name: str) -> dict[str, Any]:
        return {"id": name, "object": "model", "created": self.started, "owned_by": self.config.site}

    async def chat(self, request: web.Request) -> web.StreamResponse:
        """/v1/chat/completions."""
        parsed = parse_chat(await self._body(request))
        backends = of_model(self.backends, parsed.options.model)
        prompt = await asyncio.to_thread(_chat_prompt, backends[0].vocabulary, parsed)
        return await self.answering.answer(request, "chat", backends, prompt, parsed.options)

    async def completions(self, request: web.Request) -> web.StreamResponse:
        """/v1/completions."""
        parsed = parse_completion(await self._body(request))
        backends = of_model(self.backends, parsed.options.model)
        prompt = await asyncio.to_thread(_completion_prompt, backends[0].vocabulary, parsed)
        return await self.answering.answer(request, "completions", backends, prompt, parsed.options)

    async def _body(self, request: web.Request) -> dict[str, Any]:
        """The request's JSON object."""
        try:
            raw = await within(BODY_READ_SECONDS, request.read())
        except asyncio.TimeoutError:
            message = f"the request body did not arrive within {BODY_READ_SECONDS:g} s"
            raise ApiError(408, message, code="timeout") from None
        except web.HTTPRequestEntityTooLarge:
            message = f"the request body is longer than {MAX_BODY_BYTES} bytes"
            raise ApiError(413, message, code="request_too_large") from None
        return decode_body(raw)


def _chat_prompt(vocabulary: Vocabulary, request: ChatRequest) -> tuple[int, ...]:
    """Token ids of a conversation; CPU-bound, runs in a thread."""
    if vocabulary.template is None:
        raise unsupported("messages", "this model has no chat template; use /v1/completions")
    return vocabulary.encode(vocabulary.template.render(request.messages), add_special_tokens=False)


def _completion_prompt(vocabulary: Vocabulary, request: CompletionRequest) -> tuple[int, ...]:
    """Token ids of a completion's prompt; CPU-bound, runs in a thread."""
    if not isinstance(request.prompt, str):
        if max(request.prompt) >= vocabulary.size:
            raise invalid("prompt", f"token id {max(request.prompt)}, the vocabulary has {vocabulary.size}")
        return request.prompt
    ids = vocabulary.encode(request.prompt, add_special_tokens=True)
    if not ids:
        raise invalid("prompt", "expected at least one token, the string is empty")
    return ids
