"""The official client against a gateway that listens with TLS on loopback."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import openai
import pytest
from tokenizers import Tokenizer

from stage_runtime.link.messages import FinishedEvent, GenerateRequest, PipelineStatus
from tests.gateway.site import EOS, KEY, MODEL, Pki, RunningGateway, Script, ScriptedPipeline, running, says, tokens_of

ANSWER = "the lazy dog € 😀 jumps"


def trust(pki: Pki) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=str(pki.ca))


def client_of(gateway: RunningGateway, key: str = KEY) -> openai.AsyncOpenAI:
    http = openai.DefaultAsyncHttpxClient(verify=trust(gateway.pki))
    return openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key=key, http_client=http, max_retries=0)


@asynccontextmanager
async def clients(
    directory: Path, pki: Pki, pipeline: ScriptedPipeline, **changes: Any
) -> AsyncIterator[openai.AsyncOpenAI]:
    async with running(directory, pki, {"main": pipeline}, **changes) as gateway, client_of(gateway) as client:
        yield client


async def test_chat(directory: Path, pki: Pki, tokenizer: Tokenizer) -> None:
    pipeline = ScriptedPipeline(says(tokenizer, ANSWER))
    async with clients(directory, pki, pipeline) as client:
        answer = await client.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "hé"}], temperature=0, seed=7
        )
    assert answer.choices[0].message.content == ANSWER
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].finish_reason == "stop"
    [request] = pipeline.requests
    prompt = "<|turn|>user\nhé<|end|>\n<|turn|>assistant\n"
    assert list(request.prompt) == tokenizer.encode(prompt, add_special_tokens=False).ids
    assert (request.sampling.seed, request.sampling.temperature, request.stop_token_ids) == (7, 0.0, (EOS,))
    assert request.max_tokens == 256 - len(request.prompt)
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(request.prompt)
    assert answer.usage.completion_tokens == len(tokenizer.encode(ANSWER).ids)


async def test_chat_streams_whole_characters_and_usage(directory: Path, pki: Pki, tokenizer: Tokenizer) -> None:
    async with clients(directory, pki, ScriptedPipeline(says(tokenizer, ANSWER))) as client:
        stream = await client.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": "hi"}],
            stream=True,
            stream_options={"include_usage": True},
        )
        chunks = [chunk async for chunk in stream]
    texts = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
    assert "".join(texts) == ANSWER
    assert len([text for text in texts if text]) > 3
    assert not any("\ufffd" in text for text in texts)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == "stop"
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == len(tokenizer.encode(ANSWER).ids)
    assert len({chunk.id for chunk in chunks}) == 1


def test_the_synchronous_client_streams_too(directory: Path, pki: Pki, tokenizer: Tokenizer) -> None:
    def ask(gateway: RunningGateway) -> str:
        with openai.DefaultHttpxClient(verify=trust(pki)) as http:
            client = openai.OpenAI(base_url=f"{gateway.url}/v1", api_key=KEY, http_client=http, max_retries=0)
            stream = client.chat.completions.create(
                model=MODEL, messages=[{"role": "user", "content": "hi"}], stream=True
            )
            whole = client.completions.create(model=MODEL, prompt="hi", max_tokens=100)
            assert whole.choices[0].text == ANSWER
            return "".join(chunk.choices[0].delta.content or "" for chunk in stream)

    async def serve() -> str:
        async with running(directory, pki, {"main": ScriptedPipeline(says(tokenizer, ANSWER))}) as gateway:
            return await asyncio.to_thread(ask, gateway)

    assert asyncio.run(serve()) == ANSWER


async def test_completions_stream_and_end_at_max_tokens(directory: Path, pki: Pki, tokenizer: Tokenizer) -> None:
    pipeline = ScriptedPipeline(says(tokenizer, ANSWER))
    async with clients(directory, pki, pipeline) as client:
        stream = await client.completions.create(model=MODEL, prompt=[5, 6, 7], max_tokens=5, stream=True)
        chunks = [chunk async for chunk in stream]
    expected = tokenizer.decode(tokenizer.encode(ANSWER).ids[:5])
    assert "".join(chunk.choices[0].text for chunk in chunks) == expected
    assert chunks[-1].choices[0].finish_reason == "length"
    assert pipeline.requests[0].prompt == (5, 6, 7)


async def test_choices_differ_and_share_the_seed(directory: Path, pki: Pki, tokenizer: Tokenizer) -> None:
    def script(request: GenerateRequest) -> Script:
        text = ["first answer", "second one"][request.sampling.choice]
        return tokens_of(tokenizer.encode(text).ids, request)

    pipeline = ScriptedPipeline(script)
    async with clients(directory, pki, pipeline) as client:
        answer = await client.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "hi"}], n=2, temperature=1.5
        )
        stream = await client.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "hi"}], n=2, stream=True
        )
        texts = ["", ""]
        async for chunk in stream:
            texts[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert [choice.message.content for choice in answer.choices] == ["first answer", "second one"]
    assert texts == ["first answer", "second one"]
    first, second = pipeline.requests[:2]
    assert first.sampling.seed == second.sampling.seed
    assert first.sequence_id != second.sequence_id
    assert pipeline.requests[2].sampling.seed != first.sampling.seed
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(first.prompt)


@pytest.mark.parametrize(("stop", "expected"), [("lazy", "the "), (["zzz", " lazy", "dog"], "the")])
async def test_stop_strings_cut_and_cancel(
    *, directory: Path, pki: Pki, tokenizer: Tokenizer, stop: str | list[str], expected: str
) -> None:
    pipeline = ScriptedPipeline(says(tokenizer, ANSWER))
    async with clients(directory, pki, pipeline) as client:
        answer = await client.completions.create(model=MODEL, prompt="hi", max_tokens=100, stop=stop, logprobs=1)
        stream = await client.completions.create(model=MODEL, prompt="hi", max_tokens=100, stop=stop, stream=True)
        streamed = "".join([chunk.choices[0].text async for chunk in stream])
    assert answer.choices[0].text == streamed == expected
    assert answer.choices[0].finish_reason == "stop"
    assert pipeline.closed == [request.sequence_id for request in pipeline.requests]
    assert answer.choices[0].logprobs is not None
    shown = "".join(answer.choices[0].logprobs.tokens or [])  # a token cut by the stop string is left out
    assert expected.startswith(shown)
    assert len(expected) - len(shown) <= 1
    assert answer.usage is not None
    assert answer.usage.completion_tokens < len(tokenizer.encode(ANSWER).ids)


async def test_logprobs_of_chat(directory: Path, pki: Pki, tokenizer: Tokenizer) -> None:
    async with clients(directory, pki, ScriptedPipeline(says(tokenizer, ANSWER))) as client:
        whole = await client.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "hi"}], logprobs=True, top_logprobs=3
        )
        stream = await client.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "hi"}], logprobs=True, top_logprobs=3, stream=True
        )
        streamed = [
            entry
            async for chunk in stream
            if chunk.choices[0].logprobs is not None
            for entry in chunk.choices[0].logprobs.content or []
        ]
    assert whole.choices[0].logprobs is not None
    entries = whole.choices[0].logprobs.content or []
    assert entries == streamed
    assert b"".join(bytes(entry.bytes or []) for entry in entries).decode() == ANSWER
    assert [entry.logprob for entry in entries] == [-0.5 * (n + 1) for n in range(len(entries))]
    assert all(len(entry.top_logprobs) == 3 for entry in entries)


async def test_logprobs_of_completions(directory: Path, pki: Pki, tokenizer: Tokenizer) -> None:
    async with clients(directory, pki, ScriptedPipeline(says(tokenizer, "the dog €"))) as client:
        answer = await client.completions.create(model=MODEL, prompt="hi", max_tokens=50, logprobs=2)
        only_chosen = await client.completions.create(model=MODEL, prompt="hi", max_tokens=50, logprobs=0)
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.tokens is not None
    assert logprobs.text_offset is not None
    assert logprobs.top_logprobs is not None
    assert logprobs.tokens[0] == "the"
    assert logprobs.tokens[-1].startswith("bytes:")
    assert logprobs.text_offset[:2] == [0, 3]
    assert all(2 <= len(top) <= 3 for top in logprobs.top_logprobs)
    assert only_chosen.choices[0].logprobs is not None
    assert only_chosen.choices[0].logprobs.top_logprobs is None


async def test_token_ids_come_when_asked_for(directory: Path, pki: Pki, tokenizer: Tokenizer) -> None:
    wanted = tokenizer.encode(ANSWER, add_special_tokens=False).ids
    async with clients(directory, pki, ScriptedPipeline(says(tokenizer, ANSWER))) as client:
        plain = await client.completions.create(model=MODEL, prompt="hi", max_tokens=50)
        body = {"return_token_ids": True}
        whole = await client.completions.create(model=MODEL, prompt="hi", max_tokens=50, extra_body=body)
        stream = await client.completions.create(model=MODEL, prompt="hi", max_tokens=50, stream=True, extra_body=body)
        streamed = [token for chunk in [c async for c in stream] for token in token_ids(chunk)]
    assert not hasattr(plain.choices[0], "token_ids")
    assert token_ids(whole) == streamed == wanted


def token_ids(answer: openai.types.Completion) -> list[int]:
    return list(getattr(answer.choices[0], "token_ids", []))


async def test_models(directory: Path, pki: Pki, tokenizer: Tokenizer) -> None:
    async with clients(directory, pki, ScriptedPipeline(says(tokenizer, ANSWER))) as client:
        assert [model.id for model in (await client.models.list()).data] == [MODEL]
        assert (await client.models.retrieve(MODEL)).owned_by == "demo"
        with pytest.raises(openai.NotFoundError):
            await client.models.retrieve("other")


async def test_errors_are_those_of_the_client(directory: Path, pki: Pki, tokenizer: Tokenizer) -> None:
    messages = [{"role": "user", "content": "hi"}]
    async with running(directory, pki, {"main": ScriptedPipeline(says(tokenizer, ANSWER))}) as gateway:
        async with client_of(gateway, "wrong") as stranger:
            with pytest.raises(openai.AuthenticationError):
                await stranger.models.list()
        async with client_of(gateway) as client:
            with pytest.raises(openai.NotFoundError) as missing:
                await client.chat.completions.create(model="gpt-5", messages=messages)  # type: ignore[arg-type]
            assert missing.value.code == "model_not_found"
            with pytest.raises(openai.BadRequestError) as refused:
                await client.chat.completions.create(model=MODEL, messages=messages, temperature=3)  # type: ignore[arg-type]
            assert refused.value.param == "temperature"
            with pytest.raises(openai.BadRequestError) as tools:
                tool = {"type": "function", "function": {"name": "f"}}
                await client.chat.completions.create(model=MODEL, messages=messages, tools=[tool])  # type: ignore[arg-type]
            assert tools.value.param == "tools"
            with pytest.raises(openai.BadRequestError, match="256 tokens") as long:
                await client.completions.create(model=MODEL, prompt=[5] * 256)
            assert long.value.code == "context_length_exceeded"
            assert long.value.request_id is not None


@pytest.mark.parametrize(
    ("reason", "error"),
    [
        ("unavailable", openai.InternalServerError),
        ("overloaded", openai.RateLimitError),
        ("invalid", openai.BadRequestError),
        ("error", openai.InternalServerError),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_failure_before_the_first_token_is_a_status(
    *, directory: Path, pki: Pki, tokenizer: Tokenizer, reason: str, error: type[openai.APIStatusError], stream: bool
) -> None:
    failed = FinishedEvent(reason, f"it was {reason}")  # type: ignore[arg-type]
    pipeline = ScriptedPipeline(says(tokenizer, "", after=failed))
    async with clients(directory, pki, pipeline, replan_wait_seconds=0.1) as client:
        with pytest.raises(error, match=f"it was {reason}") as caught:
            await client.completions.create(model=MODEL, prompt="hi", stream=stream)
    assert (caught.value.response.headers.get("Retry-After") is not None) == (reason in ("unavailable", "overloaded"))


async def test_failure_after_the_first_token_is_an_error_event(directory: Path, pki: Pki, tokenizer: Tokenizer) -> None:
    failed = FinishedEvent("unavailable", "the ring broke")
    pipeline = ScriptedPipeline(says(tokenizer, "the dog", after=failed))
    async with clients(directory, pki, pipeline, replan_wait_seconds=0.1) as client:
        stream = await client.completions.create(model=MODEL, prompt="hi", stream=True)
        seen = ""
        with pytest.raises(openai.APIError, match="the ring broke"):
            async for chunk in stream:
                seen += chunk.choices[0].text
        assert "the dog".startswith(seen)
        assert seen
        with pytest.raises(openai.InternalServerError):
            await client.completions.create(model=MODEL, prompt="hi")


async def test_a_pipeline_that_is_not_ready_is_named(directory: Path, pki: Pki, tokenizer: Tokenizer) -> None:
    down = PipelineStatus(ready=False, reason="box2 is away")
    pipeline = ScriptedPipeline(says(tokenizer, ANSWER), status=down)
    async with clients(directory, pki, pipeline, replan_wait_seconds=0.1) as client:
        with pytest.raises(openai.InternalServerError, match="box2 is away") as caught:
            await client.completions.create(model=MODEL, prompt="hi")
    assert caught.value.status_code == 503
