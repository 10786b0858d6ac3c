"""Which tokens go into the next micro-batch. Pure: no clock, no I/O, no torch; the first stage acts on it.

Several micro-batches are in flight, at most one a stage (recurrent pipeline parallelism): while one is at the second
stage the first computes another. Decode tokens that wait are coalesced into one micro-batch, up to an even share of
the decoding sequences, so that every stage has work of the same size. Prompts go in chunks; chunks of one prompt may
be in flight at once, because the links keep their order, and are so small that no stage waits long for its first one.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass

from stage_runtime.engine.requests import request_problem
from stage_runtime.link.messages import FinishedEvent, GenerateRequest, TokenEvent
from stage_runtime.link.steps import SHEDDING_LIMIT, EntryStatus, Output, StepEntry, TokenKind, TokenResult

# The gateway queues and answers 429 by its own limit; this one only bounds memory against a gateway that does not.
QUEUED_SEQUENCES_LIMIT = 256

BREAK_EVEN_ROWS = 16
"""Rows whose own share of a stage's step takes as long as the step's fixed part, which is reading the weights. Measured
for 10 layers of SmolLM2-135M, one thread of a 2-core x86-64, packed FP16: 12 ms and 0.71 ms a row."""


@dataclass(frozen=True)
class Limits:
    """What the plan allows.

    Attributes:
        max_sequences: sequences in flight at once.
        max_tokens_per_sequence: prompt and answer together.
        max_batch_sequences: sequences in one micro-batch.
        prefill_chunk_tokens: prompt tokens in one micro-batch.
        stages: micro-batches in flight at once.
        vocab_size: token ids are below it.
    """

    max_sequences: int
    max_tokens_per_sequence: int
    max_batch_sequences: int
    prefill_chunk_tokens: int
    stages: int
    vocab_size: int


@dataclass
class Sequence:
    """A request in the queue or in flight.

    Attributes:
        owner: the gateway's session; its sequences end with it.
        sent: tokens of `prefill` that the stages hold, or that are in some micro-batch.
        prefill: tokens to feed before the first new one is sampled: the prompt and the answer so far.
        generated: tokens of the answer.
    """

    request: GenerateRequest
    owner: Hashable
    sent: int
    prefill: tuple[int, ...]
    generated: list[int]

    @property
    def goes_on(self) -> bool:
        """In the queue: it had begun before its ring broke."""
        return bool(self.sent or self.request.generated)

    @property
    def decoding(self) -> bool:
        """A token has been sampled since it was submitted; from then on it takes one row at a time."""
        return len(self.generated) > len(self.request.generated)


@dataclass(frozen=True)
class Opening:
    """A sequence begins, or goes on.

    Attributes:
        kv_len: tokens of it that every stage has kept and must cut its cache to; 0 begins with an empty cache.
    """

    request: GenerateRequest
    kv_len: int = 0


@dataclass(frozen=True)
class MicroBatch:
    """Work for the pipeline.

    Attributes:
        opened: sequences that begin or go on with it.
        entries: what each stage computes.
        token_ids: tokens of all entries, one after another.
    """

    opened: tuple[Opening, ...]
    entries: tuple[StepEntry, ...]
    token_ids: list[int]


@dataclass(frozen=True)
class Delivery:
    """An event for the owner of a sequence."""

    owner: Hashable
    sequence_id: int
    event: TokenEvent | FinishedEvent


class Scheduler:
    """Decides; see the module's text.

    Args:
        limits: what the plan allows.

    Attributes:
        batch_limit: least batch limit that any stage asked for lately, in sequences.
        shedding: a stage asked for no new sequences. What is open goes on, with the batch limit that held before; only
            when nothing is open one is admitted, so that the ring still serves, and hears when the stage is well.
        freed: ids whose KV caches every stage has to drop; the caller takes them.
    """

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.batch_limit = limits.max_batch_sequences
        self.shedding = False
        self.freed: list[int] = []
        self._queue: deque[Sequence] = deque()
        self._active: dict[int, Sequence] = {}  # in order of admission
        self._ready: deque[int] = deque()  # decode tokens that wait, oldest first
        self._in_flight: deque[frozenset[int]] = deque()  # sequences of each micro-batch, oldest first
        self._waiting = 0  # prompt rows before the last micro-batch
        self._chunk_rows = 0

    @property
    def active_sequences(self) -> int:
        """Sequences that hold KV caches."""
        return len(self._active)

    @property
    def queued_sequences(self) -> int:
        """Sequences that wait for room."""
        return len(self._queue)

    def submit(self, request: GenerateRequest, owner: Hashable, kv_len: int = 0) -> FinishedEvent | None:
        """Take a request into the queue, or say at once why not.

        Sequences that had begun before their ring broke wait before new ones. A sequence that is open already for
        another owner goes to this one: its gateway came back by a new link before the old one's silence was noticed.

        Args:
            kv_len: tokens of prompt and answer that every stage has kept. At least the last one is computed again,
                because the next token is sampled from its logits.
        """
        counts = len(request.prompt), len(request.generated)
        if problem := request_problem(request, self.limits.max_tokens_per_sequence, self.limits.vocab_size):
            return FinishedEvent("invalid", problem, *counts)
        if (known := self._find(request.sequence_id)) is not None:
            if known.owner == owner:
                return FinishedEvent("invalid", f"sequence {request.sequence_id} is already open", *counts)
            self.cancel(request.sequence_id, known.owner)
        if len(self._queue) >= QUEUED_SEQUENCES_LIMIT:
            return FinishedEvent("overloaded", f"{QUEUED_SEQUENCES_LIMIT} sequences wait already", *counts)
        prefill = request.prompt + request.generated
        sequence = Sequence(request, owner, min(kv_len, len(prefill) - 1), prefill, list(request.generated))
        begun = sum(1 for queued in self._queue if queued.goes_on)
        self._queue.insert(begun if sequence.goes_on else len(self._queue), sequence)
        return None

    def _find(self, sequence_id: int) -> Sequence | None:
        queued = (queued for queued in self._queue if queued.request.sequence_id == sequence_id)
        return self._active.get(sequence_id) or next(queued, None)

    def cancel(self, sequence_id: int, owner: Hashable) -> list[Delivery]:
        """The owner wants no more of a sequence. What is under way is computed and dropped."""
        for queued in self._queue:
            if queued.request.sequence_id == sequence_id and queued.owner == owner:
                self._queue.remove(queued)
                return [self._finished(queued, FinishedEvent("cancelled"))]
        sequence = self._active.get(sequence_id)
        if sequence is None or sequence.owner != owner:
            return []
        return [self._end(sequence, FinishedEvent("cancelled"))]

    def cancel_owner(self, owner: Hashable) -> None:
        """The owner is gone; nobody hears of the end of its sequences."""
        self._queue = deque(queued for queued in self._queue if queued.owner != owner)
        for sequence in [active for active in self._active.values() if active.owner == owner]:
            self._end(sequence, FinishedEvent("cancelled"))

    def end_all(self, event: FinishedEvent) -> list[Delivery]:
        """The ring broke: every sequence ends, nothing is in flight any more."""
        deliveries = [self._finished(sequence, event) for sequence in (*self._active.values(), *self._queue)]
        self._active.clear()
        self._queue.clear()
        self._ready.clear()
        self.freed.clear()
        self._in_flight.clear()
        return deliveries

    def next_micro_batch(self) -> MicroBatch | None:
        """What to compute now; None while enough is in flight or nothing waits."""
        if len(self._in_flight) >= self.limits.stages:
            return None
        opened = self._admit()
        entries: list[StepEntry] = []
        token_ids: list[int] = []
        self._add_decodes(entries, token_ids)
        self._add_prompts(entries, token_ids)
        if not entries:
            return None
        self._in_flight.append(frozenset(entry.sequence_id for entry in entries))
        return MicroBatch(opened, tuple(entries), token_ids)

    def complete(self, results: tuple[TokenResult, ...], batch_limit: int) -> list[Delivery]:
        """The oldest micro-batch in flight came back."""
        self._in_flight.popleft()
        self.shedding = batch_limit == SHEDDING_LIMIT
        if not self.shedding:
            self.batch_limit = min(batch_limit, self.limits.max_batch_sequences)
        deliveries: list[Delivery] = []
        for result in results:
            sequence = self._active.get(result.sequence_id)
            if sequence is None:  # cancelled meanwhile
                continue
            if result.status is EntryStatus.NOT_FINITE:
                ended = FinishedEvent("error", "the model's logits for this text are not finite numbers")
                deliveries.append(self._end(sequence, ended))
            elif result.status is not EntryStatus.OK:
                message = f"a stage is at position {result.kv_len}, not {result.position}"
                deliveries.append(self._end(sequence, FinishedEvent("unavailable", message)))
            elif result.kind in (TokenKind.TOKEN, TokenKind.TOKEN_WITH_LOGPROB):
                deliveries += self._token(sequence, result)
        return deliveries

    def _admit(self) -> tuple[Opening, ...]:
        opened = []
        while self._queue and len(self._active) < self.limits.max_sequences:
            sequence_id = self._queue[0].request.sequence_id
            if self.shedding and self._active and not self._queue[0].goes_on:
                break  # what had begun before its ring broke is open for its user
            if any(sequence_id in ids for ids in self._in_flight):
                break  # it ended and was submitted again: what its earlier life still has in flight must not count
            sequence = self._queue.popleft()
            self._active[sequence_id] = sequence
            opened.append(Opening(sequence.request, sequence.sent))
        return tuple(opened)

    def _add_decodes(self, entries: list[StepEntry], token_ids: list[int]) -> None:
        decoding = sum(1 for sequence in self._active.values() if sequence.decoding)
        share = -(-decoding // self.limits.stages)
        while self._ready and len(entries) < min(share, self.batch_limit):
            sequence = self._active[self._ready.popleft()]
            position = len(sequence.request.prompt) + len(sequence.generated) - 1
            entries.append(StepEntry(sequence.request.sequence_id, position, 1, Output.LAST))
            token_ids.append(sequence.generated[-1])

    def _add_prompts(self, entries: list[StepEntry], token_ids: list[int]) -> None:
        waiting = sum(len(sequence.prefill) - sequence.sent for sequence in self._active.values())
        if waiting > self._waiting:  # more has come; else equal chunks go on
            self._chunk_rows = chunk_rows(waiting, self.limits.stages, self.limits.prefill_chunk_tokens)
        self._waiting = waiting
        room = self._chunk_rows
        for sequence in self._active.values():
            if room <= 0 or len(entries) >= self.batch_limit:
                return
            prefill = sequence.prefill
            rows = min(room, len(prefill) - sequence.sent)
            if rows <= 0:
                continue
            last = sequence.sent + rows == len(prefill)
            output = Output.LAST if last else Output.NONE
            entries.append(StepEntry(sequence.request.sequence_id, sequence.sent, rows, output))
            token_ids += prefill[sequence.sent : sequence.sent + rows]
            sequence.sent += rows
            room -= rows

    def _token(self, sequence: Sequence, result: TokenResult) -> list[Delivery]:
        request = sequence.request
        if result.token_id in request.stop_token_ids:
            return [self._end(sequence, FinishedEvent("stop"))]
        logprob = result.value if result.kind is TokenKind.TOKEN_WITH_LOGPROB else None
        event = TokenEvent(len(sequence.generated), result.token_id, logprob, result.alternatives)
        sequence.generated.append(result.token_id)
        deliveries = [Delivery(sequence.owner, request.sequence_id, event)]
        if len(sequence.generated) >= request.max_tokens:
            deliveries.append(self._end(sequence, FinishedEvent("length")))
        else:
            self._ready.append(request.sequence_id)
        return deliveries

    def _end(self, sequence: Sequence, event: FinishedEvent) -> Delivery:
        sequence_id = sequence.request.sequence_id
        del self._active[sequence_id]
        if sequence_id in self._ready:
            self._ready.remove(sequence_id)
        self.freed.append(sequence_id)
        return self._finished(sequence, event)

    @staticmethod
    def _finished(sequence: Sequence, event: FinishedEvent) -> Delivery:
        counted = FinishedEvent(event.reason, event.message, len(sequence.request.prompt), len(sequence.generated))
        return Delivery(sequence.owner, sequence.request.sequence_id, counted)


def chunk_rows(waiting: int, stages: int, most: int) -> int:
    """How many of the prompt rows that wait go into the next micro-batch.

    With k equal chunks the last stage ends after k + stages - 1 steps of a fixed part and a part that grows with
    waiting / k rows; that is least at k = √(waiting · (stages - 1) / BREAK_EVEN_ROWS). Few rows a chunk also hold up
    other sequences' tokens the least.

    Args:
        waiting: rows of all admitted prompts. stages: of the pipeline. most: rows of one micro-batch.
    """
    chunks = max(1, round(math.sqrt(waiting * (stages - 1) / BREAK_EVEN_ROWS)))
    return min(most, -(-waiting // chunks))
