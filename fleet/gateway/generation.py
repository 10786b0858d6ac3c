"""The author of an answer: runs its choices side by side on a pipeline and writes down what happens, in order."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from fleet.gateway.admission import Ticket
from fleet.gateway.answer import Answer
from fleet.gateway.backend import Backend
from fleet.gateway.entries import End, Entry, Failed, Token
from fleet.gateway.errors import ApiError, internal, overloaded, timed_out, unavailable
from fleet.gateway.fold import AnswerFold
from fleet.gateway.healing import given_up
from fleet.gateway.log import logger
from fleet.gateway.metrics import GatewayMetrics
from fleet.gateway.replay import make_fold
from stage_runtime.link.messages import FinishedEvent, GenerateRequest

LOOK_AGAIN_SECONDS = 1.0
"""A deadline that moves as time passes is looked at so often; it may be noticed so much late."""


@dataclass(frozen=True)
class Deadlines:
    """Seconds from the request's arrival.

    Attributes:
        request_seconds: the whole answer.
        first_token_seconds: the first token, which may have to wait for a place; time without a plan that serves does
            not count.
        replan_wait_seconds: that time, before the first token, all of it together.
    """

    request_seconds: float
    first_token_seconds: float
    replan_wait_seconds: float


class Keeper(Protocol):
    """Where entries go before readers may see them."""

    def keep(self, answer: Answer) -> None:
        """The answer has new entries: publish them now, or when they are in the journal."""


class Generation:
    """Makes an answer, from the start or, after a restart of the gateway, from the entries that it has.

    Each choice gives its place back when it ends.

    Args:
        answer: to be written.
        backend: whose pipeline computes it.
        tickets: places, one for each choice.
        deadlines: of the whole answer.
        keeper: told of every entry.
        metrics: tokens and times are booked here.

    Attributes:
        first_token_after_seconds: None before the first token of any choice.
    """

    def __init__(
        self,
        *,
        answer: Answer,
        backend: Backend,
        tickets: Sequence[Ticket],
        deadlines: Deadlines,
        keeper: Keeper,
        metrics: GatewayMetrics,
    ) -> None:
        self.answer = answer
        self.first_token_after_seconds: float | None = None
        self._backend = backend
        self._tickets = tickets
        self._deadlines = deadlines
        self._keeper = keeper
        self._metrics = metrics
        self._started = time.monotonic()
        self._waited_before = backend.pipeline.waited_seconds  # for a plan, before this answer came
        # what the choices have so far; its text is needed only to find stop strings
        self._fold: AnswerFold = make_fold(answer.record, backend.vocabulary)
        for entry in answer.entries:
            self._fold.push(entry)

    @property
    def completion_tokens(self) -> int:
        """Generated so far, all choices together."""
        return self._fold.completion_tokens

    async def run(self) -> None:
        """Write the answer to its end; cancelling this cancels all choices on all stages and leaves it unfinished."""
        unfinished = self._unfinished()
        for choice in range(len(self._tickets)):
            if choice not in unfinished:
                self._tickets[choice].release()
        tasks = [asyncio.ensure_future(self._run_choice(choice)) for choice in unfinished]
        try:
            failure = await self._first_failure(tasks)
            if failure is not None:
                self._add(Failed.of(failure))
        finally:
            for task in tasks:
                task.cancel()
            # a second failure adds nothing to what the client is told
            await asyncio.gather(*tasks, return_exceptions=True)
            for ticket in self._tickets:
                ticket.release()
            self.answer.close()

    def _unfinished(self) -> list[int]:
        if self._fold.failed is not None:
            return []
        return [choice for choice in range(self.answer.record.options.choices) if not self._fold.finished(choice)]

    async def _first_failure(self, tasks: Sequence[asyncio.Task[None]]) -> ApiError | None:
        """Wait for all choices, or for the first that fails, or for a deadline."""
        waiting = set(tasks)
        while waiting:
            patience, failure = self._patience()
            if patience <= 0:
                return failure
            done, waiting = await asyncio.wait(waiting, timeout=patience, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                error = task.exception()
                if error is not None:
                    return self._as_api_error(error)
        return None

    def _patience(self) -> tuple[float, ApiError]:
        """Seconds until the next deadline at the earliest, and what the client is told if it passes.

        The deadline of the first token moves while no plan serves; then it is looked at again after a while.
        """
        limits, pipeline = self._deadlines, self._backend.pipeline
        running = time.monotonic() - self._started
        left = limits.request_seconds - running
        if self._fold.completion_tokens:
            return left, timed_out(f"the answer was not finished within {limits.request_seconds:g} s")
        without_plan = pipeline.waited_seconds - self._waited_before
        first_token = limits.first_token_seconds - (running - without_plan)
        if not pipeline.status.ready:
            first_token = max(first_token, LOOK_AGAIN_SECONDS)
        reason = pipeline.status.reason
        why = f" ({reason})" if reason else ""
        return min(
            (left, timed_out(f"the answer was not finished within {limits.request_seconds:g} s{why}")),
            (
                limits.replan_wait_seconds - without_plan,
                unavailable(
                    given_up(limits.replan_wait_seconds, reason),
                    retry_after_seconds=pipeline.situation.retry_after_seconds,
                ),
            ),
            (
                first_token,
                timed_out(f"no token came within {limits.first_token_seconds:g} s{why}"),
            ),
            key=lambda deadline: deadline[0],
        )

    def _as_api_error(self, error: BaseException) -> ApiError:
        if isinstance(error, ApiError):
            return error
        request_id = self.answer.record.request_id
        logger.error("bug", exc_info=error, extra={"fields": {"request_id": request_id}})
        return internal("a bug of the gateway; its log has the traceback")

    async def _run_choice(self, choice: int) -> None:
        try:
            await self._tickets[choice].wait()
            await self._generate(choice)
        finally:
            self._tickets[choice].release()

    async def _generate(self, choice: int) -> None:
        """Write one sequence's events down until it ends or a stop string cuts it."""
        last = self._started
        request = self._request(choice)
        expected = len(request.generated)
        events = self._backend.pipeline.generate(request)
        try:
            async for event in events:
                if isinstance(event, FinishedEvent):
                    if event.reason not in ("stop", "length"):
                        raise self._failure(event)
                    self._add(End(choice, "stop" if event.reason == "stop" else "length"))
                    return
                if event.index != expected:
                    raise internal(f"the pipeline sent token {event.index}, expected {expected}")
                last = self._count_token(expected > 0, last, time.monotonic())
                expected += 1
                self._add(Token(choice, event))
                if self._fold.finished(choice):
                    return
        finally:
            if isinstance(events, AsyncGenerator):  # closing cancels the sequence on all stages
                await events.aclose()
        raise internal("the pipeline's events ended without a last one")

    def _add(self, entry: Entry) -> None:
        self._fold.push(entry)
        self.answer.entries.append(entry)
        self._keeper.keep(self.answer)

    def _count_token(self, follows: bool, last: float, now: float) -> float:
        """Book a token that came at `now`; returns `now`, seconds on the monotonic clock."""
        self._metrics.completion_tokens.inc()
        if follows:
            self._metrics.between_token_seconds.observe(now - last)
            return now
        self._metrics.first_token_seconds.observe(now - last)
        if self.first_token_after_seconds is None:
            self.first_token_after_seconds = now - last
        return now

    def _request(self, choice: int) -> GenerateRequest:
        record = self.answer.record
        return GenerateRequest(
            sequence_id=record.sequence_ids[choice],
            request_id=record.request_id,
            prompt=record.prompt,
            max_tokens=record.max_tokens,
            stop_token_ids=self._backend.vocabulary.stop_token_ids,
            sampling=replace(record.options.sampling, choice=choice),
            generated=self._fold.generated(choice),
        )

    def _failure(self, event: FinishedEvent) -> ApiError:
        """The error for a sequence that did not end by itself."""
        if event.reason == "overloaded":
            return overloaded(event.message)
        if event.reason == "invalid":
            return ApiError(400, event.message, code="invalid_value")
        if event.reason == "error":
            return internal(event.message)
        return unavailable(
            event.message or "the answer was cancelled by the site",
            retry_after_seconds=self._backend.pipeline.situation.retry_after_seconds,
        )
