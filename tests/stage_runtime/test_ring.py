"""Real stage processes over TLS on loopback: tokens equal to a plain run, and what happens when things end early."""

from __future__ import annotations

import asyncio

import pytest

from tests.stage_runtime.site import StageSite, answer, connected, request
from tests.stage_runtime.tiny import TinyModel

PROMPTS = [[5, 9, 200], [17] * 40, list(range(3, 103)), [300], [250, 3, 3, 8, 90, 41]]


@pytest.mark.parametrize("kind", ["tied", "untied"])
async def test_tokens_equal_a_plain_run(kind: str, request_fixture: tuple[StageSite, TinyModel]) -> None:
    site, model = request_fixture
    async with connected(site.client()) as client:
        for prompt in PROMPTS:
            tokens, end = await answer(client, request(prompt, 12))
            assert tokens == model.greedy(prompt, 12)
            assert (end.reason, end.prompt_tokens, end.completion_tokens) == ("length", len(prompt), 12)
    await site.wait_kv_empty()


@pytest.fixture
def request_fixture(kind: str, request: pytest.FixtureRequest) -> tuple[StageSite, TinyModel]:
    return request.getfixturevalue(f"{kind}_site"), request.getfixturevalue(f"{kind}_model")


@pytest.mark.parametrize("kind", ["tied", "untied"])
async def test_a_mixed_batch_equals_each_alone(kind: str, request_fixture: tuple[StageSite, TinyModel]) -> None:
    site, model = request_fixture
    async with connected(site.client()) as client:
        counts = [30, 7, 12, 25, 3]
        together = await asyncio.gather(
            *(answer(client, request(prompt, count)) for prompt, count in zip(PROMPTS, counts, strict=True))
        )
    for prompt, count, (tokens, _) in zip(PROMPTS, counts, together, strict=True):
        assert tokens == model.greedy(prompt, count)
