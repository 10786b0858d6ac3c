"""From a parsed request to its answer: admit, have it made, and tell it to the client."""

from __future__ import annotations

import asyncio
import re
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from aiohttp import web

from fleet.gateway.answer import Answer
from fleet.gateway.backend import Admitted, Backend, admit
from fleet.gateway.config import GatewayConfig
from fleet.gateway.errors import ApiError, invalid
from fleet.gateway.events import EventWriter
from fleet.gateway.generation import Deadlines, Generation, Keeper
from fleet.gateway.metrics import GatewayMetrics
from fleet.gateway.middleware import REQUEST_ID_HEADER, current_request, report_bug
from fleet.gateway.reader import EventReader, read_whole
from fleet.gateway.record import AdmissionRecord
from fleet.gateway.replay import DONE, SHAPES, EventFold, WholeFold
from fleet.gateway.requests import GenerationOptions
from fleet.gateway.streams import StreamRegistry

STREAM_ID_HEADER = "Fleet-Stream-Id"
RESUME_HEADER = "Fleet-Resume-Seconds"
LAST_EVENT_HEADER = "Last-Event-ID"
_NUMBER = re.compile(r"[0-9]{1,15}", re.ASCII)


@dataclass(frozen=True)
class AtOnce:
    """The keeper of answers that nobody can ask for again: readers see entries as they come."""

    def keep(self, answer: Answer) -> None:
        """Publish what is there."""
        answer.publish(len(answer.entries))


@dataclass(frozen=True)
class Answering:
    """Makes answers and tells them.

    Attributes:
        config: deadlines and limits.
        backends: the pipelines.
        metrics: counts.
        registry: of streams that can be resumed.
    """

    config: GatewayConfig
    backends: Sequence[Backend]
    metrics: GatewayMetrics
    registry: StreamRegistry

    async def answer(
        self,
        request: web.Request,
        endpoint: Literal["chat", "completions"],
        backends: Sequence[Backend],
        prompt: tuple[int, ...],
        options: GenerationOptions,
    ) -> web.StreamResponse:
        """Admit a request and answer it."""
        resume_seconds = self._resume_seconds(request)
        admitted = admit(backends, len(prompt), options.choices)
        record = _record(endpoint, admitted.backend, prompt, options)
        answer = Answer(record)
        self.metrics.prompt_tokens.inc(len(prompt))
        current_request().log.update(
            stream_id=record.stream_id,
            model=options.model,
            pipeline=record.pipeline,
            prompt_tokens=len(prompt),
            resumable=resume_seconds is not None,
        )
        if resume_seconds is None:
            return await self._owned(request, answer, admitted)
        return await self._kept(request, answer, admitted, resume_seconds)

    async def resume(self, request: web.Request) -> web.StreamResponse:
        """GET /v1/streams/<id>: the rest of a stream."""
        sent = request.headers.get(LAST_EVENT_HEADER, "0")
        if not _NUMBER.fullmatch(sent):
            raise invalid(LAST_EVENT_HEADER, f"expected the id of an event, an integer from 0, got {sent[:40]!r}")
        reading = await self.registry.open(request.match_info["stream"], str(current_request().log["client"]))
        try:
            record = reading.answer.record
            current_request().log.update(stream_id=record.stream_id, pipeline=record.pipeline, after=int(sent))
            return await self._tell(request, reading.answer, headers_first=True, after=int(sent))
        finally:
            reading.close()

    def restart(self, answer: Answer, keeper: Keeper) -> Generation | None:
        """The author of an answer that a restart of the gateway interrupted; None: its model is not here any more."""
        record = answer.record
        backend = self._backend_of(record)
        if backend is None or backend.config.model_digest != record.model_digest:
            return None
        tickets = backend.queue.enter_again(record.options.choices)
        return self._generation(answer, Admitted(backend, tickets), keeper)

    async def _owned(self, request: web.Request, answer: Answer, admitted: Admitted) -> web.StreamResponse:
        """An answer that ends with its client."""
        generation = self._generation(answer, admitted, AtOnce())
        author = asyncio.ensure_future(generation.run())
        try:
            return await self._respond(request, answer, headers={})
        finally:
            author.cancel()
            await asyncio.gather(author, return_exceptions=True)
            _log_generation(generation)

    async def _kept(
        self, request: web.Request, answer: Answer, admitted: Admitted, resume_seconds: float
    ) -> web.StreamResponse:
        """An answer that goes on without its client."""
        try:
            generation = await self.registry.admit(
                answer, resume_seconds, lambda answer, keeper: self._generation(answer, admitted, keeper)
            )
        except BaseException:
            for ticket in admitted.tickets:
                ticket.release()
            raise
        try:
            return await self._respond(request, answer, headers={RESUME_HEADER: f"{resume_seconds:g}"})
        finally:
            _log_generation(generation)

    def _generation(self, answer: Answer, admitted: Admitted, keeper: Keeper) -> Generation:
        deadlines = Deadlines(
            request_seconds=self.config.request_timeout_seconds,
            first_token_seconds=self.config.first_token_timeout_seconds,
            replan_wait_seconds=self.config.replan_wait_seconds,
        )
        return Generation(
            answer=answer,
            backend=admitted.backend,
            tickets=admitted.tickets,
            deadlines=deadlines,
            keeper=keeper,
            metrics=self.metrics,
        )

    async def _respond(self, request: web.Request, answer: Answer, headers: dict[str, str]) -> web.StreamResponse:
        if answer.record.options.stream:
            # who may resume has to know the id, whatever happens before the first token
            return await self._tell(request, answer, headers_first=bool(headers), headers=headers)
        backend = self._backend(answer.record)
        body = await read_whole(answer, WholeFold(answer.record, backend.vocabulary))
        return web.json_response(body, headers={STREAM_ID_HEADER: answer.record.stream_id, **headers})

    async def _tell(
        self,
        request: web.Request,
        answer: Answer,
        *,
        headers_first: bool,
        after: int = 0,
        headers: dict[str, str] | None = None,
    ) -> web.StreamResponse:
        """Send an answer as events. An error before the first byte is raised, a later one becomes an event."""
        context, record = current_request(), answer.record
        backend = self._backend(record)
        own = {
            STREAM_ID_HEADER: record.stream_id,
            REQUEST_ID_HEADER: context.request_id,
            "X-Accel-Buffering": "no",
            **(headers or {}),
        }
        writer = EventWriter(request, own)
        fold = EventFold(record, backend.vocabulary)
        reader = EventReader(
            answer,
            fold,
            backend.pipeline,
            writer,
            keep_alive_seconds=self.config.keep_alive_seconds,
            after=after,
        )
        if headers_first:
            await writer.prepare()
        try:
            failed = await reader.run()
            error = None if failed is None else failed.error()
        except ConnectionError:
            raise
        except Exception as failure:
            if not writer.prepared:
                raise
            error = failure if isinstance(failure, ApiError) else report_bug()
            await writer.send(reader.number + 1, error.body())
            await writer.send(reader.number + 2, DONE)
        if error is not None:
            context.log.update(outcome=error.outcome, error=error.message)
            writer.response.force_close()
        await writer.end()
        return writer.response

    def _backend(self, record: AdmissionRecord) -> Backend:
        backend = self._backend_of(record)
        if backend is None:
            raise ApiError(410, "the pipeline of this stream is not here any more", code="stream_expired")
        return backend

    def _backend_of(self, record: AdmissionRecord) -> Backend | None:
        return next((each for each in self.backends if each.config.name == record.pipeline), None)

    def _resume_seconds(self, request: web.Request) -> float | None:
        """What `Fleet-Resume-Seconds` asks for, capped; None without it."""
        sent = request.headers.get(RESUME_HEADER)
        if sent is None:
            return None
        if not _NUMBER.fullmatch(sent) or int(sent) < 1:
            raise invalid(RESUME_HEADER, f"expected whole seconds from 1, got {sent[:40]!r}")
        return min(float(sent), self.config.resume_max_seconds)


def _record(
    endpoint: Literal["chat", "completions"],
    backend: Backend,
    prompt: tuple[int, ...],
    options: GenerationOptions,
) -> AdmissionRecord:
    """Draw what the client left open, ids and seed, and write everything down."""
    context = current_request()
    room = backend.context_tokens - len(prompt)
    seed = options.sampling.seed if options.seeded else secrets.randbits(64)
    return AdmissionRecord(
        stream_id=SHAPES[endpoint].prefix + secrets.token_hex(16),
        endpoint=endpoint,
        created=int(time.time()),
        fingerprint=f"fleet-{backend.config.model_digest[:16]}-{backend.config.policy}",
        pipeline=backend.config.name,
        model_digest=backend.config.model_digest,
        key_name=str(context.log["client"]),
        request_id=context.request_id,
        sequence_ids=tuple(secrets.randbits(64) for _ in range(options.choices)),
        prompt=prompt,
        max_tokens=room if options.max_tokens is None else min(options.max_tokens, room),
        options=replace(options, sampling=replace(options.sampling, seed=seed)),
    )


def _log_generation(generation: Generation) -> None:
    current_request().log.update(
        completion_tokens=generation.completion_tokens, first_token_seconds=generation.first_token_after_seconds
    )
