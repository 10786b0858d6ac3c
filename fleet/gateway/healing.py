"""A pipeline over changing plans: sequences that a plan's end interrupts go on under the next one, without a gap."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Protocol

from fleet.gateway.epochs import EpochLink, EpochLinks
from fleet.gateway.news import News
from fleet.gateway.situation import Situation, situation_of
from fleet.gateway.waiting import WaitingClock
from stage_runtime.link.backoff import Backoff
from stage_runtime.link.membership import Route
from stage_runtime.link.messages import FinishedEvent, GenerateRequest, Pipeline, PipelineStatus, TokenEvent
from stage_runtime.link.tasks import within


@dataclass(frozen=True)
class HealingTiming:
    """Seconds.

    Attributes:
        replan_wait: without a token for so long because no plan serves, a sequence is given up.
        first_retry, longest_retry: waits between submissions that bring no token; doubling.
    """

    replan_wait: float
    first_retry: float = 0.05
    longest_retry: float = 2.0


class Observer(Protocol):
    """Who counts what happens to sequences."""

    def interrupted(self, pipeline: str) -> None:
        """A sequence ended because its ring, plan or link did."""

    def resubmitted(self, pipeline: str) -> None:
        """A sequence was submitted again."""

    def paused(self, pipeline: str, seconds: float) -> None:
        """Time between two tokens of a sequence across a resubmission."""


class HealingPipeline:
    """Implements `messages.Pipeline` for one pipeline whose plan changes.

    Args:
        name: of the pipeline.
        policy: numeric policy, for the status while nothing is connected.
        connect: makes the link for a route's epoch; its second argument is to be called whenever its status changes.
        timing: patience and back-off.
        observer: counts.

    Attributes:
        situation: what the last route said.
        news: tells of changes of route and link.
    """

    def __init__(
        self,
        name: str,
        policy: str,
        connect: Callable[[Route, Callable[[], None]], Pipeline],
        timing: HealingTiming,
        observer: Observer,
    ) -> None:
        self.name = name
        self.situation = Situation()
        self.news = News()
        self._policy = policy
        self._links = EpochLinks(lambda route: connect(route, self._changed), self._changed)
        self._timing = timing
        self._observer = observer
        self._waiting = WaitingClock(time.monotonic())

    @property
    def status(self) -> PipelineStatus:
        """Ready if the last route serves and its first stage says that it does."""
        link = self._links.serving
        if link is None:
            return PipelineStatus(reason=self.situation.reason, epoch=self.situation.epoch, policy=self._policy)
        return link.pipeline.status

    @property
    def drained_epoch(self) -> int:
        """The newest epoch under which, and under all older ones, no sequence of this gateway is open any more."""
        return self._links.drained_epoch

    def apply(self, route: Route) -> None:
        """Follow a route; sequences that it interrupts begin to move at once."""
        self.situation = situation_of(route)
        self._links.follow(route)
        self._changed()

    @property
    def waited_seconds(self) -> float:
        """How long it has taken no sequences, all times together."""
        return self._waiting.seconds(time.monotonic())

    def _changed(self) -> None:
        self._waiting.note(self.status.ready, time.monotonic())
        self.news.tell()

    async def run(self) -> None:
        """Keep the links of the epochs; runs until cancelled, or raises the bug that ended a link's task."""
        await self._links.run()

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[TokenEvent | FinishedEvent, None]:
        """Submit a sequence and yield its events over all epochs: indexes go on, exactly one FinishedEvent, last.

        Closing the iterator early cancels the sequence on the stages that compute it.
        """
        sequence = _Sequence(request, self._timing)
        while True:
            if sequence.complete:
                yield sequence.finished("length")
                return
            link = await self._serving_link(sequence)
            if link is None:
                why = self.status.reason or sequence.last_end
                yield sequence.finished("unavailable", given_up(self._timing.replan_wait, why))
                return
            if sequence.submissions:
                self._observer.resubmitted(self.name)
            sequence.submissions += 1
            end = FinishedEvent("error", "the first stage's events ended without a last one", len(request.prompt))
            events = link.generate(sequence.request())
            try:
                async for event in events:
                    if isinstance(event, FinishedEvent):
                        end = event
                        break
                    if event.index < len(sequence.tokens):  # told twice
                        continue
                    self._book(sequence, event)
                    yield event
            finally:
                await events.aclose()
            if not sequence.goes_on_after(end):
                yield replace(end, completion_tokens=len(sequence.tokens))
                return
            self._observer.interrupted(self.name)

    def _book(self, sequence: _Sequence, event: TokenEvent) -> None:
        now = time.monotonic()
        if sequence.interrupted_after is not None:
            self._observer.paused(self.name, now - sequence.interrupted_after)
        sequence.came(event, now)

    async def _serving_link(self, sequence: _Sequence) -> EpochLink | None:
        """Wait for a first stage that takes sequences, with back-off after futile submissions; None: given up."""
        started = time.monotonic()
        wake = asyncio.Event()
        try:
            await asyncio.sleep(sequence.pause_seconds())
            if sequence.patience_seconds <= 0:  # used up by submissions that brought nothing
                return None
            with self.news.watched(wake):
                while True:
                    wake.clear()
                    link = self._links.serving
                    if link is not None and link.pipeline.status.ready:
                        return link
                    patience = started + sequence.patience_seconds - time.monotonic()
                    if patience <= 0:
                        return None
                    with suppress(asyncio.TimeoutError):  # one more look: what came at the last moment counts
                        await within(patience, wake.wait())
        finally:
            sequence.patience_seconds -= time.monotonic() - started


def given_up(seconds: float, reason: str) -> str:
    """What a client is told whose answer waited in vain for a plan that serves."""
    return f"given up after {seconds:g} s: {reason}"


class _Sequence:
    """What is known of a sequence between submissions.

    Attributes:
        tokens: of the answer so far.
        submissions: made so far.
        interrupted_after: when the last token before an interruption came, monotonic; None while tokens flow, and
            before the first token.
        last_end: what the last submission's end said.
        patience_seconds: how long it may still wait for a plan, all waits together, unless a token comes.
    """

    def __init__(self, request: GenerateRequest, timing: HealingTiming) -> None:
        self.tokens = list(request.generated)
        self.submissions = 0
        self.interrupted_after: float | None = None
        self.patience_seconds = timing.replan_wait
        self.last_end = ""
        self._request = request
        self._timing = timing
        self._backoff = Backoff(timing.first_retry, timing.longest_retry)
        self._last_token: float | None = None
        self._futile = False  # the last submission brought no token
        self._progress = False  # this one brought one

    @property
    def complete(self) -> bool:
        """All tokens are here, only the word that they are has been lost."""
        return len(self.tokens) >= self._request.max_tokens

    def request(self) -> GenerateRequest:
        """What to submit now."""
        self._progress = False
        return replace(self._request, generated=tuple(self.tokens))

    def came(self, event: TokenEvent, now: float) -> None:
        """A token came at `now`, monotonic."""
        if event.index == len(self.tokens):  # a gap is for the consumer to judge
            self.tokens.append(event.token_id)
        self._last_token = now
        self._progress = True
        self.interrupted_after = None
        self.patience_seconds = self._timing.replan_wait
        self._backoff.reset()

    def goes_on_after(self, end: FinishedEvent) -> bool:
        """Whether the sequence is to be submitted again.

        One that was taken once is not given up because there is no room under the new plan, or because the first
        stage has not noticed yet that the link it came by before is gone: its client has been promised the rest.
        """
        taken_before = self.submissions > 1 or bool(self.tokens)
        if end.reason != "unavailable" and not (taken_before and end.reason in ("overloaded", "invalid")):
            return False
        self.last_end = end.message
        self._futile = not self._progress and self.submissions > 1
        if self._last_token is not None:
            self.interrupted_after = self._last_token
        return True

    def pause_seconds(self) -> float:
        """How long to hold back before the next submission: not at all after one that brought tokens."""
        return self._backoff.next_seconds() if self._futile else 0.0

    def finished(self, reason: str, message: str = "") -> FinishedEvent:
        """The end of a sequence that the pipeline did not end itself."""
        return FinishedEvent(reason, message, len(self._request.prompt), len(self.tokens))  # type: ignore[arg-type]
