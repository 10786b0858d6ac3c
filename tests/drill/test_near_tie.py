"""What counts as a near-tie, against the real sampler: no difference that `exact` admits may be called a fault."""

from __future__ import annotations

from dataclasses import asdict

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fleet.drill.judge import StreamRun, StreamSpec, noticed, verdict
from fleet.drill.near_tie import (
    EXACT_DIFFERENCE,
    GREEDY_CANDIDATES,
    SAMPLED_TOP_K,
    Candidate,
    Margin,
    greedy_margin,
    sampled_margin,
    uniform,
)
from fleet.drill.rehearsal import Report
from fleet.drill.report import COLUMNS, as_data, lines, row
from stage_runtime.engine import sampling
from stage_runtime.link.messages import SamplingParameters

TEMPERATURE = 0.8
VOCABULARY = 64
FAR = (Candidate(5, -0.1), Candidate(6, -3.0))
NEAR = (Candidate(5, -0.7), Candidate(6, -0.7005))


def candidates(logits: torch.Tensor, count: int) -> tuple[Candidate, ...]:
    parameters = SamplingParameters(temperature=0.0, logprobs=count)
    sample = sampling.Sampler(parameters).next_token(logits)
    return tuple(Candidate(each.token_id, each.logprob) for each in sample.alternatives)


def test_the_draw_is_the_samplers() -> None:
    for seed, position in ((0, 0), (4711, 3), (2**64 - 1, 100_000)):
        assert uniform(seed, position) == sampling.uniform(seed, 0, position)


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 2**32), st.sampled_from([0.001, 0.01, 1.0, 4.0]), st.integers(0, 500), st.booleans())
def test_whatever_logits_within_the_policy_change_is_a_near_tie(
    seed: int, spread: float, position: int, greedy: bool
) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = spread * torch.randn(VOCABULARY, generator=generator)
    other = logits + EXACT_DIFFERENCE * (2 * torch.rand(VOCABULARY, generator=generator) - 1)
    parameters = SamplingParameters(
        temperature=0.0 if greedy else TEMPERATURE, top_k=0 if greedy else SAMPLED_TOP_K, seed=seed
    )
    chosen = [sampling.choose(each, parameters, {}, position) for each in (logits, other)]  # type: ignore[arg-type]
    if greedy:
        margin = greedy_margin(candidates(logits, GREEDY_CANDIDATES))
    else:
        shown = candidates(logits, SAMPLED_TOP_K + 1)
        margin = sampled_margin(shown, temperature=TEMPERATURE, seed=seed, position=position)
    assert margin is not None
    assert chosen[0] == chosen[1] or margin.is_near_tie


def test_usual_choices_are_no_near_ties() -> None:
    generator = torch.Generator().manual_seed(1)
    near = 0
    for position in range(300):
        logits = 4 * torch.randn(VOCABULARY, generator=generator)
        margin = sampled_margin(
            candidates(logits, SAMPLED_TOP_K + 1), temperature=TEMPERATURE, seed=9, position=position
        )
        greedy = greedy_margin(candidates(logits, GREEDY_CANDIDATES))
        assert margin is not None
        assert greedy is not None
        near += margin.is_near_tie + greedy.is_near_tie
    assert near <= 15


def test_what_the_gateway_does_not_say_is_not_judged() -> None:
    assert greedy_margin(FAR[:1]) is None
    assert sampled_margin([Candidate(None, -1.0)] * 20, temperature=1.0, seed=1, position=0) is None
    assert sampled_margin([Candidate(1, -1.0)] * 19, temperature=1.0, seed=1, position=0) is None


GREEDY = StreamSpec("greedy-1", "hi", 0.0, 1, 20)
SEEDED = StreamSpec("seeded-1", "hi", TEMPERATURE, 1, 20)


def run(tokens: tuple[int, ...], second: tuple[Candidate, ...] = FAR, reason: str | None = "length") -> StreamRun:
    shown = (FAR, second, FAR, FAR, FAR)[: len(tokens)]
    return StreamRun(tokens, tuple(map(float, range(len(tokens)))), reason, "", shown)


@pytest.mark.parametrize(
    ("spec", "reference", "disturbed", "near_tie", "fault"),
    [
        (GREEDY, run((1, 5, 3, 4), NEAR), run((1, 6, 7, 8)), True, False),
        (GREEDY, run((1, 5, 3, 4), FAR), run((1, 6, 7, 8)), False, True),
        (GREEDY, run((1, 5, 3, 4), NEAR), run((1,)), True, False),  # it took the end instead
        (GREEDY, run((1,), FAR, "stop"), run((1, 5, 3), NEAR), True, False),  # or another token instead of the end
        (GREEDY, run((1, 5, 3, 4), NEAR), run((1, 6), reason=None), True, True),  # a near-tie excuses no broken answer
        (GREEDY, run((1, 5, 3, 4, 9), NEAR), run((1, 3, 4, 9, 10)), False, True),  # nor a lost token
        (SEEDED, run((1, 5, 3, 4), NEAR), run((1, 6, 7, 8)), False, True),  # not enough is known of it
        (GREEDY, run((1, 5, 3, 4), NEAR), run((1, 5, 3, 4), NEAR), False, False),
    ],
)
def test_a_near_tie_is_counted_and_shown_and_no_fault(
    spec: StreamSpec, reference: StreamRun, disturbed: StreamRun, near_tie: bool, fault: bool
) -> None:
    found = verdict(spec, reference, disturbed)
    assert (found.near_tie, noticed([found], "exact")) == (near_tie, fault)
    report = Report("killed", (found,), noticed([found], "exact"), (), 1.0, "", ())
    assert row(found)[COLUMNS.index("near-tie")] == ("yes" if near_tie else "")
    said = "\n".join(lines(report, "box1"))
    assert ("a near-tie, which `exact` admits" in said) == near_tie
    assert ("nothing else" in said) == (not near_tie and not fault)
    assert as_data(report, "kill", "box1")["streams"][0]["margin"] == (found.margin and asdict(found.margin))


def test_a_margin_in_words() -> None:
    assert str(Margin(0.0005, 0.002, "logit")) == "logit 5.0e-04 of 2.0e-03"
