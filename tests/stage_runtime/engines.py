"""Real scheduler and real engines of a few stages in one process, without links: micro-batches go by function call."""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from functools import reduce
from itertools import pairwise
from pathlib import Path

from fleet.planning.plan import StagePlan
from fleet.planning.weights import KernelName
from stage_runtime.checkpoint.manifest import read_manifest
from stage_runtime.engine.scheduler import Limits, Scheduler
from stage_runtime.engine.stage import StageEngine
from stage_runtime.link.control import KvLength
from stage_runtime.link.messages import FinishedEvent, GenerateRequest, TokenEvent
from stage_runtime.link.steps import Step, StepEntry, Tokens
from stage_runtime.model.store import WeightStore, pieces_of

MAX_SEQUENCES = 4
MAX_TOKENS = 256


def load_stage(directory: Path, digest: str, stage: StagePlan, kernel: KernelName = "packed") -> WeightStore:
    """A store that holds what a stage needs."""
    store = WeightStore(directory, read_manifest(directory, digest), kernel)
    for piece in pieces_of(stage):
        store.load(piece)
    return store


def full_store(directory: Path, digest: str, kernel: KernelName = "packed") -> WeightStore:
    """A store that holds the whole model."""
    layers = read_manifest(directory, digest).config.num_hidden_layers
    return load_stage(directory, digest, StagePlan("all", 0, layers, embedding=True, head=True), kernel)


class LocalRing:
    """A pipeline of engines over one store.

    Args:
        store: holds every layer, the head and the embedding.
        splits: where stages begin, 0 first, with the number of layers last.
        chunk: prompt tokens in a micro-batch.
    """

    def __init__(self, store: WeightStore, splits: tuple[int, ...], chunk: int = 8) -> None:
        spans = list(pairwise(splits))
        head = 0 if store.config.tie_word_embeddings else len(spans) - 1
        self.stages = [StagePlan(f"box{i}", a, b, i == 0, i == head) for i, (a, b) in enumerate(spans)]
        self.config = store.config
        self._weights = [store.weights(stage) for stage in self.stages]
        self.engines = [StageEngine(self.config, own, 16, MAX_SEQUENCES, MAX_TOKENS) for own in self._weights]
        self.head = self.engines[head]
        self.limits = Limits(MAX_SEQUENCES, MAX_TOKENS, MAX_SEQUENCES, chunk, len(spans), self.config.vocab_size)
        self.scheduler = Scheduler(self.limits)
        self.tokens: dict[int, list[int]] = {}
        self.ended: dict[int, FinishedEvent] = {}
        self.rows_computed = 0

    @property
    def weight_bytes(self) -> int:
        """Bytes of what the engines use."""
        return sum(own.weight_bytes for own in self._weights)

    def start(self, stages: int | None = None) -> Step | None:
        """Take the next micro-batch through the first stages (all, by default)."""
        freed, self.scheduler.freed = tuple(self.scheduler.freed), []
        batch = self.scheduler.next_micro_batch()
        reached = self.engines[:stages]
        for engine in reached:
            engine.free(freed)
            for opening in batch.opened if batch else ():
                request = opening.request
                engine.open(request.sequence_id, request.sampling, request.generated, opening.kv_len)
        if batch is None:
            return None
        self.rows_computed += len(batch.token_ids)
        return self.forward(batch.entries, batch.token_ids, stages)

    def forward(self, entries: tuple[StepEntry, ...], token_ids: list[int], stages: int | None = None) -> Step:
        """Run entries through the first stages (all, by default)."""
        step = self.engines[0].embed(entries, token_ids, MAX_SEQUENCES)
        return reduce(lambda step, engine: engine.forward(step), self.engines[:stages], step)

    def sample(self, step: Step) -> Tokens:
        """What the head says to what came out of the last stage."""
        return self.head.head(self.engines[-1].outputs(step))

    def finish(self, step: Step) -> None:
        """Sample, and hand out what the scheduler makes of it."""
        tokens = self.sample(step)
        for delivery in self.scheduler.complete(tokens.results, tokens.batch_limit):
            if isinstance(delivery.event, TokenEvent):
                own = self.tokens.setdefault(delivery.sequence_id, [])
                assert delivery.event.index == len(own)
                own.append(delivery.event.token_id)
            else:
                self.ended[delivery.sequence_id] = delivery.event

    def run(self, micro_batches: int = 10**9) -> None:
        """Compute, several micro-batches in flight, until everything has ended or so many were begun."""
        flight: deque[Step] = deque()
        while True:
            started = self.start() if micro_batches > 0 else None
            if started is not None:
                micro_batches -= 1
                flight.append(started)
            elif flight:
                self.finish(flight.popleft())
            else:
                return

    def break_ring(self) -> None:
        """Every stage keeps its caches, the scheduler's sequences end; then the ring has formed anew and agreed."""
        self.scheduler.end_all(FinishedEvent("unavailable", "the ring broke"))
        for engine in self.engines:
            engine.keep_all()
        lengths = tuple(KvLength(*item) for item in self.engines[0].kept_lengths().items())
        for engine in self.engines[1:]:
            lengths = engine.survey(lengths)
        for engine in self.engines:
            engine.agree(lengths)

    def submit_again(self, requests: list[GenerateRequest]) -> None:
        """The gateway asks again for what has not ended, with the tokens that it has."""
        kept = self.engines[0].kept_lengths()
        for request in requests:
            if request.sequence_id not in self.ended:
                generated = tuple(self.tokens.get(request.sequence_id, ()))
                again = replace(request, generated=generated)
                assert self.scheduler.submit(again, "gateway", kept.get(request.sequence_id, 0)) is None
