"""Real stage processes over TLS on loopback: tokens equal to a plain run, and what happens when things end early."""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import aclosing

import torch

from stage_runtime.engine.sampling import choose
from stage_runtime.link.messages import FinishedEvent, SamplingParameters, TokenEvent
from tests.stage_runtime.conftest import Served
from tests.stage_runtime.site import answer, connected, eventually, request, wait_ready
from tests.stage_runtime.tiny import TinyModel

PROMPTS = [[5, 9, 200], [17] * 40, list(range(3, 103)), [300], [250, 3, 3, 8, 90, 41]]


async def test_tokens_equal_a_plain_run(served: Served) -> None:
    async with connected(served.site.client()) as client:
        await eventually(lambda: client.status.largest_logit_difference is not None)  # the probe runs behind
        assert client.status.largest_logit_difference < 1e-3
        for prompt in PROMPTS:
            tokens, end = await answer(client, request(prompt, 12))
            assert tokens == served.model.greedy(prompt, 12)
            assert end == FinishedEvent("length", "", len(prompt), 12)
    await served.site.wait_kv_empty()


async def test_a_mixed_batch_equals_each_alone(served: Served) -> None:
    counts = [30, 7, 12, 25, 3]
    async with connected(served.site.client()) as client:
        together = await asyncio.gather(
            *(answer(client, request(prompt, count)) for prompt, count in zip(PROMPTS, counts, strict=True))
        )
    for prompt, count, (tokens, _) in zip(PROMPTS, counts, together, strict=True):
        assert tokens == served.model.greedy(prompt, count)


def sample_plainly(model: TinyModel, prompt: list[int], count: int, parameters: SamplingParameters) -> list[int]:
    """The sampler on the reference's logits."""
    ids, counts = list(prompt), Counter[int]()
    for position in range(count):
        token = choose(model.logits(ids)[-1], parameters, counts, position)
        counts[token] += 1
        ids.append(token)
    return ids[len(prompt) :]


async def test_seeded_tokens_equal_the_sampler_on_reference_logits(served: Served) -> None:
    async with connected(served.site.client()) as client:
        for seed in (1, 2**63 + 5):
            wanted = {
                "temperature": 0.9,
                "top_p": 0.9,
                "top_k": 50,
                "seed": seed,
                "frequency_penalty": 0.5,
                "choice": 2,
            }
            tokens, _ = await answer(client, request(PROMPTS[0], 16, **wanted))
            expected = sample_plainly(served.model, PROMPTS[0], 16, SamplingParameters(**wanted))  # type: ignore[arg-type]
            assert tokens == expected
            assert tokens != served.model.greedy(PROMPTS[0], 16)


async def test_stop_tokens_and_logprobs(served: Served) -> None:
    expected = served.model.greedy(PROMPTS[0], 8)
    stop = expected[4]
    events = []
    async with connected(served.site.client()) as client:
        async for event in client.generate(request(PROMPTS[0], 8, stop=(stop,), logprobs=2)):
            events.append(event)
    end = events.pop()
    tokens = expected[: expected.index(stop)]
    assert end == FinishedEvent("stop", "", 3, len(tokens))
    ids = list(PROMPTS[0])
    for event, token in zip(events, tokens, strict=True):
        assert isinstance(event, TokenEvent)
        logprobs = torch.log_softmax(served.model.logits(ids)[-1].double(), -1)
        assert event.token_id == token
        assert event.logprob is not None
        assert abs(event.logprob - float(logprobs[token])) < 1e-3
        assert [other.token_id for other in event.top_logprobs] == logprobs.topk(2).indices.tolist()
        ids.append(token)


async def test_a_cancel_frees_every_stage(served: Served) -> None:
    async with connected(served.site.client()) as client:
        async with aclosing(client.generate(request(PROMPTS[2], 150))) as stream:
            assert isinstance(await anext(stream), TokenEvent)
            healths = [await served.site.health(box) for box in served.site.boxes]
            assert all(health["kv_bytes"] > 0 and health["open_sequences"] == 1 for health in healths)
        await served.site.wait_kv_empty()
        tokens, _ = await answer(client, request(PROMPTS[0], 5))
        assert tokens == served.model.greedy(PROMPTS[0], 5)


async def test_a_gateway_that_vanishes_frees_every_stage(served: Served) -> None:
    async with connected(served.site.client()) as other:
        client = served.site.client()
        running = asyncio.ensure_future(client.run())
        await wait_ready(client)
        stream = client.generate(request(PROMPTS[1], 200))
        assert isinstance(await anext(stream), TokenEvent)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        rest = [event async for event in stream]
        assert isinstance(rest[-1], FinishedEvent)
        assert rest[-1].reason == "unavailable"
        await served.site.wait_kv_empty()
        assert (await answer(other, request(PROMPTS[0], 3)))[0] == served.model.greedy(PROMPTS[0], 3)


async def test_kv_is_back_at_nothing_after_200_requests(served: Served) -> None:
    async def one(number: int) -> None:
        wanted = request([3 + number % 300] * (1 + number % 50), 1 + number % 9)
        if number % 7 == 0:
            async with aclosing(client.generate(wanted)) as stream:
                await anext(stream)
            return
        _, end = await answer(client, wanted)
        assert end.reason == "length"

    async with connected(served.site.client()) as client:
        await asyncio.gather(*(one(number) for number in range(200)))
    await served.site.wait_kv_empty()
    assert all(process.poll() is None for process in served.site.processes.values())


async def test_requests_that_cannot_be_served(served: Served) -> None:
    async with connected(served.site.client()) as client:
        _, end = await answer(client, request([1] * 200, 100))
        assert end.reason == "invalid"
        assert "the limit is 256" in end.message
        _, end = await answer(client, request([320], 1))
        assert end.reason == "invalid"


async def test_more_sequences_than_fit_wait_for_their_turn(tied: Served) -> None:
    async with connected(tied.site.client()) as client:
        ends = await asyncio.gather(*(answer(client, request([4 + i], 6)) for i in range(20)))
    assert [tokens for tokens, _ in ends] == [tied.model.greedy([4 + i], 6) for i in range(20)]


async def test_the_middle_stage_dies_and_comes_back(untied: Served) -> None:
    site = untied.site
    async with connected(site.client()) as client:
        stream = client.generate(request(PROMPTS[0], 200))
        assert isinstance(await anext(stream), TokenEvent)
        site.kill("box2")
        end = [event async for event in stream][-1]
        assert isinstance(end, FinishedEvent)
        assert end.reason == "unavailable"
        assert "ring broke" in end.message
        assert not client.status.ready
        for box in ("box1", "box3"):
            assert (await site.health(box))["open_sequences"] == 0
        await eventually(lambda: "can't reach box2" in client.status.reason, lambda: client.status)
        _, end = await answer(client, request(PROMPTS[0], 3))
        assert end.reason == "unavailable"
        site.start("box2")
        await wait_ready(client)
        tokens, _ = await answer(client, request(PROMPTS[0], 9))
        assert tokens == untied.model.greedy(PROMPTS[0], 9)
        for box in site.boxes:
            await site.wait_state(box, "ready")
        await site.wait_kv_empty()  # what the others had kept was of no use without box2's part


async def test_every_stage_logs_the_request_id(tied: Served) -> None:
    wanted = request(PROMPTS[0], 2)
    async with connected(tied.site.client()) as client:
        await answer(client, wanted)
    for box in tied.site.boxes:
        assert f'"request_id": "{wanted.request_id}"' in tied.site.log(box)
