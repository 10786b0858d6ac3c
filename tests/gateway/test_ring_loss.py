"""Stages and gateways die under open answers: every answer is the undisturbed one. Real processes throughout."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import aiohttp
import openai
import pytest

from tests.gateway.process import GatewayProcess
from tests.gateway.site import KEY, MODEL, byte_level_tokenizer
from tests.stage_runtime.site import StageSite
from tests.stage_runtime.tiny import make_model

MAX_TOKENS = 150
ASKED: list[dict[str, Any]] = [
    {"prompt": [5, 6, 7, 8], "temperature": 0, "logprobs": 2},
    {"prompt": [9, 10, 11], "temperature": 0.9, "seed": 11, "n": 2, "frequency_penalty": 0.5},
    {"prompt": [40, 41], "temperature": 1.1, "seed": 12, "presence_penalty": 0.5},
]


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayProcess]:
    """Three stages and a gateway, all processes, serving; a test leaves them serving again."""
    directory = tmp_path_factory.mktemp("ring")
    model = make_model(directory / "weights", tied=True)
    gateway_model = directory / "model"
    gateway_model.mkdir()
    byte_level_tokenizer(merges=False).save(str(gateway_model / "tokenizer.json"))
    description = {
        "schema": 1,
        "config": {"max_position_embeddings": 512, "vocab_size": 320},
        "bos_token_id": 0,
        "eos_token_ids": [],
    }
    (gateway_model / "model.json").write_text(json.dumps(description))
    stages = StageSite(
        directory, model.directory, model.digest, layers=model.layers, tied=True, max_tokens_per_sequence=512
    )
    gateway = GatewayProcess(directory, stages, MODEL, gateway_model)
    try:
        for box in stages.boxes:
            stages.start(box)
        gateway.start()
        gateway.wait_ready()
        yield gateway
    finally:
        gateway.kill()
        stages.stop()


class Reader:
    """One answer, streamed by the official client: what came of each choice."""

    def __init__(self, client: openai.AsyncOpenAI, asked: dict[str, Any]) -> None:
        self.texts: dict[int, str] = {}
        self.tokens: dict[int, list[int]] = {}
        self.finish: dict[int, str] = {}
        self.started = asyncio.Event()
        self._client = client
        self._asked = asked

    async def run(self) -> tuple[dict[int, str], dict[int, list[int]], dict[int, str]]:
        """To the end."""
        stream = await self._client.completions.create(
            model=MODEL, max_tokens=MAX_TOKENS, stream=True, extra_body={"return_token_ids": True}, **self._asked
        )
        async for chunk in stream:
            for choice in chunk.choices:
                self.texts[choice.index] = self.texts.get(choice.index, "") + choice.text
                self.tokens.setdefault(choice.index, []).extend((choice.model_extra or {}).get("token_ids", []))
                if choice.finish_reason:
                    self.finish[choice.index] = choice.finish_reason
            if sum(map(len, self.tokens.values())) > 5:
                self.started.set()
        return self.texts, self.tokens, self.finish


async def begin(client: openai.AsyncOpenAI) -> list[asyncio.Task[Any]]:
    """Open all answers; returns when each has tokens."""
    readers = [Reader(client, asked) for asked in ASKED]
    answers = [asyncio.ensure_future(reader.run()) for reader in readers]
    await asyncio.gather(*(reader.started.wait() for reader in readers))
    assert not any(answer.done() for answer in answers)
    return answers


@pytest.mark.parametrize("box", ["box1", "box2", "box3"])
async def test_any_stage_dies_and_returns_under_open_answers(gateway: GatewayProcess, box: str) -> None:
    stages, giver = gateway.stages, gateway.stages.giver
    async with gateway.async_client() as client:
        undisturbed = await asyncio.gather(*(Reader(client, asked).run() for asked in ASKED))
        assert [len(tokens) for tokens in undisturbed[1][1].values()] == [MAX_TOKENS, MAX_TOKENS]
        answers = await begin(client)
        await asyncio.to_thread(stages.kill, box)
        await asyncio.to_thread(giver.route, giver.committed_epoch, state="replanning", reason=f"{box} is dead")
        survivors = stages.pipeline_plan(*(other for other in stages.boxes if other != box))
        epoch = await asyncio.to_thread(giver.switch, survivors)
        assert await asyncio.gather(*answers) == undisturbed
        document = await asyncio.to_thread(gateway.wait_ready)
        assert document["pipelines"]["main"]["epoch"] == epoch
        starts = len(giver.stages[box].registers)
        answers = await begin(client)
        stages.start(box)
        await asyncio.to_thread(lambda: giver.wait_registered(box, starts=starts + 1))
        back = await asyncio.to_thread(lambda: giver.switch(stages.plan.pipelines["main"], planned=True))
        assert await asyncio.gather(*answers) == undisturbed
        await asyncio.to_thread(giver.wait, lambda: any(drained.epoch == back - 1 for drained in giver.drained))
        await asyncio.to_thread(giver.retire, back - 1)


async def test_a_gateway_killed_under_load_gives_exactly_the_rest(gateway: GatewayProcess) -> None:
    url = f"http://127.0.0.1:{gateway.http_port}/v1"
    async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {KEY}"}) as http:

        async def start(asked: dict[str, Any], headers: dict[str, str]) -> aiohttp.ClientResponse:
            body = {"model": MODEL, "max_tokens": MAX_TOKENS, "stream": True, **asked}
            return await http.post(f"{url}/completions", json=body, headers=headers)

        async def rest(stream_id: str, after: int) -> list[str]:
            async with http.get(f"{url}/streams/{stream_id}", headers={"Last-Event-ID": str(after)}) as response:
                assert response.status == 200
                return events_of(await response.read())

        async def undisturbed(asked: dict[str, Any]) -> dict[int, str]:
            return texts_of(events_of(await (await start(asked, {})).read()))

        reference = await asyncio.gather(*(undisturbed(asked) for asked in ASKED))
        responses = [await start(asked, {"Fleet-Resume-Seconds": "300"}) for asked in ASKED]
        seen = [[(await each.content.readuntil(b"\n\n")).decode()[:-2] for _ in range(12)] for each in responses]
        gateway.kill()
        for response in responses:
            response.close()
        gateway.start()
        await asyncio.to_thread(gateway.wait_ready)
        ids = [response.headers["Fleet-Stream-Id"] for response in responses]
        rests = await asyncio.gather(*(rest(each, len(begun)) for each, begun in zip(ids, seen, strict=True)))
        wholes = await asyncio.gather(*(rest(each, 0) for each in ids))
        assert wholes == [begun + more for begun, more in zip(seen, rests, strict=True)]
        assert reference == [texts_of(events) for events in wholes]
        gateway.kill()
        gateway.start()
        await asyncio.to_thread(gateway.wait_ready)
        assert wholes == await asyncio.gather(*(rest(each, 0) for each in ids))


async def test_a_gateway_starts_and_serves_without_a_coordinator(gateway: GatewayProcess) -> None:
    with gateway.client() as client:
        before = client.completions.create(model=MODEL, max_tokens=20, **ASKED[0])
    assert await asyncio.to_thread(gateway.terminate) == 0
    await asyncio.to_thread(gateway.stages.giver.go)
    gateway.start()
    await asyncio.to_thread(gateway.wait_ready)
    with gateway.client() as client:
        after = client.completions.create(model=MODEL, max_tokens=20, **ASKED[0])
    assert after.choices == before.choices
    await asyncio.to_thread(gateway.stages.giver.come_back)


def events_of(raw: bytes) -> list[str]:
    """Events without comments."""
    lines = [line for line in raw.decode().split("\n") if not line.startswith(":")]
    return [event for event in "\n".join(lines).split("\n\n") if event]


def texts_of(events: list[str]) -> dict[int, str]:
    """The text of each choice."""
    assert events[-1].endswith("data: [DONE]")
    texts: dict[int, str] = {}
    for event in events[:-1]:
        for choice in json.loads(event.split("data: ")[1])["choices"]:
            texts[choice["index"]] = texts.get(choice["index"], "") + choice["text"]
    return texts
