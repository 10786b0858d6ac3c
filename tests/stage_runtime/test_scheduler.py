"""The scheduler's decisions, without any pipeline: a simulated ring returns micro-batches in order."""

from __future__ import annotations

import math
from collections import defaultdict, deque
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stage_runtime.engine.scheduler import (
    BREAK_EVEN_ROWS,
    QUEUED_SEQUENCES_LIMIT,
    Delivery,
    Limits,
    MicroBatch,
    Opening,
    Scheduler,
    chunk_rows,
)
from stage_runtime.link.messages import FinishedEvent, GenerateRequest, SamplingParameters, TokenEvent
from stage_runtime.link.steps import PROBE_STEPS_ID, SHEDDING_LIMIT, EntryStatus, Output, TokenKind, TokenResult

LIMITS = Limits(
    max_sequences=4,
    max_tokens_per_sequence=64,
    max_batch_sequences=4,
    prefill_chunk_tokens=8,
    stages=3,
    vocab_size=100,
)


def ask(
    sequence_id: int, prompt: int = 3, count: int = 5, stop: tuple[int, ...] = (), **sampling: float
) -> GenerateRequest:
    return GenerateRequest(
        sequence_id,
        "r",
        tuple(range(prompt)),
        count,
        stop,
        SamplingParameters(**sampling),  # type: ignore[arg-type]
    )


def results(batch: MicroBatch, token: int = 50) -> tuple[TokenResult, ...]:
    """What a healthy ring returns."""
    return tuple(
        TokenResult(e.sequence_id, e.position, TokenKind.TOKEN if e.output else TokenKind.NOTHING, token_id=token)
        for e in batch.entries
    )


def finish(scheduler: Scheduler) -> list[Delivery]:
    """Run everything to the end, one micro-batch in flight at a time."""
    deliveries = []
    while (batch := scheduler.next_micro_batch()) is not None:
        deliveries += scheduler.complete(results(batch), 4)
    return deliveries


@settings(deadline=None, max_examples=150)
@given(
    st.lists(st.tuples(st.integers(1, 40), st.integers(1, 12)), min_size=1, max_size=12),
    st.integers(1, 5),
    st.integers(1, 4),
    st.randoms(use_true_random=False),
)
def test_every_stage_sees_every_position_once_and_in_order(
    shapes: list[tuple[int, int]], stages: int, batch_limit: int, chance: object
) -> None:
    limits = Limits(3, 64, batch_limit, 8, stages, 100)
    scheduler = Scheduler(limits)
    for number, (prompt, count) in enumerate(shapes):
        assert scheduler.submit(ask(number, prompt, count), "gateway") is None
    kv_len: dict[int, int] = defaultdict(int)
    fed: dict[int, list[int]] = defaultdict(list)
    tokens: dict[int, list[int]] = defaultdict(list)
    ends: dict[int, FinishedEvent] = {}
    open_now: set[int] = set()
    flight: deque[MicroBatch] = deque()
    while True:
        open_now -= set(scheduler.freed)
        scheduler.freed.clear()
        batch = scheduler.next_micro_batch()
        if batch is not None:
            open_now |= {opening.request.sequence_id for opening in batch.opened}
            assert len(open_now) <= limits.max_sequences
            assert 0 < len(batch.entries) <= batch_limit
            start = 0
            for entry in batch.entries:
                assert entry.sequence_id in open_now
                assert entry.position == kv_len[entry.sequence_id]
                kv_len[entry.sequence_id] += entry.rows
                fed[entry.sequence_id] += batch.token_ids[start : start + entry.rows]
                start += entry.rows
            assert start == len(batch.token_ids)
            assert sum(e.rows for e in batch.entries if e.rows > 1) <= limits.prefill_chunk_tokens
            flight.append(batch)
            assert len(flight) <= stages
        if batch is None and not flight:
            break
        if batch is None or chance.random() < 0.5:  # type: ignore[attr-defined]
            returned = flight.popleft()
            for delivery in scheduler.complete(results(returned, token=60 + len(tokens) % 7), batch_limit):
                if isinstance(delivery.event, TokenEvent):
                    assert delivery.event.index == len(tokens[delivery.sequence_id])
                    tokens[delivery.sequence_id].append(delivery.event.token_id)
                else:
                    ends[delivery.sequence_id] = delivery.event
    assert not open_now
    for number, (prompt, count) in enumerate(shapes):
        assert len(tokens[number]) == count
        assert ends[number] == FinishedEvent("length", "", prompt, count)
        assert fed[number] == [*range(prompt), *tokens[number][:-1]]


def test_decode_tokens_that_wait_are_coalesced_into_even_shares() -> None:
    scheduler = Scheduler(Limits(8, 64, 8, 64, 2, 100))
    for number in range(6):
        scheduler.submit(ask(number), "gateway")
    prompts = scheduler.next_micro_batch()
    assert prompts is not None
    assert len(prompts.entries) == 6
    scheduler.complete(results(prompts), 8)
    first, second = scheduler.next_micro_batch(), scheduler.next_micro_batch()
    assert first is not None
    assert second is not None
    assert [len(first.entries), len(second.entries)] == [3, 3]
    assert scheduler.next_micro_batch() is None, "two stages, two micro-batches in flight"


def test_chunks_of_one_prompt_follow_each_other_without_waiting() -> None:
    scheduler = Scheduler(LIMITS)
    scheduler.submit(ask(1, prompt=20), "gateway")
    batches = [scheduler.next_micro_batch() for _ in range(3)]
    assert [(b.entries[0].position, b.entries[0].rows, b.entries[0].output) for b in batches if b] == [
        (0, 8, Output.NONE),
        (8, 8, Output.NONE),
        (16, 4, Output.LAST),
    ]


def test_a_stop_token_ends_without_being_reported() -> None:
    scheduler = Scheduler(LIMITS)
    scheduler.submit(ask(1, stop=(50,)), "gateway")
    assert [d.event for d in finish(scheduler)] == [FinishedEvent("stop", "", 3, 0)]
    assert scheduler.freed == [1]


def test_a_cancel_takes_effect_before_the_next_token() -> None:
    scheduler = Scheduler(LIMITS)
    scheduler.submit(ask(1), "gateway")
    batch = scheduler.next_micro_batch()
    assert batch is not None
    assert scheduler.cancel(1, "another gateway") == []
    assert [d.event.reason for d in scheduler.cancel(1, "gateway") if isinstance(d.event, FinishedEvent)] == [
        "cancelled"
    ]
    assert scheduler.freed == [1]
    assert scheduler.complete(results(batch), 4) == []
    assert scheduler.next_micro_batch() is None


def test_a_queued_request_can_be_cancelled_and_is_never_computed() -> None:
    scheduler = Scheduler(Limits(1, 64, 4, 8, 1, 100))
    scheduler.submit(ask(1), "gateway")
    scheduler.submit(ask(2), "gateway")
    first = scheduler.next_micro_batch()
    scheduler.cancel(2, "gateway")
    assert first is not None
    scheduler.complete(results(first), 4)
    assert {d.sequence_id for d in finish(scheduler)} == {1}


def test_a_gateway_that_goes_takes_its_sequences_along() -> None:
    scheduler = Scheduler(Limits(1, 64, 4, 8, 1, 100))
    for number, owner in ((1, "gone"), (2, "gone"), (3, "stays")):
        scheduler.submit(ask(number, count=1), owner)
    scheduler.complete(results(scheduler.next_micro_batch()), 4)  # type: ignore[arg-type]
    scheduler.cancel_owner("gone")
    assert {d.sequence_id for d in finish(scheduler)} == {3}


def test_a_stage_at_another_position_ends_the_sequence_with_both_values() -> None:
    scheduler = Scheduler(LIMITS)
    scheduler.submit(ask(1), "gateway")
    scheduler.next_micro_batch()
    lost = TokenResult(1, 0, TokenKind.NOTHING, EntryStatus.POSITION_DIFFERS, kv_len=9)
    event = scheduler.complete((lost,), 4)[0].event
    assert event == FinishedEvent("unavailable", "a stage is at position 9, not 0", 3, 0)
    assert scheduler.freed == [1]


def test_the_lowest_batch_limit_of_the_ring_counts() -> None:
    scheduler = Scheduler(Limits(8, 64, 8, 64, 1, 100))
    for number in range(6):
        scheduler.submit(ask(number), "gateway")
    batch = scheduler.next_micro_batch()
    assert batch is not None
    assert len(batch.entries) == 6
    scheduler.complete(results(batch), 2)
    limited = scheduler.next_micro_batch()
    assert limited is not None
    assert len(limited.entries) == 2


@pytest.mark.parametrize(
    ("request_", "reason"),
    [
        (ask(1, prompt=0), "at least one"),
        (ask(1, count=0), "at least one"),
        (ask(1, prompt=60, count=5), "60 prompt tokens and 5 to generate are 65, the limit is 64"),
        (GenerateRequest(1, "r", (100,), 1, (), SamplingParameters()), "below 100"),
        (replace(ask(1), generated=(100,)), "below 100"),
        (replace(ask(1), generated=(1, 2, 3, 4, 5)), "5 tokens are generated already, max_tokens is 5"),
        (ask(PROBE_STEPS_ID), "reserved"),
        (ask(1, temperature=-1.0), "temperature"),
        (ask(1, top_p=0.0), "top_p"),
        (ask(1, choice=2**32), "choice"),
        (ask(1, logprobs=21), "logprobs"),
    ],
)
def test_requests_that_cannot_be_served_say_why(request_: GenerateRequest, reason: str) -> None:
    refusal = Scheduler(LIMITS).submit(request_, "gateway")
    assert refusal is not None
    assert refusal.reason == "invalid"
    assert reason in refusal.message


def test_too_many_waiting_requests_are_refused_and_an_id_is_used_once() -> None:
    scheduler = Scheduler(LIMITS)
    for number in range(QUEUED_SEQUENCES_LIMIT):
        assert scheduler.submit(ask(number), "gateway") is None
    refusal = scheduler.submit(ask(9999), "gateway")
    assert refusal is not None
    assert refusal.reason == "overloaded"
    scheduler.next_micro_batch()
    for number in (0, 200):  # one active, one queued
        refusal = scheduler.submit(ask(number), "gateway")
        assert refusal is not None
        assert "already open" in refusal.message


def test_a_gateway_that_came_back_by_a_new_link_takes_its_sequences_with_it() -> None:
    scheduler = Scheduler(LIMITS)
    for number in range(LIMITS.max_sequences + 1):  # the last one waits
        scheduler.submit(ask(number), "old link")
    first = scheduler.next_micro_batch()
    assert first is not None
    again = replace(ask(0), generated=(7,))
    assert scheduler.submit(again, "new link") is None
    assert scheduler.submit(ask(LIMITS.max_sequences), "new link") is None
    assert scheduler.freed == [0]
    scheduler.cancel_owner("old link")
    assert scheduler.queued_sequences == 2
    results = tuple(TokenResult(e.sequence_id, e.position, TokenKind.TOKEN, token_id=5) for e in first.entries)
    assert scheduler.complete(results, 8) == []  # what the old link's sequences had in flight reaches nobody
    following = scheduler.next_micro_batch()
    assert following is not None
    assert [opening.request for opening in following.opened] == [again, ask(LIMITS.max_sequences)]


def test_a_broken_ring_ends_everything_once() -> None:
    scheduler = Scheduler(LIMITS)
    for number in range(6):
        scheduler.submit(ask(number), "gateway")
    scheduler.next_micro_batch()
    ends = scheduler.end_all(FinishedEvent("unavailable", "the ring broke"))
    assert sorted(d.sequence_id for d in ends) == list(range(6))
    assert scheduler.next_micro_batch() is None
    assert (scheduler.active_sequences, scheduler.queued_sequences) == (0, 0)


@pytest.mark.parametrize(("kept", "position", "fed"), [(0, 0, [0, 1, 2, 7, 8]), (2, 2, [2, 7, 8]), (99, 4, [8])])
def test_an_answer_goes_on_behind_what_is_kept(kept: int, position: int, fed: list[int]) -> None:
    scheduler = Scheduler(LIMITS)
    request = replace(ask(1, prompt=3, count=4), generated=(7, 8))
    assert scheduler.submit(request, "gateway", kept) is None
    batch = scheduler.next_micro_batch()
    assert batch is not None
    assert batch.opened == (Opening(request, position),)
    assert (batch.entries[0].position, batch.entries[0].output, batch.token_ids) == (position, Output.LAST, fed)
    events = [d.event for d in [*scheduler.complete(results(batch), 4), *finish(scheduler)]]
    assert events == [TokenEvent(2, 50), TokenEvent(3, 50), FinishedEvent("length", "", 3, 4)]


def test_a_new_sequence_may_have_a_kept_prompt() -> None:
    """Its ring broke before the first token."""
    scheduler = Scheduler(LIMITS)
    scheduler.submit(ask(1, prompt=6), "gateway", 6)
    batch = scheduler.next_micro_batch()
    assert batch is not None
    assert (batch.opened[0].kv_len, batch.token_ids) == (5, [5])


def test_answers_that_go_on_wait_before_new_ones_in_their_own_order() -> None:
    scheduler = Scheduler(Limits(1, 64, 4, 8, 1, 100))
    for number, generated in ((1, ()), (2, ()), (3, (7,)), (4, (8,))):
        scheduler.submit(replace(ask(number, count=2), generated=generated), "gateway")
    ends = [d.sequence_id for d in finish(scheduler) if isinstance(d.event, FinishedEvent)]
    assert ends == [3, 4, 1, 2]


def test_results_of_an_earlier_life_never_count_for_the_next() -> None:
    """A gateway's link breaks and it submits again while a step of the sequence is still on its way."""
    scheduler = Scheduler(LIMITS)
    scheduler.submit(ask(1), "gateway")
    prompt = scheduler.next_micro_batch()
    assert prompt is not None
    scheduler.complete(results(prompt), 4)
    under_way = scheduler.next_micro_batch()
    assert under_way is not None
    scheduler.cancel_owner("gateway")
    assert scheduler.submit(replace(ask(1), generated=(50,)), "again") is None
    assert scheduler.next_micro_batch() is None, "it waits until nothing of it is in flight"
    assert scheduler.complete(results(under_way, token=51), 4) == []
    events = [d.event for d in finish(scheduler)]
    assert events[:-1] == [TokenEvent(index, 50) for index in range(1, 5)]


def test_every_end_counts_the_tokens_of_the_whole_answer() -> None:
    scheduler = Scheduler(LIMITS)
    request = replace(ask(1), generated=(7, 8))
    scheduler.submit(request, "gateway")
    assert scheduler.cancel(1, "gateway")[0].event == FinishedEvent("cancelled", "", 3, 2)
    refusal = scheduler.submit(replace(request, prompt=()), "gateway")
    assert refusal is not None
    assert (refusal.reason, refusal.completion_tokens) == ("invalid", 2)


@given(st.integers(1, 5000), st.integers(1, 32), st.integers(1, 512))
def test_chunks_of_prompts_keep_no_stage_waiting_for_long(waiting: int, stages: int, most: int) -> None:
    def seconds(chunks: int) -> float:
        """Of a prefill in equal chunks, in shares of a step's fixed part."""
        return (chunks + stages - 1) * (1 + waiting / chunks / BREAK_EVEN_ROWS)

    rows = chunk_rows(waiting, stages, most)
    assert 1 <= rows <= min(most, waiting)
    fewest = -(-waiting // most)
    best = min(seconds(chunks) for chunks in range(fewest, max(fewest, waiting) + 1))
    assert seconds(max(fewest, math.ceil(waiting / rows))) <= 1.05 * best


def test_a_pipeline_of_one_stage_takes_prompts_as_a_whole() -> None:
    assert [chunk_rows(waiting, 1, 128) for waiting in (1, 66, 128, 800)] == [1, 66, 128, 128]


@settings(deadline=None, max_examples=150)
@given(
    st.lists(st.tuples(st.integers(1, 20), st.integers(1, 8), st.booleans()), min_size=1, max_size=10),
    st.integers(1, 4),
    st.randoms(use_true_random=False),
)
def test_while_a_stage_sheds_no_new_sequence_begins_beside_an_open_one(
    shapes: list[tuple[int, int, bool]], stages: int, chance: object
) -> None:
    """Shedding comes and goes; whatever has begun goes on, and everything ends."""
    scheduler = Scheduler(Limits(4, 64, 4, 8, stages, 100))
    for number, (prompt, count, begun) in enumerate(shapes):
        wanted = replace(ask(number, prompt, count + 1), generated=(9,)) if begun else ask(number, prompt, count)
        assert scheduler.submit(wanted, "gateway") is None
    ended: set[int] = set()
    flight: deque[MicroBatch] = deque()
    while True:
        shedding, before, limit = scheduler.shedding, scheduler.active_sequences, scheduler.batch_limit
        batch = scheduler.next_micro_batch()
        if batch is not None:
            flight.append(batch)
            assert 0 < len(batch.entries) <= limit
            new = [opening for opening in batch.opened if not opening.request.generated]
            if shedding:
                assert len(new) <= (0 if before else 1)
        if batch is None and not flight:
            break
        if batch is None or chance.random() < 0.5:  # type: ignore[attr-defined]
            told = chance.choice((SHEDDING_LIMIT, SHEDDING_LIMIT, 1, 3))  # type: ignore[attr-defined]
            for delivery in scheduler.complete(results(flight.popleft()), told):
                if isinstance(delivery.event, FinishedEvent):
                    ended.add(delivery.sequence_id)
            assert scheduler.shedding == (told == SHEDDING_LIMIT)
            assert scheduler.batch_limit == (told or limit)
    assert ended == set(range(len(shapes)))


def test_what_is_open_keeps_the_limit_that_held_before_shedding() -> None:
    scheduler = Scheduler(Limits(8, 64, 8, 64, 1, 100))
    for number in range(6):
        scheduler.submit(ask(number), "gateway")
    for told, entries in ((3, 6), (SHEDDING_LIMIT, 3), (SHEDDING_LIMIT, 3), (8, 3), (8, 6)):
        batch = scheduler.next_micro_batch()
        assert batch is not None
        assert len(batch.entries) == entries
        scheduler.complete(results(batch), told)


def test_new_sequences_come_one_after_the_other_while_a_stage_sheds_and_together_afterwards() -> None:
    scheduler = Scheduler(LIMITS)
    opened = []
    for number in range(4):
        scheduler.submit(ask(number, count=1), "gateway")
    scheduler.shedding = True
    for told in (SHEDDING_LIMIT, 4, 4):
        batch = scheduler.next_micro_batch()
        if batch is not None:
            opened.append([opening.request.sequence_id for opening in batch.opened])
            scheduler.complete(results(batch), told)
    assert opened == [[0], [1], [2, 3]]
