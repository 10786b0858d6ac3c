"""Streams that can be resumed: they go on without their client and over restarts of the gateway."""

from __future__ import annotations

import asyncio
import json
import shutil
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest
from tokenizers import Tokenizer

from fleet.gateway import streams
from fleet.gateway.database import JOURNAL_FILE
from stage_runtime.link.messages import FinishedEvent, GenerateRequest, PipelineStatus, TokenEvent
from tests.gateway.site import (
    KEY,
    MODEL,
    OTHER_KEY,
    Pki,
    RunningGateway,
    Script,
    ScriptedPipeline,
    breaking,
    route,
    running,
    says,
    tokens_of,
)
from tests.gateway.test_http import scrape, session, trust, until
from tests.gateway.test_openai_client import client_of

TEXT = "the quick € brown fox 😀 jumps over the lazy dog"
RESUME = {"Fleet-Resume-Seconds": "30"}
PROMPT: dict[str, Any] = {"model": MODEL, "prompt": "hi", "max_tokens": 200, "stream": True}
TWO = {
    **PROMPT,
    "n": 2,
    "logprobs": 2,
    "stop": ["lazy"],
    "return_token_ids": True,
    "stream_options": {"include_usage": True},
}


class Gated:
    """A model that says a text, one token for each time that the test lets it; resubmissions go on."""

    def __init__(self, tokenizer: Tokenizer, text: str = TEXT) -> None:
        self.ids = tokenizer.encode(text, add_special_tokens=False).ids
        self.gates = [asyncio.Event() for _ in range(len(self.ids) + 2)]

    def let(self, tokens: int) -> None:
        for gate in self.gates[:tokens]:
            gate.set()

    def script(self, request: GenerateRequest) -> Script:
        start = len(request.generated)
        assert list(request.generated) == self.ids[:start]
        events = list(tokens_of(self.ids, request))[start:]
        return [part for place, event in enumerate(events) for part in (self.gates[start + place], event)]


def events_in(raw: bytes) -> list[str]:
    """Events, without comments."""
    lines = [line for line in raw.decode().split("\n") if not line.startswith(":")]
    return [event for event in "\n".join(lines).split("\n\n") if event]


async def get(
    http: aiohttp.ClientSession, gateway: RunningGateway, stream_id: str, after: int | str | None = None
) -> tuple[int, bytes]:
    headers = {} if after is None else {"Last-Event-ID": str(after)}
    async with http.get(f"{gateway.url}/v1/streams/{stream_id}", headers=headers) as response:
        return response.status, await response.read()


async def start(http: aiohttp.ClientSession, gateway: RunningGateway, **changes: Any) -> aiohttp.ClientResponse:
    body = {**PROMPT, **changes}
    return await http.post(f"{gateway.url}/v1/completions", json=body, headers=RESUME)


async def read_events(response: aiohttp.ClientResponse, count: int) -> list[str]:
    return [(await response.content.readuntil(b"\n\n")).decode().removesuffix("\n\n") for _ in range(count)]


async def test_a_stream_goes_on_without_its_client_and_is_told_again(
    directory: Path, pki: Pki, tokenizer: Tokenizer
) -> None:
    model = Gated(tokenizer)
    pipeline = ScriptedPipeline(model.script)
    async with running(directory, pki, {"main": pipeline}) as gateway, session(pki) as http:
        response = await start(http, gateway, **TWO)  # headers come before the first token
        assert (response.status, response.headers["Fleet-Resume-Seconds"]) == (200, "30")
        stream_id = response.headers["Fleet-Stream-Id"]
        model.let(4)
        seen = await read_events(response, 4)
        response.close()
        live = asyncio.ensure_future(get(http, gateway, stream_id, 2))
        other = asyncio.ensure_future(get(http, gateway, stream_id))
        model.let(99)
        (status, rest), (_, whole) = await live, await other
        again = [await get(http, gateway, stream_id, after) for after in (0, 3, 10_000)]
        metrics = await scrape(gateway)
    assert pipeline.closed == [request.sequence_id for request in pipeline.requests]  # by the stop string alone
    events = events_in(whole)
    assert status == 200
    assert events[:4] == seen
    assert events_in(rest) == events[2:]
    assert [events_in(raw) for _, raw in again] == [events, events[3:], events[-1:]]
    assert events[-1] == f"id: {len(events)}\ndata: [DONE]"
    assert {json.loads(event.split("data: ")[1])["id"] for event in events[:-1]} == {stream_id}
    assert metrics["fleet_gateway_resumed_streams_total", ()] == 5
    assert metrics["fleet_gateway_open_resumable_streams", ()] == 1
    assert metrics["fleet_gateway_requests_total", (("endpoint", "streams"), ("outcome", "ok"))] == 5


def crashed_copy(directory: Path, name: str) -> Path:
    """The journal as a kill leaves it, in a directory of its own."""
    copy = directory / name
    shutil.copytree(directory / "journal", copy)
    return copy


@pytest.mark.parametrize("tokens", [0, 1, 3, 7, 14])
async def test_after_a_crash_the_rest_is_exactly_the_rest(
    directory: Path, pki: Pki, tokenizer: Tokenizer, tokens: int
) -> None:
    before, after = Gated(tokenizer), Gated(tokenizer)
    first = ScriptedPipeline(before.script)
    async with running(directory, pki, {"main": first}) as gateway, session(pki) as http:
        response = await start(http, gateway, **TWO)
        stream_id = response.headers["Fleet-Stream-Id"]
        await until(lambda: len(first.requests) == 2)
        before.let(tokens)
        seen = await read_events(response, min(tokens, 5))
        copy = crashed_copy(directory, "crashed")
        response.close()
    pipeline = ScriptedPipeline(after.script)
    after.let(99)
    async with (
        running(directory, pki, {"main": pipeline}, journal_directory=str(copy)) as gateway,
        session(pki) as http,
    ):
        _, whole = await get(http, gateway, stream_id)
        _, rest = await get(http, gateway, stream_id, len(seen))
    events = events_in(whole)
    assert events[: len(seen)] == seen
    assert events_in(rest) == events[len(seen) :]
    texts = ["", ""]
    for event in events[:-1]:
        for choice in json.loads(event.split("data: ")[1])["choices"]:
            texts[choice["index"]] += choice["text"]
    assert texts == [TEXT[: TEXT.index("lazy")]] * 2
    assert len(pipeline.requests) == 2
    async with (
        running(directory, pki, {"main": pipeline}, journal_directory=str(copy)) as gateway,
        session(pki) as http,
    ):
        _, rest = await get(http, gateway, stream_id, 1)  # it ended before this restart: told from the journal alone
        assert rest == b"\n\n".join(map(str.encode, events[1:])) + b"\n\n"
    assert len(pipeline.requests) == 2


async def test_a_graceful_stop_leaves_streams_to_the_next_start(
    directory: Path, pki: Pki, tokenizer: Tokenizer
) -> None:
    first, second = Gated(tokenizer), Gated(tokenizer)
    async with running(directory, pki, {"main": ScriptedPipeline(first.script)}) as gateway, session(pki) as http:
        response = await start(http, gateway)
        first.let(3)
        await read_events(response, 3)
        stream_id = response.headers["Fleet-Stream-Id"]
        response.close()
    second.let(99)
    async with running(directory, pki, {"main": ScriptedPipeline(second.script)}) as gateway, session(pki) as http:
        _, raw = await get(http, gateway, stream_id)
    texts = [json.loads(event.split("data: ")[1])["choices"][0]["text"] for event in events_in(raw)[:-1]]
    assert "".join(texts) == TEXT


async def test_an_answer_that_is_not_streamed_can_be_resumed_too(
    directory: Path, pki: Pki, tokenizer: Tokenizer
) -> None:
    pipeline = ScriptedPipeline(breaking(lambda _: tokenizer.encode(TEXT).ids, [0, 2, 5]))
    async with running(directory, pki, {"main": pipeline}) as gateway, session(pki) as http:
        response = await start(http, gateway, stream=False)
        body = await response.json()
        assert body["choices"][0]["text"] == TEXT
        status, raw = await get(http, gateway, response.headers["Fleet-Stream-Id"])
    assert (status, response.headers["Fleet-Stream-Id"]) == (200, body["id"])
    texts = [json.loads(event.split("data: ")[1])["choices"][0]["text"] for event in events_in(raw)[:-1]]
    assert "".join(texts) == TEXT


async def test_a_failure_is_told_again(directory: Path, pki: Pki, tokenizer: Tokenizer) -> None:
    pipeline = ScriptedPipeline(says(tokenizer, "one", after=FinishedEvent("error", "boom")))
    async with running(directory, pki, {"main": pipeline}) as gateway, session(pki) as http:
        response = await start(http, gateway)
        raw = await response.read()
        assert (await get(http, gateway, response.headers["Fleet-Stream-Id"]))[1] == raw
    async with running(directory, pki, {"main": pipeline}) as gateway, session(pki) as http:
        assert (await get(http, gateway, response.headers["Fleet-Stream-Id"]))[1] == raw
    assert json.loads(events_in(raw)[-2].split("data: ")[1])["error"]["message"] == "boom"
    assert len(pipeline.requests) == 1


@pytest.mark.parametrize("value", ["0", "-1", "1.5", "", "ten", "9" * 40, "٣"])
async def test_malformed_headers_are_400(directory: Path, pki: Pki, tokenizer: Tokenizer, value: str) -> None:
    async with (
        running(directory, pki, {"main": ScriptedPipeline(says(tokenizer, "x"))}) as gateway,
        session(pki) as http,
    ):
        url = f"{gateway.url}/v1/completions"
        response = await http.post(url, json=PROMPT, headers={"Fleet-Resume-Seconds": value})
        assert (response.status, (await response.json())["error"]["param"]) == (400, "Fleet-Resume-Seconds")
        if value != "0":
            response = await start(http, gateway)
            status, raw = await get(http, gateway, response.headers["Fleet-Stream-Id"], value)
            assert (status, json.loads(raw)["error"]["param"]) == (400, "Last-Event-ID")


async def test_the_longest_time_and_the_most_streams(directory: Path, pki: Pki, tokenizer: Tokenizer) -> None:
    pipeline = ScriptedPipeline(says(tokenizer, "x"))
    changes = {"resume_max_streams": 1, "resume_max_seconds": 1}
    async with running(directory, pki, {"main": pipeline}, **changes) as gateway, session(pki) as http:
        response = await start(http, gateway)
        await response.read()
        assert response.headers["Fleet-Resume-Seconds"] == "1"
        refused = await start(http, gateway)
        assert (refused.status, refused.headers["Retry-After"]) == (429, "2")
        assert "1 resumable streams are kept" in (await refused.json())["error"]["message"]
        assert (await http.post(f"{gateway.url}/v1/completions", json=PROMPT)).status == 200
        stream_id = response.headers["Fleet-Stream-Id"]
        while (answered := await get(http, gateway, stream_id))[0] == 200:  # noqa: ASYNC110 - only time ends it
            await asyncio.sleep(0.05)
        status, raw = answered
        assert (status, json.loads(raw)["error"]["code"]) == (410, "stream_expired")
        assert (await start(http, gateway)).status == 200  # its place is free again
        unknown = json.loads((await get(http, gateway, "cmpl-nothing"))[1])["error"]
        assert unknown["code"] == "stream_unknown"


async def test_another_key_learns_nothing(directory: Path, pki: Pki, tokenizer: Tokenizer) -> None:
    async with (
        running(directory, pki, {"main": ScriptedPipeline(says(tokenizer, "x"))}) as gateway,
        session(pki) as http,
    ):
        response = await start(http, gateway)
        await response.read()
        async with session(pki, headers={"Authorization": f"Bearer {OTHER_KEY}"}) as stranger:
            theirs = await get(stranger, gateway, response.headers["Fleet-Stream-Id"])
            nobodys = await get(stranger, gateway, "cmpl-" + "0" * 32)
        async with session(pki, headers={}) as nobody:
            assert (await get(nobody, gateway, response.headers["Fleet-Stream-Id"]))[0] == 401
        assert (await get(http, gateway, response.headers["Fleet-Stream-Id"]))[0] == 200
    assert theirs == nobodys
    assert theirs[0] == 410


async def test_other_methods_leave_the_connection_in_order(directory: Path, pki: Pki, tokenizer: Tokenizer) -> None:
    async with (
        running(directory, pki, {"main": ScriptedPipeline(says(tokenizer, "x"))}) as gateway,
        session(pki) as http,
    ):
        response = await start(http, gateway)
        stream_id, raw = response.headers["Fleet-Stream-Id"], await response.read()
        for method in ("HEAD", "DELETE", "POST", "PUT"):
            async with http.request(method, f"{gateway.url}/v1/streams/{stream_id}") as refused:
                assert refused.status == 405
            assert await get(http, gateway, stream_id) == (200, raw)


async def test_readers_are_bounded(directory: Path, pki: Pki, tokenizer: Tokenizer) -> None:
    model = Gated(tokenizer)
    async with running(directory, pki, {"main": ScriptedPipeline(model.script)}) as gateway, session(pki) as http:
        response = await start(http, gateway)
        url = f"{gateway.url}/v1/streams/{response.headers['Fleet-Stream-Id']}"
        readers = [await http.get(url) for _ in range(streams.READERS_OF_A_STREAM)]
        assert (await http.get(url)).status == 429
        readers[0].close()
        model.let(99)
        raws = [await reader.read() for reader in readers[1:]]
        assert len(set(raws)) == 1
        assert (await http.get(url)).status == 200


async def test_time_left_survives_restarts_and_no_clock_is_asked(
    directory: Path, pki: Pki, tokenizer: Tokenizer
) -> None:
    pipeline = ScriptedPipeline(says(tokenizer, "x"))
    file = directory / "journal" / JOURNAL_FILE
    stream_id = ""

    def row(change: str = "") -> tuple[float, int]:
        with sqlite3.connect(file) as connection:
            if change:
                connection.execute(change)
            found: tuple[float, int] = connection.execute(
                "SELECT remaining_seconds, length IS NOT NULL FROM streams WHERE id=?", (stream_id,)
            ).fetchone()
        connection.close()
        return found

    async with running(directory, pki, {"main": pipeline}) as gateway, session(pki) as http:
        response = await start(http, gateway)
        await response.read()
        stream_id = response.headers["Fleet-Stream-Id"]
        while not row()[1]:  # noqa: ASYNC110 - the client hears of the end a moment before the journal has it
            await asyncio.sleep(0.01)
    assert row("UPDATE streams SET ended_unix_seconds=1, admitted_unix_seconds=1") == (30.0, 1)
    for _ in range(2):
        async with running(directory, pki, {"main": pipeline}) as gateway, session(pki) as http:
            assert (await get(http, gateway, stream_id))[0] == 200
    remaining, _ = row()
    row("UPDATE streams SET remaining_seconds=2")
    assert 20 < remaining < 27.1  # each start costs a tenth of the 30 s
    async with running(directory, pki, {"main": pipeline}) as gateway, session(pki) as http:
        assert (await get(http, gateway, stream_id))[0] == 410


async def test_a_damaged_journal_is_set_aside(
    directory: Path, pki: Pki, tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    file = directory / "journal" / JOURNAL_FILE
    file.parent.mkdir()
    file.write_bytes(b"no database" * 1000)
    pipeline = ScriptedPipeline(says(tokenizer, "x"))
    async with running(directory, pki, {"main": pipeline}) as gateway, session(pki) as http:
        response = await start(http, gateway)
        raw = await response.read()
        assert (await get(http, gateway, response.headers["Fleet-Stream-Id"]))[1] == raw
    assert "is damaged" in caplog.text
    assert file.with_name(JOURNAL_FILE + ".damaged").read_bytes().startswith(b"no database")


async def test_a_row_that_can_not_be_read_costs_that_stream_alone(
    directory: Path, pki: Pki, tokenizer: Tokenizer
) -> None:
    pipeline = ScriptedPipeline(says(tokenizer, "x"))
    async with running(directory, pki, {"main": pipeline}) as gateway, session(pki) as http:
        ids = []
        for _ in range(2):
            response = await start(http, gateway)
            await response.read()
            ids.append(response.headers["Fleet-Stream-Id"])
    with sqlite3.connect(directory / "journal" / JOURNAL_FILE) as connection:
        connection.execute("UPDATE streams SET record='{}' WHERE id=?", (ids[0],))
    connection.close()
    async with running(directory, pki, {"main": pipeline}) as gateway, session(pki) as http:
        assert [(await get(http, gateway, stream_id))[0] for stream_id in ids] == [410, 200]


async def test_a_journal_that_takes_nothing_costs_only_resumable_requests(
    directory: Path, pki: Pki, tokenizer: Tokenizer
) -> None:
    (directory / "journal").write_text("a file where the directory should be")
    pipeline = ScriptedPipeline(says(tokenizer, "x"))
    async with running(directory, pki, {"main": pipeline}) as gateway, session(pki) as http:
        refused = await start(http, gateway)
        assert (refused.status, (await refused.json())["error"]["code"]) == (507, "journal_unavailable")
        assert (await http.post(f"{gateway.url}/v1/completions", json=PROMPT)).status == 200
        metrics = await scrape(gateway)
        assert metrics["fleet_gateway_journal_failures_total", ()] >= 1
        assert metrics["fleet_gateway_open_resumable_streams", ()] == 0
        assert metrics["fleet_gateway_active_sequences", (("pipeline", "main"),)] == 0
        (directory / "journal").unlink()
        assert (await start(http, gateway)).status == 200  # as soon as it is mended


async def test_a_disk_that_fills_up_in_mid_answer_cuts_no_answer(
    directory: Path, pki: Pki, tokenizer: Tokenizer
) -> None:
    model = Gated(tokenizer)
    async with running(directory, pki, {"main": ScriptedPipeline(model.script)}) as gateway, session(pki) as http:
        response = await start(http, gateway)
        model.let(2)
        await read_events(response, 2)
        blocker = sqlite3.connect(directory / "journal" / JOURNAL_FILE)
        blocker.execute("CREATE TRIGGER full BEFORE INSERT ON entries BEGIN SELECT RAISE(FAIL, 'disk is full'); END")
        blocker.commit()
        blocker.close()
        model.let(99)
        rest = await response.read()
        texts = [json.loads(event.split("data: ")[1])["choices"][0]["text"] for event in events_in(rest)[:-1]]
        assert TEXT.endswith("".join(texts))
        status, whole = await get(http, gateway, response.headers["Fleet-Stream-Id"])  # from memory
        assert (status, events_in(whole)[2:]) == (200, events_in(rest))
    async with running(directory, pki, {"main": ScriptedPipeline(model.script)}) as gateway, session(pki) as http:
        assert (await get(http, gateway, response.headers["Fleet-Stream-Id"]))[0] == 410


async def test_comments_come_while_nothing_else_does(directory: Path, pki: Pki, tokenizer: Tokenizer) -> None:
    model = Gated(tokenizer)
    pipeline = ScriptedPipeline(model.script)
    async with running(directory, pki, {"main": pipeline}, keep_alive_seconds=0.05) as gateway, session(pki) as http:
        response = await http.post(f"{gateway.url}/v1/completions", json=PROMPT)  # the first comment brings the headers
        assert await response.content.readline() == b": keep-alive\n"
        model.let(1)
        while (line := await response.content.readline()) == b": keep-alive\n":
            pass
        assert line == b"id: 1\n"
        assert (await response.content.readline()).startswith(b"data: ")
        assert await response.content.readline() == b"\n"
        gateway.apply(route(3, state="replanning", reason="box2 is dead"))
        while (line := await response.content.readline()) == b": keep-alive\n":
            pass
        assert line == b": waiting for a new plan\n"
        gateway.apply(route(4))
        model.let(99)
        events = events_in(await response.read())
    assert [event.split("\n")[0] for event in events] == [f"id: {n + 2}" for n in range(len(events))]


async def test_the_official_client_takes_comments_anywhere(directory: Path, pki: Pki, tokenizer: Tokenizer) -> None:
    model = Gated(tokenizer)
    pipeline = ScriptedPipeline(model.script)
    async with (
        running(directory, pki, {"main": pipeline}, keep_alive_seconds=0.02) as gateway,
        client_of(gateway) as client,
    ):
        stream = await client.completions.create(model=MODEL, prompt="hi", max_tokens=200, stream=True)
        text = ""
        for tokens in (1, 2, 3, 99):
            model.let(tokens)
            if tokens < 99:
                text += (await anext(aiter(stream))).choices[0].text
                await asyncio.sleep(0.05)
        text += "".join([chunk.choices[0].text async for chunk in stream])
    assert text == TEXT


async def test_replanning_is_told_at_once_but_brings_no_headers(
    directory: Path, pki: Pki, tokenizer: Tokenizer
) -> None:
    model = Gated(tokenizer)
    pipeline = ScriptedPipeline(model.script)
    changes = {"keep_alive_seconds": 1000, "replan_wait_seconds": 0.1}
    async with running(directory, pki, {"main": pipeline}, **changes) as gateway, session(pki) as http:
        model.let(1)
        response = await http.post(f"{gateway.url}/v1/completions", json=PROMPT)
        await read_events(response, 1)
        gateway.apply(route(3, state="replanning"))
        assert await response.content.readline() == b": waiting for a new plan\n"
        response.close()
        refused = await http.post(f"{gateway.url}/v1/completions", json=PROMPT)  # waits, then a plain error
        assert refused.status == 503


@pytest.mark.parametrize("place", range(0, 16, 3))
async def test_failover_under_everything_a_client_may_ask_for(
    directory: Path, pki: Pki, tokenizer: Tokenizer, place: int
) -> None:
    """n, stop strings, log-probabilities, token ids, penalties, seeds: as if nothing had happened."""
    ids = tokenizer.encode(TEXT, add_special_tokens=False).ids
    body = {**TWO, "seed": 5, "temperature": 0.8, "frequency_penalty": 0.5}

    async def ask(script: Callable[[GenerateRequest], Script]) -> list[Any]:
        pipeline = ScriptedPipeline(script)
        async with running(directory, pki, {"main": pipeline}) as gateway, session(pki) as http:
            response = await http.post(f"{gateway.url}/v1/completions", json=body)
            chunks = [json.loads(event.split("data: ")[1]) for event in events_in(await response.read())[:-1]]
        assert {(each.sampling.seed, each.sampling.frequency_penalty) for each in pipeline.requests} == {(5, 0.5)}
        by_choice: dict[int, list[Any]] = {}
        for chunk in chunks[:-1]:
            by_choice.setdefault(chunk["choices"][0]["index"], []).append(chunk["choices"])
        return [by_choice, chunks[-1]["usage"]]

    assert await ask(breaking(lambda _: ids, [place, place, place + 1])) == await ask(breaking(lambda _: ids, []))


async def test_a_refused_pipeline_says_what_is_missing(directory: Path, pki: Pki, tokenizer: Tokenizer) -> None:
    pipeline = ScriptedPipeline(says(tokenizer, "x"), status=PipelineStatus(ready=True, reason="", epoch=3))
    async with running(directory, pki, {"main": pipeline}) as gateway, session(pki) as http:
        gateway.apply(route(3, state="refused", missing_mebibytes={"box1": "12"}, retry_after_seconds=7))
        response = await http.post(f"{gateway.url}/v1/completions", json=PROMPT)
        assert (response.status, response.headers["Retry-After"]) == (503, "7")
        assert "box1 lacks 12 MiB" in (await response.json())["error"]["message"]
        key = (("pipeline", "main"),)
        assert (await scrape(gateway))["fleet_gateway_pipeline_refused_flag", key] == 1
        gateway.apply(route(4, degraded="box2 is out"))
        assert (await http.post(f"{gateway.url}/v1/completions", json=PROMPT)).status == 200
        metrics = await scrape(gateway)
        assert metrics["fleet_gateway_pipeline_refused_flag", key] == 0
        assert metrics["fleet_gateway_route_epoch_number", key] == 4
        async with http.get(f"{gateway.url}/health") as health:
            assert (await health.json())["pipelines"]["main"]["degraded"] == "box2 is out"


async def test_a_slow_reader_does_not_hold_the_pipeline_up(directory: Path, pki: Pki, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("x").ids * 180

    def script(request: GenerateRequest) -> Script:
        return [event for event in tokens_of(ids, request) if isinstance(event, TokenEvent)] + [FinishedEvent("stop")]

    pipeline = ScriptedPipeline(script)
    async with running(directory, pki, {"main": pipeline}) as gateway, session(pki) as http:
        response = await start(http, gateway)
        await until(lambda: gateway.gateway.backends[0].queue.active == 0)  # made, though nobody has read a byte
        assert len(events_in(await response.read())) == 180 + 2


async def test_the_official_client_resumes_as_the_docs_say(directory: Path, pki: Pki, tokenizer: Tokenizer) -> None:
    pipeline = ScriptedPipeline(says(tokenizer, TEXT))

    def ask(gateway: RunningGateway) -> str:
        with openai.DefaultHttpxClient(verify=trust(pki)) as http:
            client = openai.OpenAI(base_url=f"{gateway.url}/v1", api_key=KEY, http_client=http, max_retries=0)
            stream = client.completions.create(
                model=MODEL, prompt="hi", max_tokens=200, stream=True, extra_headers={"Fleet-Resume-Seconds": "60"}
            )
            stream_id, count, text = stream.response.headers["Fleet-Stream-Id"], 0, ""
            for chunk in stream:
                count, text = count + 1, text + chunk.choices[0].text
                if count == 5:
                    break
            stream.close()
            for chunk in client.get(
                f"/streams/{stream_id}",
                cast_to=openai.types.Completion,
                stream=True,
                stream_cls=openai.Stream[openai.types.Completion],
                options={"headers": {"Last-Event-ID": str(count)}},
            ):
                text += chunk.choices[0].text
            return text

    async with running(directory, pki, {"main": pipeline}) as gateway:
        assert await asyncio.to_thread(ask, gateway) == TEXT
