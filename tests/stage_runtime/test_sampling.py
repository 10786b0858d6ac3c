"""The sampler against a copy of its definition in plain Python, and the definition's corners."""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stage_runtime.engine.sampling import Sampler, choose, uniform
from stage_runtime.link.messages import SamplingParameters


def reference_uniform(seed: int, choice: int, position: int) -> float:
    key = seed.to_bytes(8, "little") + choice.to_bytes(4, "little") + position.to_bytes(4, "little")
    return (int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little") >> 11) / 2**53


def reference_choice(
    logits: list[float], parameters: SamplingParameters, counts: Counter[int], position: int
) -> tuple[int, float]:
    """The token by the text of the definition, and how near the draw was to a boundary."""
    z = {
        t: v - (parameters.frequency_penalty * counts[t] + parameters.presence_penalty if counts[t] else 0)
        for t, v in enumerate(logits)
    }
    ranked = sorted(z, key=lambda t: (-z[t], t))
    if parameters.temperature == 0:
        return ranked[0], 1.0
    z = {t: v / parameters.temperature for t, v in z.items()}
    kept = ranked[: parameters.top_k] if parameters.top_k else ranked
    top = max(z[t] for t in kept)
    weights = {t: math.exp(z[t] - top) for t in kept}
    total = math.fsum(weights.values())
    p = {t: w / total for t, w in weights.items()}
    margin = 1.0
    if parameters.top_p < 1:
        nucleus, mass = [], 0.0
        for t in sorted(kept, key=lambda t: (-p[t], t)):
            nucleus.append(t)
            mass += p[t]
            margin = min(margin, abs(mass - parameters.top_p))
            if mass >= parameters.top_p:
                break
        kept = nucleus
    target = reference_uniform(parameters.seed, parameters.choice, position) * math.fsum(p[t] for t in kept)
    mass = 0.0
    for t in sorted(kept):
        mass += p[t]
        margin = min(margin, abs(mass - target))
        if mass > target:
            return t, margin
    raise AssertionError("the cumulative distribution ends below its total")


parameters = st.builds(
    SamplingParameters,
    temperature=st.sampled_from([0.0, 0.3, 1.0, 1.7]),
    top_p=st.sampled_from([1.0, 0.95, 0.5, 0.01]),
    top_k=st.sampled_from([0, 1, 5, 40, 1000]),
    seed=st.integers(0, 2**64 - 1),
    choice=st.integers(0, 3),
    frequency_penalty=st.sampled_from([0.0, 0.5, -1.0]),
    presence_penalty=st.sampled_from([0.0, 1.5]),
)
# quarters make many exact ties
some_logits = st.lists(st.integers(-40, 40).map(lambda v: v / 4), min_size=2, max_size=60)


@settings(max_examples=300, deadline=None)
@given(some_logits, parameters, st.lists(st.integers(0, 1), max_size=5), st.integers(0, 2**32 - 1))
def test_equals_the_definition(
    logits: list[float], chosen: SamplingParameters, answer: list[int], position: int
) -> None:
    counts = Counter(answer)
    expected, margin = reference_choice(logits, chosen, counts, position)
    if margin > 1e-12:  # nearer than that, the order of float additions decides
        assert choose(torch.tensor(logits), chosen, counts, position) == expected


@given(st.integers(0, 2**64 - 1), st.integers(0, 2**32 - 1), st.integers(0, 2**32 - 1))
def test_uniform_equals_the_definition(seed: int, choice: int, position: int) -> None:
    assert uniform(seed, choice, position) == reference_uniform(seed, choice, position)
    assert 0 <= uniform(seed, choice, position) < 1


def test_a_known_value_of_uniform_never_changes() -> None:
    assert (uniform(0, 0, 0), uniform(42, 1, 7)) == (0.0564663990004608, 0.8111586257112703)
    assert uniform(0, 0, 0) != uniform(0, 0, 1) != uniform(0, 1, 0) != uniform(1, 0, 0)


def test_greedy_takes_the_lowest_id_of_equals() -> None:
    assert choose(torch.tensor([1.0, 3.0, 3.0]), SamplingParameters(), Counter(), 0) == 1


def test_filters_keep_exactly_what_they_say() -> None:
    logits = torch.tensor([2.0, 2.0, 2.0, 2.0])
    drawn = {choose(logits, SamplingParameters(temperature=1, top_k=2, seed=seed), Counter(), 0) for seed in range(100)}
    assert drawn == {0, 1}
    nucleus = SamplingParameters(temperature=1, top_p=0.5)
    assert {choose(logits, replace(nucleus, seed=seed), Counter(), 0) for seed in range(100)} == {0, 1}


def test_draws_follow_the_distribution() -> None:
    logits = torch.tensor([0.0, 1.0, 2.0])
    sampler = Sampler(SamplingParameters(temperature=1.0, seed=5))
    drawn = Counter(sampler.next_token(logits).token_id for _ in range(4000))
    expected = torch.softmax(logits.double(), -1).tolist()
    chi_squared = sum((drawn[t] - 4000 * p) ** 2 / (4000 * p) for t, p in enumerate(expected))
    assert chi_squared < 13.8  # 2 degrees of freedom, p = 0.001; the draws are fixed by the seed


def test_penalties_count_the_answer_and_move_on() -> None:
    sampler = Sampler(SamplingParameters(frequency_penalty=2.0))
    assert [sampler.next_token(torch.tensor([3.0, 2.0, 0.0])).token_id for _ in range(4)] == [0, 1, 0, 1]


def test_logprobs_are_of_the_raw_distribution() -> None:
    logits = torch.tensor([1.0, 2.0, 2.0, -1.0])
    sampler = Sampler(SamplingParameters(temperature=0.1, top_k=1, logprobs=3))
    sample = sampler.next_token(logits)
    expected = torch.log_softmax(logits.double(), -1)
    assert sample.token_id == 1
    assert sample.logprob == pytest.approx(float(expected[1]))
    assert [a.token_id for a in sample.alternatives] == [1, 2, 0]
    assert [a.logprob for a in sample.alternatives] == pytest.approx(expected[[1, 2, 0]].tolist())
    only_chosen = Sampler(SamplingParameters(logprobs=0)).next_token(logits)
    assert only_chosen.logprob is not None
    assert only_chosen.alternatives == ()
    assert Sampler(SamplingParameters()).next_token(logits).logprob is None


@pytest.mark.parametrize("temperature", [5e-324, 1e-300, 1e-7])
def test_temperatures_too_small_to_divide_by_are_greedy(temperature: float) -> None:
    logits = torch.tensor([3e38, -3e38, 3.1e38, 0.0])
    chosen = SamplingParameters(temperature=temperature, seed=3)
    assert choose(logits, chosen, Counter(), 0) == 2
    assert choose(logits, replace(chosen, presence_penalty=1.0), Counter([0]), 1) == 2
