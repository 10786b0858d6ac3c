"""One request on a pipeline: its choices run side by side and come out as pieces of text in order of arrival."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass, replace

from fleet.gateway.backend import Admitted
from fleet.gateway.errors import ApiError, internal, overloaded, timed_out, unavailable
from fleet.gateway.metrics import GatewayMetrics
from fleet.gateway.requests import GenerationOptions
from fleet.gateway.text import Piece, TextStream
from stage_runtime.link.messages import FinishedEvent, GenerateRequest, TokenEvent


@dataclass(frozen=True)
class ShownToken:
    """A token whose log-probability may be shown.

    Attributes:
        event: as the pipeline reported it.
        start: characters of the choice's text before it.
    """

    event: TokenEvent
    start: int


@dataclass(frozen=True)
class Delta:
    """News of one choice. `finish_reason` is set once, in its last delta."""

    choice: int
    text: str
    tokens: tuple[ShownToken, ...]
    finish_reason: str | None = None


@dataclass(frozen=True)
class Job:
    """What to generate.

    Attributes:
        request_id: the client's, for logs on every stage.
        sequence_ids: one a choice.
        prompt: token ids.
        max_tokens: a choice; prompt and answer fit the context.
        options: sampling with the seed in place, stop strings, number of choices.
    """

    request_id: str
    sequence_ids: tuple[int, ...]
    prompt: tuple[int, ...]
    max_tokens: int
    options: GenerationOptions


@dataclass(frozen=True)
class Deadlines:
    """Seconds from the request's arrival; the first token may have to wait for a place."""

    request_seconds: float
    first_token_seconds: float


class Generation:
    """Runs a job. Each choice gives its place back when it ends; who admitted the request does so for the others.

    Attributes:
        completion_tokens: generated so far, all choices together.
        first_token_after_seconds: None before the first token of any choice.
    """

    def __init__(self, job: Job, admitted: Admitted, deadlines: Deadlines, metrics: GatewayMetrics) -> None:
        self.job = job
        self.backend = admitted.backend
        self.completion_tokens = 0
        self.first_token_after_seconds: float | None = None
        self._tickets = admitted.tickets
        self._deadlines = deadlines
        self._metrics = metrics
        self._started = time.monotonic()
        # holds at most what max_tokens allows, so a client that reads slowly does not hold up the ring
        self._news: asyncio.Queue[Delta | Exception] = asyncio.Queue()
        self._first_token_timer: asyncio.TimerHandle | None = None

    async def deltas(self) -> AsyncGenerator[Delta, None]:
        """Yield the news of all choices; closing this early cancels them on all stages.

        Raises:
            ApiError: a choice failed or a time-out passed; the other choices are cancelled.
        """
        loop = asyncio.get_running_loop()
        tasks = [loop.create_task(self._run_choice(choice)) for choice in range(len(self._tickets))]
        first, whole = self._deadlines.first_token_seconds, self._deadlines.request_seconds
        self._first_token_timer = loop.call_later(
            first, self._news.put_nowait, timed_out(f"no token came within {first:g} s")
        )
        request_timer = loop.call_later(
            whole, self._news.put_nowait, timed_out(f"the answer was not finished within {whole:g} s")
        )
        unfinished = len(tasks)
        try:
            while unfinished:
                news = await self._news.get()
                if isinstance(news, Exception):
                    raise news
                unfinished -= news.finish_reason is not None
                yield news
        finally:
            self._first_token_timer.cancel()
            request_timer.cancel()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)  # their errors went through the queue

    async def _run_choice(self, choice: int) -> None:
        try:
            await self._tickets[choice].wait()
            await self._generate(choice)
        except Exception as error:  # goes to whoever reads the deltas
            self._news.put_nowait(error)
        finally:
            self._tickets[choice].release()

    async def _generate(self, choice: int) -> None:
        """Feed one sequence's events into the text stream until it ends or a stop string cuts it."""
        text = TextStream(self.backend.vocabulary, self.job.options.stop)
        tokens: list[TokenEvent] = []
        shown = 0
        clock = time.monotonic

        def news(piece: Piece, finish_reason: str | None) -> None:
            nonlocal shown
            fresh = tuple(ShownToken(tokens[n], text.starts[n]) for n in range(shown, piece.tokens))
            shown = piece.tokens
            if piece.text or fresh or finish_reason:
                self._news.put_nowait(Delta(choice, piece.text, fresh, finish_reason))

        last = self._started
        events = self.backend.pipeline.generate(self._request(choice))
        try:
            async for event in events:
                if isinstance(event, FinishedEvent):
                    news(text.flush(), self._finish_reason(event, text))
                    return
                if event.index != len(tokens):
                    raise internal(f"the pipeline sent token {event.index}, expected {len(tokens)}")
                last = self._count_token(bool(tokens), last, clock())
                tokens.append(event)
                piece = text.push(event.token_id)
                news(piece, "stop" if text.stopped else None)
                if text.stopped:
                    return
        finally:
            if isinstance(events, AsyncGenerator):  # closing cancels the sequence on all stages
                await events.aclose()
        raise internal("the pipeline's events ended without a last one")

    def _count_token(self, follows: bool, last: float, now: float) -> float:
        """Book a token that came at `now`; returns `now`, seconds on the monotonic clock."""
        self.completion_tokens += 1
        self._metrics.completion_tokens.inc()
        if follows:
            self._metrics.between_token_seconds.observe(now - last)
            return now
        self._metrics.first_token_seconds.observe(now - last)
        if self.first_token_after_seconds is None:
            self.first_token_after_seconds = now - last
        if self._first_token_timer is not None:
            self._first_token_timer.cancel()
        return now

    def _request(self, choice: int) -> GenerateRequest:
        return GenerateRequest(
            sequence_id=self.job.sequence_ids[choice],
            request_id=self.job.request_id,
            prompt=self.job.prompt,
            max_tokens=self.job.max_tokens,
            stop_token_ids=self.backend.vocabulary.stop_token_ids,
            sampling=replace(self.job.options.sampling, choice=choice),
        )

    @staticmethod
    def _finish_reason(event: FinishedEvent, text: TextStream) -> str:
        """The API's finish reason.

        Raises:
            ApiError: the sequence did not end by itself.
        """
        if event.reason == "stop" or (event.reason == "length" and text.stopped):
            return "stop"
        if event.reason == "length":
            return "length"
        raise _failure(event)


def _failure(event: FinishedEvent) -> ApiError:
    """The answer for a sequence that failed."""
    if event.reason == "overloaded":
        return overloaded(event.message)
    if event.reason == "invalid":
        return ApiError(400, event.message, code="invalid_value")
    if event.reason == "error":
        return internal(event.message)
    return unavailable(event.message or "the answer was cancelled by the site")
