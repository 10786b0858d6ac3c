"""What the official client does not show: headers, bytes of the stream, cancelling, limits, metrics, authentication."""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from prometheus_client.parser import text_string_to_metric_families
from tokenizers import Tokenizer

from fleet.gateway.app import MAX_BODY_BYTES
from stage_runtime.link.messages import FinishedEvent, GenerateRequest, PipelineStatus, TokenEvent
from tests.gateway.site import (
    KEY,
    MODEL,
    Pki,
    RunningGateway,
    Script,
    ScriptedPipeline,
    route,
    running,
    says,
    tokens_of,
)

HEADERS = {"Authorization": f"Bearer {KEY}"}
PROMPT = {"model": MODEL, "prompt": "hi"}
SERVER_NAME = "control.demo.fleet.internal"


def trust(pki: Pki, *, operator: bool = False) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=str(pki.ca))
    if operator:
        context.load_cert_chain(pki.operator_certificate, pki.operator_key)
    return context


def session(pki: Pki, *, operator: bool = False, headers: dict[str, str] | None = None) -> aiohttp.ClientSession:
    connector = aiohttp.TCPConnector(ssl=trust(pki, operator=operator))
    return aiohttp.ClientSession(connector=connector, headers=HEADERS if headers is None else headers)


def series(text: str) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


async def scrape(gateway: RunningGateway) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    async with session(gateway.pki) as http, http.get(f"{gateway.url}/metrics") as response:
        return series(await response.text())


async def until(condition: Callable[[], bool]) -> None:
    """Yield to the loop until something holds."""
    while not condition():  # noqa: ASYNC110 - what is waited for has no event
        await asyncio.sleep(0.001)


async def until_queued(gateway: RunningGateway, count: int) -> None:
    """Scrape until so many sequences wait in the gateway."""
    while (await scrape(gateway))["fleet_gateway_queued_sequences", (("pipeline", "main"),)] != count:
        pass


async def test_stream_bytes(directory: Path, pki: Pki, tokenizer: Tokenizer) -> None:
    async with (
        running(directory, pki, {"main": ScriptedPipeline(says(tokenizer, "one two"))}) as gateway,
        session(pki) as http,
    ):
        headers = {"X-Request-Id": "abc-1"}
        async with http.post(
            f"{gateway.url}/v1/completions", json={**PROMPT, "stream": True}, headers=headers
        ) as response:
            raw = (await response.read()).decode()
            assert response.headers["Content-Type"].startswith("text/event-stream")
            assert response.headers["X-Request-Id"] == "abc-1"
            stream_id = response.headers["Fleet-Stream-Id"]
    events = raw.removesuffix("\n\n").split("\n\n")
    assert [event.split("\n")[0] for event in events] == [f"id: {n + 1}" for n in range(len(events))]
    assert events[-1].endswith("\ndata: [DONE]")
    assert {json.loads(event.split("\ndata: ")[1])["id"] for event in events[:-1]} == {stream_id}


async def test_an_error_event_is_followed_by_done_and_the_end(directory: Path, pki: Pki, tokenizer: Tokenizer) -> None:
    pipeline = ScriptedPipeline(says(tokenizer, "one", after=FinishedEvent("error", "boom")))
    async with running(directory, pki, {"main": pipeline}) as gateway, session(pki) as http:
        async with http.post(f"{gateway.url}/v1/completions", json={**PROMPT, "stream": True}) as response:
            events = (await response.read()).decode().removesuffix("\n\n").split("\n\n")
            assert response.status == 200
        metrics = await scrape(gateway)
    error = json.loads(events[-2].split("\ndata: ")[1])["error"]
    assert error == {"message": "boom", "type": "server_error", "param": None, "code": "internal_error"}
    assert events[-1].endswith("data: [DONE]")
    assert metrics["fleet_gateway_requests_total", (("endpoint", "completions"), ("outcome", "error"))] == 1


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_goes_away_cancels(directory: Path, pki: Pki, tokenizer: Tokenizer, stream: bool) -> None:
    never = asyncio.Event()
    ids = tokenizer.encode("one two").ids

    def script(request: GenerateRequest) -> Script:
        return [*[event for event in tokens_of(ids, request) if isinstance(event, TokenEvent)], never]

    pipeline = ScriptedPipeline(script)
    async with running(directory, pki, {"main": pipeline}) as gateway:
        async with session(pki) as http:
            post = http.post(f"{gateway.url}/v1/completions", json={**PROMPT, "stream": stream, "n": 2})
            asking = asyncio.ensure_future(post)
            await until(lambda: len(pipeline.requests) == 2)
            if stream:
                response = await asking
                await response.content.readline()
                response.close()
            else:
                asking.cancel()
                await asyncio.gather(asking, return_exceptions=True)
        await until(lambda: len(pipeline.closed) == 2)
        metrics = await scrape(gateway)
    assert sorted(pipeline.closed) == sorted(request.sequence_id for request in pipeline.requests)
    assert metrics["fleet_gateway_requests_total", (("endpoint", "completions"), ("outcome", "cancelled"))] == 1
    assert metrics["fleet_gateway_active_sequences", (("pipeline", "main"),)] == 0


async def test_more_than_the_queue_holds_is_429_and_a_waiting_client_may_leave(
    directory: Path, pki: Pki, tokenizer: Tokenizer
) -> None:
    gate = asyncio.Event()
    ids = tokenizer.encode("one").ids
    pipeline = ScriptedPipeline(lambda request: [gate, *tokens_of(ids, request)])
    async with running(directory, pki, {"main": pipeline}) as gateway, session(pki) as http:

        async def ask() -> tuple[int, dict[str, Any], str | None]:
            async with http.post(f"{gateway.url}/v1/completions", json=PROMPT) as response:
                return response.status, await response.json(), response.headers.get("Retry-After")

        computing = [asyncio.ensure_future(ask()) for _ in range(4)]  # max_sequences
        await until(lambda: len(pipeline.requests) == 4)
        waiting = [asyncio.ensure_future(ask()) for _ in range(2)]  # max_queued_requests
        await until_queued(gateway, 2)
        status, body, retry_after = await ask()
        assert (status, body["error"]["type"], retry_after) == (429, "rate_limit_error", "2")
        waiting[0].cancel()
        await asyncio.gather(waiting[0], return_exceptions=True)
        await until_queued(gateway, 1)
        gate.set()
        answers = await asyncio.gather(*computing, waiting[1])
    assert [status for status, _, _ in answers] == [200] * 5
    assert len(pipeline.requests) == 5


@pytest.mark.parametrize("which", ["first_token_timeout_seconds", "request_timeout_seconds"])
async def test_time_outs_are_504_and_cancel(directory: Path, pki: Pki, tokenizer: Tokenizer, which: str) -> None:
    pipeline = ScriptedPipeline(lambda request: [asyncio.Event()])
    changes = {which: 0.05}
    async with running(directory, pki, {"main": pipeline}, **changes) as gateway, session(pki) as http:
        response = await http.post(f"{gateway.url}/v1/completions", json={**PROMPT, "stream": True})
        assert response.status == 504
        assert (await response.json())["error"]["code"] == "timeout"
    assert len(pipeline.closed) == 1


@pytest.mark.parametrize("path", ["completions", "chat/completions"])
@pytest.mark.parametrize("stream", [False, True])
async def test_time_without_a_plan_is_no_time_of_the_first_token(
    directory: Path, pki: Pki, tokenizer: Tokenizer, path: str, stream: bool
) -> None:
    """Whoever waits for a plan is told that none came and why, as 503; also those behind the ones that are computed."""
    pipeline = ScriptedPipeline(says(tokenizer, "one"))
    changes = {"first_token_timeout_seconds": 0.05, "replan_wait_seconds": 0.4, "max_queued_requests": 9}
    asked = (
        PROMPT
        if path == "completions"
        else {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 5}
    )
    async with running(directory, pki, {"main": pipeline}, **changes) as gateway, session(pki) as http:
        gateway.apply(route(epoch=4, state="replanning", reason="box2 is dead", first_stage="", host="", port=0))

        async def ask(body: dict[str, Any]) -> tuple[int, str, str]:
            async with http.post(f"{gateway.url}/v1/{path}", json={**body, "stream": stream}) as response:
                return response.status, response.headers.get("Retry-After", ""), await response.text()

        waiting = [asyncio.ensure_future(ask(asked)) for _ in range(7)]  # three more than there are places
        answers = await asyncio.gather(*waiting)
        assert [(status, wait) for status, wait, _ in answers] == [(503, "2")] * 7
        assert all("waits for a new plan: box2 is dead" in text for _, _, text in answers)
        waiting = [asyncio.ensure_future(ask(asked)) for _ in range(7)]
        await until_queued(gateway, 3)
        await asyncio.sleep(0.1)  # longer than a first token may take
        gateway.apply(route(epoch=5))
        assert [status for status, _, _ in await asyncio.gather(*waiting)] == [200] * 7
        scraped = await scrape(gateway)
    assert scraped["fleet_gateway_active_sequences", (("pipeline", "main"),)] == 0


async def test_a_time_out_after_bytes_is_an_event(directory: Path, pki: Pki, tokenizer: Tokenizer) -> None:
    token = tokenizer.encode("one").ids[0]
    pipeline = ScriptedPipeline(lambda request: [TokenEvent(0, token), asyncio.Event()])
    changes = {"request_timeout_seconds": 0.3, "first_token_timeout_seconds": 0.2}
    async with running(directory, pki, {"main": pipeline}, **changes) as gateway, session(pki) as http:
        response = await http.post(f"{gateway.url}/v1/completions", json={**PROMPT, "stream": True})
        text = (await response.read()).decode()
    assert "was not finished within 0.3 s" in text
    assert text.endswith("data: [DONE]\n\n")


@pytest.mark.parametrize("wanted", [True, False])
async def test_token_ids_of_what_could_have_been_chosen(
    directory: Path, pki: Pki, tokenizer: Tokenizer, wanted: bool
) -> None:
    body = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "logprobs": True, "top_logprobs": 2}
    async with (
        running(directory, pki, {"main": ScriptedPipeline(says(tokenizer, "one two"))}) as gateway,
        session(pki) as http,
    ):
        response = await http.post(f"{gateway.url}/v1/chat/completions", json={**body, "return_token_ids": wanted})
        [choice] = (await response.json())["choices"]
    content = choice["logprobs"]["content"]
    chosen = [(entry.get("token_id"), [other.get("token_id") for other in entry["top_logprobs"]]) for entry in content]
    if wanted:
        assert chosen == [(token, [token, 3]) for token in choice["token_ids"]]
    else:
        assert set(map(str, chosen)) == {"(None, [None, None])"}


async def test_a_gap_in_the_tokens_is_an_error_not_an_answer(directory: Path, pki: Pki, tokenizer: Tokenizer) -> None:
    pipeline = ScriptedPipeline(lambda request: [TokenEvent(0, 5), TokenEvent(2, 6)])
    async with running(directory, pki, {"main": pipeline}) as gateway, session(pki) as http:
        response = await http.post(f"{gateway.url}/v1/completions", json=PROMPT)
        body = await response.json()
        assert response.status == 500
    assert "token 2, expected 1" in body["error"]["message"]


def breaks(request: GenerateRequest, tokens: int) -> Iterator[TokenEvent]:
    yield from (TokenEvent(index, 20) for index in range(tokens))
    raise RuntimeError("a bug")


@pytest.mark.parametrize("stream", [False, True])
async def test_a_bug_before_the_first_token_is_a_500(directory: Path, pki: Pki, stream: bool) -> None:
    pipeline = ScriptedPipeline(lambda request: breaks(request, 0))
    async with running(directory, pki, {"main": pipeline}) as gateway, session(pki) as http:
        response = await http.post(f"{gateway.url}/v1/completions", json={**PROMPT, "stream": stream})
        assert response.status == 500
        assert (await response.json())["error"]["code"] == "internal_error"


async def test_a_bug_in_a_stream_is_an_event(directory: Path, pki: Pki, caplog: pytest.LogCaptureFixture) -> None:
    pipeline = ScriptedPipeline(lambda request: breaks(request, 3))
    async with running(directory, pki, {"main": pipeline}) as gateway, session(pki) as http:
        response = await http.post(f"{gateway.url}/v1/completions", json={**PROMPT, "stream": True})
        events = (await response.read()).decode().removesuffix("\n\n").split("\n\n")
        assert json.loads(events[-2].split("data: ")[1])["error"]["code"] == "internal_error"
        assert events[-1].endswith("data: [DONE]")
    assert "RuntimeError: a bug" in caplog.text


async def test_who_may_see_what(directory: Path, pki: Pki, tokenizer: Tokenizer) -> None:
    async with running(directory, pki, {"main": ScriptedPipeline(says(tokenizer, "x"))}) as gateway:
        plain = f"http://127.0.0.1:{gateway.http_port}"

        async def statuses(http: aiohttp.ClientSession, base: str) -> dict[str, int]:
            found = {}
            for path in ("/livez", "/health", "/metrics", "/v1/models", "/nothing"):
                async with http.get(base + path) as response:
                    found[path] = response.status
            return found

        async with session(pki, headers={}) as nobody, session(pki, headers={}, operator=True) as operator:
            refused = {"/livez": 200, "/health": 401, "/metrics": 401, "/v1/models": 401, "/nothing": 401}
            assert await statuses(nobody, gateway.url) == refused
            assert await statuses(nobody, plain) == refused
            assert await statuses(operator, gateway.url) == {**refused, "/health": 200, "/metrics": 200}
        async with session(pki) as client:
            served = {"/livez": 200, "/health": 200, "/metrics": 200, "/v1/models": 200, "/nothing": 404}
            assert await statuses(client, gateway.url) == served
            assert await statuses(client, plain) == served


async def test_health_says_why_not(directory: Path, pki: Pki, tokenizer: Tokenizer) -> None:
    pipeline = ScriptedPipeline(says(tokenizer, "x"), status=PipelineStatus(reason="box3 loads"))
    async with running(directory, pki, {"main": pipeline}, replan_wait_seconds=0.1) as gateway, session(pki) as http:
        async with http.get(f"{gateway.url}/health") as response:
            assert response.status == 503
            document = await response.json()
        assert (document["state"], document["reason"]) == ("unavailable", "pipeline main: box3 loads")
        async with http.post(f"{gateway.url}/v1/completions", json=PROMPT) as response:
            assert (response.status, response.headers["Retry-After"]) == (503, "2")
        pipeline.status = PipelineStatus(ready=True, epoch=4, policy="exact", largest_logit_difference=2e-5)
        async with http.get(f"{gateway.url}/health") as response:
            assert response.status == 200
            assert (await response.json())["pipelines"]["main"]["largest_logit_difference"] == 2e-5


async def test_bad_bodies(directory: Path, pki: Pki, tokenizer: Tokenizer) -> None:
    async with (
        running(directory, pki, {"main": ScriptedPipeline(says(tokenizer, "x"))}) as gateway,
        session(pki) as http,
    ):
        for raw, status in ((b"{", 400), (b"[]", 400), (b"x" * (MAX_BODY_BYTES + 1), 413)):
            async with http.post(f"{gateway.url}/v1/chat/completions", data=raw) as response:
                assert response.status == status
                assert set((await response.json())["error"]) == {"message", "type", "param", "code"}
        async with http.get(f"{gateway.url}/v1/chat/completions") as response:
            assert (response.status, response.headers["Allow"]) == (405, "POST")
            assert (await response.json())["error"]["code"] == "http_error"


async def test_a_harmful_request_id_is_replaced(directory: Path, pki: Pki, tokenizer: Tokenizer) -> None:
    async with (
        running(directory, pki, {"main": ScriptedPipeline(says(tokenizer, "x"))}) as gateway,
        session(pki) as http,
    ):
        for sent in ("a b", "x" * 65, "{}", ""):
            async with http.get(f"{gateway.url}/v1/models", headers={"X-Request-Id": sent}) as response:
                assert response.headers["X-Request-Id"].startswith("req-")


async def test_every_series_is_there_from_the_start(directory: Path, pki: Pki, tokenizer: Tokenizer) -> None:
    async with running(directory, pki, {"main": ScriptedPipeline(says(tokenizer, "one two three"))}) as gateway:
        before = await scrape(gateway)
        async with session(pki) as http:
            async with http.post(f"{gateway.url}/v1/completions", json=PROMPT) as response:
                usage = (await response.json())["usage"]
            async with http.post(f"{gateway.url}/v1/completions", json={**PROMPT, "model": "no\nsuch"}) as response:
                assert response.status == 404
        after = await scrape(gateway)
    timeless = {key for key in before if not key[0].endswith("_created")}
    assert timeless == {key for key in after if not key[0].endswith("_created")}
    assert all(before[key] == 0 for key in timeless if key[0].startswith("fleet_gateway_requests"))
    assert after["fleet_gateway_completion_tokens_total", ()] == usage["completion_tokens"]
    assert after["fleet_gateway_first_token_seconds_count", ()] == 1
    assert after["fleet_gateway_requests_total", (("endpoint", "completions"), ("outcome", "ok"))] == 1
    assert after["fleet_gateway_requests_total", (("endpoint", "completions"), ("outcome", "invalid"))] == 1


async def test_requests_are_logged_without_text_or_key(
    directory: Path, pki: Pki, tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="fleet.gateway")
    pipeline = ScriptedPipeline(says(tokenizer, "secret answer"))
    async with running(directory, pki, {"main": pipeline}) as gateway, session(pki) as http:
        await http.post(f"{gateway.url}/v1/completions", json={**PROMPT, "prompt": "secret question"})
    [fields] = [record.__dict__["fields"] for record in caplog.records if record.message == "request"]
    assert (fields["client"], fields["outcome"], fields["status"]) == ("tester", "ok", 200)
    assert fields["completion_tokens"] > 0
    assert "secret" not in repr(fields)
    assert KEY not in repr(fields)


async def test_the_certificate_carries_the_sites_name(directory: Path, pki: Pki, tokenizer: Tokenizer) -> None:
    async with (
        running(directory, pki, {"main": ScriptedPipeline(says(tokenizer, "x"))}) as gateway,
        session(pki) as http,
    ):
        url = f"https://127.0.0.1:{gateway.https_port}/livez"
        async with http.get(url, server_hostname=SERVER_NAME) as response:
            assert response.status == 200
        with pytest.raises(aiohttp.ClientConnectorCertificateError):
            await http.get(url, server_hostname="control.other.fleet.internal")
