"""The gateway's HTTP application."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from fleet import __version__
from fleet.gateway.auth import ApiKeys
from fleet.gateway.backend import Admitted, Backend, admit, health, of_model
from fleet.gateway.config import GatewayConfig
from fleet.gateway.errors import ApiError, invalid, unsupported
from fleet.gateway.events import EventWriter
from fleet.gateway.fields import decode_body
from fleet.gateway.generation import Deadlines, Generation, Job
from fleet.gateway.metrics import GatewayMetrics
from fleet.gateway.middleware import REQUEST_ID_HEADER, current_request, make_middleware, report_bug
from fleet.gateway.requests import ChatRequest, CompletionRequest, GenerationOptions, parse_chat, parse_completion
from fleet.gateway.responses import ChatShape, ChoiceText, CompletionShape, Shape, usage
from fleet.gateway.vocabulary import Vocabulary
from stage_runtime.link.tasks import within

MAX_BODY_BYTES = 2 * 2**20
BODY_READ_SECONDS = 30.0
STREAM_ID_HEADER = "Fleet-Stream-Id"


@dataclass(frozen=True)
class Gateway:
    """Handlers and what they need.

    Attributes:
        config: what the gateway was told.
        keys: who may ask.
        backends: the pipelines.
        metrics: the gateway's series.
        started: Unix seconds; the `created` of models.
    """

    config: GatewayConfig
    keys: ApiKeys
    backends: Sequence[Backend]
    metrics: GatewayMetrics
    started: int

    def application(self) -> web.Application:
        """The aiohttp application with all routes."""
        middleware = make_middleware(self.keys, self.metrics)
        application = web.Application(middlewares=[middleware], client_max_size=MAX_BODY_BYTES)
        application.add_routes(
            [
                web.get("/livez", self.livez),
                web.get("/health", self.health),
                web.get("/metrics", self.scrape),
                web.get("/v1/models", self.models),
                web.get("/v1/models/{model}", self.model),
                web.post("/v1/chat/completions", self.chat),
                web.post("/v1/completions", self.completions),
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
            self.metrics.observe_pipeline(
                backend.config.name,
                active=backend.queue.active,
                queued=backend.queue.waiting,
                ready=backend.pipeline.status.ready,
            )
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
        return await self._generate(request, ChatShape, backends, prompt, parsed.options)

    async def completions(self, request: web.Request) -> web.StreamResponse:
        """/v1/completions."""
        parsed = parse_completion(await self._body(request))
        backends = of_model(self.backends, parsed.options.model)
        prompt = await asyncio.to_thread(_completion_prompt, backends[0].vocabulary, parsed)
        return await self._generate(request, CompletionShape, backends, prompt, parsed.options)

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

    async def _generate(
        self,
        request: web.Request,
        shape_class: type[Shape],
        backends: Sequence[Backend],
        prompt: tuple[int, ...],
        options: GenerationOptions,
    ) -> web.StreamResponse:
        """Admit, then answer; the same for both end points."""
        admitted = admit(backends, len(prompt), options.choices)
        try:
            return await self._answer(request, shape_class, admitted, prompt, options)
        finally:
            for ticket in admitted.tickets:
                ticket.release()

    async def _answer(
        self,
        request: web.Request,
        shape_class: type[Shape],
        admitted: Admitted,
        prompt: tuple[int, ...],
        options: GenerationOptions,
    ) -> web.StreamResponse:
        """Generate on the pipeline that admitted the request."""
        backend = admitted.backend
        room = backend.context_tokens - len(prompt)
        seed = options.sampling.seed if options.seeded else secrets.randbits(64)
        job = Job(
            request_id=current_request().request_id,
            sequence_ids=tuple(secrets.randbits(64) for _ in range(options.choices)),
            prompt=prompt,
            max_tokens=room if options.max_tokens is None else min(options.max_tokens, room),
            options=replace(options, sampling=replace(options.sampling, seed=seed)),
        )
        deadlines = Deadlines(self.config.request_timeout_seconds, self.config.first_token_timeout_seconds)
        generation = Generation(job, admitted, deadlines, self.metrics)
        stream_id = shape_class.prefix + secrets.token_hex(16)
        shape = shape_class(
            stream_id=stream_id,
            created=int(time.time()),
            model=options.model,
            fingerprint=f"fleet-{backend.config.model_digest[:16]}-{backend.config.policy}",
            vocabulary=backend.vocabulary,
            logprobs=options.sampling.logprobs,
            include_usage=options.include_usage,
            token_ids=options.token_ids,
        )
        self.metrics.prompt_tokens.inc(len(prompt))
        log = current_request().log
        log.update(stream_id=stream_id, model=options.model, pipeline=backend.config.name, prompt_tokens=len(prompt))
        try:
            if options.stream:
                return await _stream(request, generation, shape, stream_id)
            return web.json_response(await _whole(generation, shape), headers={STREAM_ID_HEADER: stream_id})
        finally:
            log["completion_tokens"] = generation.completion_tokens
            log["first_token_seconds"] = generation.first_token_after_seconds


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


async def _whole(generation: Generation, shape: Shape) -> dict[str, Any]:
    """Wait for all choices."""
    choices = [ChoiceText() for _ in range(generation.job.options.choices)]
    async with aclosing(generation.deltas()) as deltas:
        async for delta in deltas:
            choices[delta.choice].add(delta)
    return shape.whole(choices, usage(len(generation.job.prompt), generation.completion_tokens))


async def _stream(request: web.Request, generation: Generation, shape: Shape, stream_id: str) -> web.StreamResponse:
    """Send the choices as they come. An error before the first byte is raised, a later one becomes an event."""
    writer = EventWriter(
        request,
        {STREAM_ID_HEADER: stream_id, REQUEST_ID_HEADER: current_request().request_id, "X-Accel-Buffering": "no"},
    )
    try:
        async with aclosing(generation.deltas()) as deltas:
            async for delta in deltas:
                for chunk in shape.chunks(delta):
                    await writer.send(chunk)
        if generation.job.options.include_usage:
            await writer.send(shape.usage_chunk(usage(len(generation.job.prompt), generation.completion_tokens)))
    except ConnectionError:
        raise
    except Exception as failure:
        if not writer.sent:
            raise
        error = failure if isinstance(failure, ApiError) else report_bug()
        current_request().log.update(outcome=error.outcome, error=error.message)
        await writer.send(error.body())
        writer.response.force_close()
    await writer.done()
    return writer.response
