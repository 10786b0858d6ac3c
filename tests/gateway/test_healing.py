"""A pipeline over changing plans: no gap, no repetition, one end, whatever breaks when."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fleet.gateway.epochs import EpochLink
from fleet.gateway.healing import HealingPipeline, HealingTiming
from stage_runtime.link.membership import Route
from stage_runtime.link.messages import (
    FinishedEvent,
    GenerateRequest,
    Pipeline,
    PipelineStatus,
    SamplingParameters,
    TokenEvent,
)
from tests.gateway.site import breaking, route

IDS = list(range(40, 52))
READY = PipelineStatus(ready=True, reason="", policy="exact")
Event = TokenEvent | FinishedEvent


@dataclass
class Counts:
    """What the pipeline's observer was told."""

    interruptions: int = 0
    resubmissions: int = 0
    pauses: list[float] = field(default_factory=list)

    def interrupted(self, pipeline: str) -> None:
        self.interruptions += 1

    def resubmitted(self, pipeline: str) -> None:
        self.resubmissions += 1

    def paused(self, pipeline: str, seconds: float) -> None:
        self.pauses.append(seconds)


@dataclass
class Stage:
    """A first stage of one epoch: gives tokens out one by one as the test lets it.

    Attributes:
        epoch: that it serves.
        changed: tells the pipeline of a new status.
        status: what the pipeline sees.
        requests: that came.
        cancelled: sequence ids whose events were not read to the end.
        stopped: its link's task was cancelled.
    """

    epoch: int
    changed: Callable[[], None]
    status: PipelineStatus = READY
    requests: list[GenerateRequest] = field(default_factory=list)
    cancelled: list[int] = field(default_factory=list)
    stopped: bool = False
    _queues: list[asyncio.Queue[Event]] = field(default_factory=list)

    async def run(self) -> None:
        """Until cancelled; then every sequence ends, as `PipelineClient` does it."""
        try:
            await asyncio.Event().wait()
        finally:
            self.stopped = True
            self.say(FinishedEvent("unavailable", "the link is closed"))

    def say(self, event: Event) -> None:
        """To every open sequence."""
        for queue in self._queues:
            queue.put_nowait(event)

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Event, None]:
        """What the test says."""
        self.requests.append(request)
        queue: asyncio.Queue[Event] = asyncio.Queue()
        self._queues.append(queue)
        event: Event | None = None
        try:
            while not isinstance(event, FinishedEvent):
                event = await queue.get()
                yield event
        finally:
            self._queues.remove(queue)
            if not isinstance(event, FinishedEvent):
                self.cancelled.append(request.sequence_id)


class DialledStage(Stage):
    """Ready once its link runs, as a real one."""

    async def run(self) -> None:
        self.status = READY
        self.changed()
        await super().run()


@dataclass
class Site:
    """A pipeline and the first stages that it connected to."""

    stages: list[Stage] = field(default_factory=list)
    dialled: bool = False
    counts: Counts = field(default_factory=Counts)

    def make(self, replan_wait: float = 5.0) -> HealingPipeline:
        def connect(route: Route, changed: Callable[[], None]) -> Pipeline:
            made = DialledStage(route.epoch, changed, PipelineStatus()) if self.dialled else Stage(route.epoch, changed)
            self.stages.append(made)
            return self.stages[-1]

        timing = HealingTiming(replan_wait, first_retry=0.001, longest_retry=0.004)
        return HealingPipeline("main", "exact", connect, timing, self.counts)


@asynccontextmanager
async def running(pipeline: HealingPipeline) -> AsyncIterator[HealingPipeline]:
    task = asyncio.ensure_future(pipeline.run())
    try:
        yield pipeline
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def request(max_tokens: int = 100, generated: tuple[int, ...] = (), **sampling: Any) -> GenerateRequest:
    return GenerateRequest(7, "r", (1, 2), max_tokens, (0,), SamplingParameters(**sampling), generated)


async def collect(pipeline: HealingPipeline, wanted: GenerateRequest) -> list[Event]:
    return [event async for event in pipeline.generate(wanted)]


async def until(condition: Callable[[], object]) -> None:
    while not condition():  # noqa: ASYNC110 - what is waited for has no event
        await asyncio.sleep(0.001)


@dataclass
class Scripted:
    """Plays a script, at once."""

    script: Callable[[GenerateRequest], Any]
    requests: list[GenerateRequest] = field(default_factory=list)
    status: PipelineStatus = READY

    async def run(self) -> None:
        await asyncio.Event().wait()

    async def generate(self, wanted: GenerateRequest) -> AsyncGenerator[Event, None]:
        self.requests.append(wanted)
        for event in self.script(wanted):
            yield event


@settings(deadline=None, max_examples=60)
@given(
    breaks=st.lists(st.integers(0, len(IDS)), max_size=5),
    max_tokens=st.integers(1, len(IDS) + 2),
    reason=st.sampled_from(["unavailable", "overloaded", "invalid"]),
)
def test_any_breaks_leave_no_trace(breaks: list[int], max_tokens: int, reason: str) -> None:
    """The same events as from a pipeline that never breaks, with every parameter handed on."""
    if reason != "unavailable":
        breaks = [place for place in breaks if place > 0]  # a new sequence is told so
    counts = Counts()
    scripted = Scripted(breaking(lambda _: IDS, breaks, reason))
    timing = HealingTiming(5.0, first_retry=0.0001, longest_retry=0.0002)
    pipeline = HealingPipeline("main", "exact", lambda *_: scripted, timing, counts)
    pipeline.apply(route())
    wanted = request(max_tokens, seed=3, temperature=0.7, frequency_penalty=0.5, logprobs=2)
    events = asyncio.run(collect(pipeline, wanted))
    plain = Scripted(breaking(lambda _: IDS, []))
    undisturbed = HealingPipeline("main", "exact", lambda *_: plain, timing, Counts())
    undisturbed.apply(route())
    assert events == asyncio.run(collect(undisturbed, wanted))
    assert {(each.sequence_id, each.prompt, each.max_tokens, each.sampling) for each in scripted.requests} == {
        (wanted.sequence_id, wanted.prompt, wanted.max_tokens, wanted.sampling)
    }
    assert counts.interruptions - counts.resubmissions in {0, 1}  # the end alone need not be computed again
    assert len(counts.pauses) <= counts.resubmissions


async def test_what_comes_while_a_plan_is_made_waits_and_what_is_open_goes_on() -> None:
    site = Site()
    async with running(site.make()) as pipeline:
        early = asyncio.ensure_future(collect(pipeline, request()))
        pipeline.apply(route(3))
        await until(lambda: site.stages and site.stages[0].requests)
        site.stages[0].say(TokenEvent(0, 50))
        pipeline.apply(route(3, state="replanning", reason="box2 is dead"))
        assert not pipeline.status.ready
        assert "box2 is dead" in pipeline.status.reason
        site.stages[0].say(TokenEvent(1, 51))  # the ring lived a moment longer
        site.stages[0].say(FinishedEvent("unavailable", "the ring broke"))
        late = asyncio.ensure_future(collect(pipeline, request()))
        pipeline.apply(route(4))
        await until(lambda: len(site.stages) == 2 and len(site.stages[1].requests) == 2)
        assert sorted(each.generated for each in site.stages[1].requests) == [(), (50, 51)]
        site.stages[1].say(TokenEvent(2, 52))
        site.stages[1].say(FinishedEvent("stop"))
        assert [event.index for event in (await early)[:-1] if isinstance(event, TokenEvent)] == [0, 1, 2]
        assert (await late)[-1].reason == "stop"  # type: ignore[union-attr]
        await until(lambda: site.stages[0].stopped)
    assert site.counts.interruptions == site.counts.resubmissions == len(site.counts.pauses) == 1


async def test_an_unplanned_plan_moves_sequences_whose_old_first_stage_says_nothing() -> None:
    site = Site()
    async with running(site.make()) as pipeline:
        pipeline.apply(route(3))
        open_one = asyncio.ensure_future(collect(pipeline, request()))
        await until(lambda: site.stages and site.stages[0].requests)
        site.stages[0].say(TokenEvent(0, 50))
        pipeline.apply(route(5, first_stage="box2", port=7402))
        await until(lambda: len(site.stages) == 2 and site.stages[1].requests)
        assert site.stages[1].requests[0].generated == (50,)
        site.stages[0].say(TokenEvent(1, 99))  # from the grave
        site.stages[1].say(TokenEvent(1, 51))
        site.stages[1].say(FinishedEvent("length"))
        assert await open_one == [TokenEvent(0, 50), TokenEvent(1, 51), FinishedEvent("length", "", 0, 2)]
        await until(lambda: site.stages[0].stopped)


async def test_a_planned_switch_lets_open_sequences_finish_where_they_are() -> None:
    site = Site()
    async with running(site.make()) as pipeline:
        pipeline.apply(route(3))
        assert pipeline.drained_epoch == 2
        old = asyncio.ensure_future(collect(pipeline, request()))
        await until(lambda: site.stages and site.stages[0].requests)
        pipeline.apply(route(4, planned=True))
        new = asyncio.ensure_future(collect(pipeline, request()))
        await until(lambda: len(site.stages) == 2 and site.stages[1].requests)
        assert pipeline.drained_epoch == 2
        pipeline.apply(route(4, planned=True))  # said again, after the channel came back
        assert len(site.stages) == 2
        site.stages[0].say(TokenEvent(0, 50))
        site.stages[0].say(FinishedEvent("stop"))
        assert (await old)[0] == TokenEvent(0, 50)
        await until(lambda: site.stages[0].stopped)
        assert pipeline.drained_epoch == 3
        assert not site.stages[1].stopped
        site.stages[1].say(FinishedEvent("stop"))
        assert (await new)[-1] == FinishedEvent("stop")
    assert site.counts.interruptions == 0


async def test_a_consumer_that_is_cancelled_twice_is_not_counted_for_ever() -> None:
    """A handler that is cancelled while it cancels: the switch waits for DRAINED, which waits for this count."""

    class Congested(Stage):
        async def generate(self, request: GenerateRequest) -> AsyncGenerator[Event, None]:
            try:
                yield TokenEvent(0, 50)
                await asyncio.Event().wait()
            finally:
                self.stopped = True
                await asyncio.Event().wait()  # CANCEL goes down a link that takes nothing

    stage, emptied = Congested(3, lambda: None), asyncio.Event()
    link = EpochLink(route(3), stage, emptied.set)

    async def consume() -> None:
        async with aclosing(link.generate(request())) as events:
            async for _ in events:
                pass

    task = asyncio.ensure_future(consume())
    await until(lambda: link.open)
    task.cancel()
    await until(lambda: stage.stopped)
    assert link.open == 1
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert (link.open, emptied.is_set()) == (0, True)


async def test_a_plan_that_flaps_leaves_no_links_behind() -> None:
    """Hundreds of routes of all kinds under two open sequences: each goes on, and every link but the last is closed."""
    site = Site(dialled=True)
    async with running(site.make()) as pipeline:
        pipeline.apply(route(1))
        consumers = [asyncio.ensure_future(collect(pipeline, request())) for _ in range(2)]
        await until(lambda: site.stages and len(site.stages[0].requests) == 2)
        for epoch in range(2, 402):
            kind = epoch % 4
            state = "serving" if kind < 3 else ("replanning", "refused", "none")[epoch % 3]
            pipeline.apply(route(epoch, state=state, planned=kind == 1, first_stage=f"box{epoch % 3}"))
            for _ in range(epoch % 5):
                await asyncio.sleep(0)
        pipeline.apply(route(2000))
        last = site.stages[-1]
        await until(lambda: len(last.requests) == 2)
        await until(lambda: all(stage.stopped for stage in site.stages[:-1] if stage.status == READY))
        assert pipeline.drained_epoch == 1999
        last.say(TokenEvent(0, 50))
        last.say(FinishedEvent("stop"))
        for consumer in consumers:
            assert await consumer == [TokenEvent(0, 50), FinishedEvent("stop", "", 0, 1)]


async def test_what_a_planned_switch_cuts_off_moves_too() -> None:
    site = Site()
    async with running(site.make()) as pipeline:
        pipeline.apply(route(3))
        old = asyncio.ensure_future(collect(pipeline, request()))
        await until(lambda: site.stages and site.stages[0].requests)
        pipeline.apply(route(4, planned=True))
        site.stages[0].say(TokenEvent(0, 50))
        site.stages[0].say(FinishedEvent("unavailable", "retired"))
        await until(lambda: len(site.stages) == 2 and site.stages[1].requests)
        site.stages[1].say(FinishedEvent("stop"))
        assert await old == [TokenEvent(0, 50), FinishedEvent("stop", "", 0, 1)]


async def test_events_that_were_told_already_are_left_out() -> None:
    site = Site()
    async with running(site.make()) as pipeline:
        pipeline.apply(route())
        reading = asyncio.ensure_future(collect(pipeline, request(generated=(50, 51))))
        await until(lambda: site.stages and site.stages[0].requests)
        for index in (0, 1, 2, 2, 1, 3):
            site.stages[0].say(TokenEvent(index, 50 + index))
        site.stages[0].say(FinishedEvent("stop"))
        assert [event.index for event in (await reading)[:-1] if isinstance(event, TokenEvent)] == [2, 3]


async def test_an_answer_that_lacks_only_its_end_is_not_computed_again() -> None:
    site = Site()
    pipeline = site.make()
    pipeline.apply(route())
    assert await collect(pipeline, request(2, generated=(50, 51))) == [FinishedEvent("length", "", 2, 2)]
    assert site.stages[0].requests == []


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"state": "replanning", "reason": "box2 is dead"}, "box2 is dead"),
        ({"state": "refused", "missing_mebibytes": {"box1": "12"}}, "box1 lacks 12 MiB"),
        ({"state": "none"}, "no plan has been made yet"),
    ],
)
async def test_without_a_plan_for_too_long_it_is_unavailable(changed: dict[str, Any], said: str) -> None:
    pipeline = Site().make(replan_wait=0.02)
    pipeline.apply(route(3, **changed))
    [end] = await collect(pipeline, request())
    assert isinstance(end, FinishedEvent)
    assert end.reason == "unavailable"
    assert said in end.message


async def test_futile_submissions_are_bounded_and_given_up() -> None:
    scripted = Scripted(lambda _: [FinishedEvent("unavailable", "not ready")])
    timing = HealingTiming(0.05, first_retry=0.01, longest_retry=0.02)
    pipeline = HealingPipeline("main", "exact", lambda *_: scripted, timing, Counts())
    pipeline.apply(route())
    [end] = await collect(pipeline, request())
    assert isinstance(end, FinishedEvent)
    assert (end.reason, "not ready" in end.message) == ("unavailable", True)
    assert 2 <= len(scripted.requests) <= 2 + 0.05 / (0.01 / 2)  # waits are at least half of the first step


async def test_closing_cancels_on_the_current_link_and_while_waiting() -> None:
    site = Site()
    async with running(site.make()) as pipeline:
        pipeline.apply(route(3))
        async with aclosing(pipeline.generate(request())) as events:
            first = asyncio.ensure_future(anext(events))
            await until(lambda: site.stages and site.stages[0].requests)
            site.stages[0].say(TokenEvent(0, 50))
            await first
        assert site.stages[0].cancelled == [7]
        pipeline.apply(route(3, state="replanning"))
        waiting = asyncio.ensure_future(collect(pipeline, request()))
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        assert waiting.cancelled()
        pipeline.apply(route(4))
        assert len(site.stages[-1].requests) == 0
        assert pipeline.drained_epoch == 3


async def test_a_stage_that_becomes_ready_later_gets_what_waits() -> None:
    site = Site()
    async with running(site.make()) as pipeline:
        pipeline.apply(route(3))
        stage = site.stages[0]
        stage.status = PipelineStatus(reason="warms up")
        waiting = asyncio.ensure_future(collect(pipeline, request()))
        await asyncio.sleep(0.01)
        assert stage.requests == []
        stage.status = READY
        stage.changed()
        await until(lambda: stage.requests)
        stage.say(FinishedEvent("stop"))
        assert await waiting == [FinishedEvent("stop")]


async def test_the_end_of_a_links_task_is_the_end_of_run() -> None:
    class Broken(Scripted):
        async def run(self) -> None:
            raise RuntimeError("a bug")

    pipeline = HealingPipeline("main", "exact", lambda *_: Broken(lambda _: []), HealingTiming(1.0), Counts())
    pipeline.apply(route())
    with pytest.raises(RuntimeError, match="a bug"):
        await pipeline.run()
