"""A sequence that goes on after its ring broke: the tokens of the uninterrupted one, whatever was kept."""

from __future__ import annotations

import hashlib
from collections import deque
from dataclasses import dataclass, field, replace
from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fleet.bundle.model_info import read_model_json
from stage_runtime.engine.probe import EXACT_LARGEST_LOGIT_DIFFERENCE, PROBE_TOKENS, probe_token_ids
from stage_runtime.engine.sampling import Sampler
from stage_runtime.engine.scheduler import Limits, MicroBatch, Scheduler
from stage_runtime.link.messages import FinishedEvent, GenerateRequest, SamplingParameters
from stage_runtime.link.steps import PROBE_STEPS_ID, PROBE_WHOLE_ID, Output, StepEntry, TokenKind, TokenResult
from tests.models import smollm2_directory
from tests.stage_runtime.engines import LocalRing, full_store
from tests.stage_runtime.tiny import LAYERS, VOCABULARY, TinyModel

VOCAB = 12
SAMPLINGS = [
    SamplingParameters(),
    SamplingParameters(frequency_penalty=0.7, presence_penalty=0.4),
    SamplingParameters(temperature=0.9, top_p=0.9, seed=11, frequency_penalty=0.5),
    SamplingParameters(temperature=1.3, top_k=5, seed=2**64 - 1, choice=3, presence_penalty=-0.3),
]


def fake_logits(history: list[int]) -> torch.Tensor:
    """Logits [vocab] that depend on every token before."""
    digest = hashlib.sha256(bytes(history)).digest()
    return torch.tensor([byte / 40 for byte in digest[:VOCAB]])


def uninterrupted(request: GenerateRequest) -> list[int]:
    """The answer without any scheduler."""
    sampler, history = Sampler(request.sampling), list(request.prompt)
    while len(history) < len(request.prompt) + request.max_tokens:
        history.append(sampler.next_token(fake_logits(history)).token_id)
    return history[len(request.prompt) :]


@dataclass
class FakeRing:
    """What stages would hold: tokens in the caches, one sampler a sequence."""

    caches: dict[int, list[int]] = field(default_factory=dict)
    samplers: dict[int, Sampler] = field(default_factory=dict)

    def compute(self, batch: MicroBatch) -> tuple[TokenResult, ...]:
        for opening in batch.opened:
            request = opening.request
            assert opening.kv_len < len(request.prompt) + len(request.generated), "the last token is always computed"
            cache = self.caches.get(request.sequence_id, [])[: opening.kv_len]
            assert len(cache) == opening.kv_len
            self.caches[request.sequence_id] = cache
            restored = Sampler(request.sampling, position=len(request.generated))
            restored.counts.update(request.generated)
            self.samplers[request.sequence_id] = restored
        results, start = [], 0
        for entry in batch.entries:
            cache = self.caches[entry.sequence_id]
            assert len(cache) == entry.position
            cache += batch.token_ids[start : start + entry.rows]
            start += entry.rows
            token = self.samplers[entry.sequence_id].next_token(fake_logits(cache)).token_id if entry.output else 0
            kind = TokenKind.TOKEN if entry.output else TokenKind.NOTHING
            results.append(TokenResult(entry.sequence_id, entry.position, kind, token_id=token))
        return tuple(results)


@settings(max_examples=150)
@given(
    st.lists(st.tuples(st.integers(1, 20), st.integers(1, 14), st.sampled_from(SAMPLINGS)), min_size=1, max_size=5),
    st.integers(0, 2**32),
)
def test_any_interruptions_leave_the_answer_as_it_would_have_been(
    shapes: list[tuple[int, int, SamplingParameters]], seed: int
) -> None:
    chance = Random(seed)  # noqa: S311  # no secret
    requests = [
        GenerateRequest(i, "r", tuple((7 * i + j) % VOCAB for j in range(prompt)), count, (), sampling)
        for i, (prompt, count, sampling) in enumerate(shapes)
    ]
    received: dict[int, list[int]] = {request.sequence_id: [] for request in requests}  # what the gateway has
    ended: dict[int, FinishedEvent] = {}
    ring = FakeRing()
    interruptions = chance.randint(0, 6)
    while len(ended) < len(requests):
        sequences, batch, chunk, stages = (chance.randint(1, most) for most in (4, 4, 9, 3))
        scheduler = Scheduler(Limits(sequences, 64, batch, chunk, stages, VOCAB))
        ring.caches = {i: kept[: chance.randint(0, len(kept))] for i, kept in ring.caches.items()}  # as agreed
        for request in requests:
            if request.sequence_id not in ended:
                again = replace(request, generated=tuple(received[request.sequence_id]))
                kv_len = len(ring.caches.get(request.sequence_id, ()))
                assert scheduler.submit(again, "gateway", kv_len) is None
        interruptions -= 1
        flight: deque[tuple[TokenResult, ...]] = deque()
        for _ in range(chance.randint(1, 12) if interruptions >= 0 else 10**6):
            micro_batch = scheduler.next_micro_batch()
            if micro_batch is not None:
                flight.append(ring.compute(micro_batch))
            elif not flight:
                break
            if micro_batch is None or chance.random() < 0.5:
                for delivery in scheduler.complete(flight.popleft(), batch):
                    if isinstance(delivery.event, FinishedEvent):
                        ended[delivery.sequence_id] = delivery.event
                    else:
                        assert delivery.event.index == len(received[delivery.sequence_id])
                        received[delivery.sequence_id].append(delivery.event.token_id)
    for request in requests:
        assert received[request.sequence_id] == uninterrupted(request)
        expected = FinishedEvent("length", "", len(request.prompt), request.max_tokens)
        assert ended[request.sequence_id] == expected


def ask(number: int, prompt: int, count: int, sampling: SamplingParameters, vocab: int) -> GenerateRequest:
    ids = tuple((number * 101 + index * 37 + 11) % vocab for index in range(prompt))
    return GenerateRequest(number, "r", ids, count, (), sampling)


def all_tokens(ring: LocalRing, requests: list[GenerateRequest]) -> dict[int, list[int]]:
    """Tokens of undisturbed answers."""
    for request in requests:
        assert ring.scheduler.submit(request, "gateway") is None
    ring.run()
    return ring.tokens


def interrupt(ring: LocalRing, requests: list[GenerateRequest], seed: int, keeps: list[bool]) -> None:
    """Run to the end, breaking the ring each time with a micro-batch that reached some stages only.

    Args:
        keeps: one a break: whether the caches survive it.
    """
    chance = Random(seed)  # noqa: S311  # no secret
    for request in requests:
        assert ring.scheduler.submit(request, "gateway") is None
    for keep in keeps:
        ring.run(chance.randint(1, 8))
        ring.start(chance.randint(0, len(ring.engines) - 1))
        ring.break_ring()
        if not keep:
            for engine in ring.engines:
                engine.free_kept()
        ring.submit_again(requests)
    ring.run()


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("keep", [True, False], ids=["caches kept", "caches lost"])
def test_real_layers_go_on_as_if_nothing_had_happened(tied: bool, keep: bool, request: pytest.FixtureRequest) -> None:
    model: TinyModel = request.getfixturevalue("tied_model" if tied else "untied_model")
    store = full_store(model.directory, model.digest)
    requests = [ask(i, 3 + 9 * i, 14, sampling, VOCABULARY) for i, sampling in enumerate(SAMPLINGS)]
    expected = all_tokens(LocalRing(store, (0, LAYERS)), requests)
    for seed in range(2):
        ring = LocalRing(store, (0, 2, 4, LAYERS), chunk=3 + seed)
        interrupt(ring, requests, seed, [keep] * 5)
        assert ring.tokens == expected


def test_kept_caches_spare_the_prefill(tied_model: TinyModel) -> None:
    store, rows = full_store(tied_model.directory, tied_model.digest), {}
    for keep in (True, False):
        ring = LocalRing(store, (0, 2, 4, LAYERS))
        requests = [ask(1, 40, 12, SAMPLINGS[2], VOCABULARY)]
        ring.scheduler.submit(requests[0], "gateway")
        ring.run(9)
        before = ring.rows_computed
        ring.break_ring()
        if not keep:
            ring.engines[1].free_kept()
        ring.break_ring()  # breaks again before anything was submitted: what is left is agreed again
        assert ring.engines[0].kept_lengths() == ({1: 44} if keep else {})
        ring.submit_again(requests)
        ring.run()
        assert len(ring.tokens[1]) == 12
        rows[keep] = ring.rows_computed - before
    assert rows[False] - rows[True] == 44


def test_smollm2_goes_on_with_kept_and_with_lost_caches() -> None:
    info = read_model_json(smollm2_directory())
    store = full_store(info.directory, info.digest)
    seeded = SamplingParameters(temperature=0.8, top_p=0.95, seed=5, frequency_penalty=0.3)
    requests = [ask(1, 20, 9, SamplingParameters(), 49152), ask(2, 9, 9, seeded, 49152)]
    expected = all_tokens(LocalRing(store, (0, 30), chunk=16), requests)
    ring = LocalRing(store, (0, 10, 20, 30), chunk=7)
    interrupt(ring, requests, 3, [True, False, True])
    assert ring.tokens == expected


def test_a_probe_between_ordinary_micro_batches_disturbs_nothing(tied_model: TinyModel) -> None:
    store = full_store(tied_model.directory, tied_model.digest)
    requests = [ask(i, 5 + i, 30, sampling, VOCABULARY) for i, sampling in enumerate(SAMPLINGS)]
    expected = all_tokens(LocalRing(store, (0, LAYERS)), requests)
    ring = LocalRing(store, (0, 2, 4, LAYERS))
    for each in requests:
        ring.scheduler.submit(each, "gateway")
    ids = probe_token_ids(VOCABULARY)
    for engine in ring.engines:
        engine.open(PROBE_WHOLE_ID, SamplingParameters())
        engine.open(PROBE_STEPS_ID, SamplingParameters())
    differences = []
    for entry, tokens in [
        (StepEntry(PROBE_WHOLE_ID, 0, PROBE_TOKENS, Output.ALL), ids),
        *((StepEntry(PROBE_STEPS_ID, i, 1, Output.ALL), [token]) for i, token in enumerate(ids)),
    ]:
        ring.run(1)
        result = ring.sample(ring.forward((entry,), tokens)).results[0]
        assert result.kind is TokenKind.PROBE
        differences.append(result.value)
    ring.run()
    assert ring.tokens == expected
    assert 0 < differences[-1] < EXACT_LARGEST_LOGIT_DIFFERENCE
    for engine in ring.engines:
        engine.keep_all()
        assert PROBE_WHOLE_ID not in engine.kept_lengths(), "the probe begins anew with the ring"
