"""A stage process dies under the gateway: clients get an answer or a clear error, and the site serves again."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from tests.gateway.site import KEY, MODEL, Pki, byte_level_tokenizer, running
from tests.stage_runtime.site import StageSite, connected
from tests.stage_runtime.tiny import make_model

MAX_TOKENS = 400
PROMPT = {"model": MODEL, "prompt": [5, 6, 7, 8], "temperature": 0, "max_tokens": MAX_TOKENS}


@dataclass(frozen=True)
class RingSite:
    """Three stage processes, and a gateway whose link to them is real."""

    stages: StageSite
    url: str
    http: aiohttp.ClientSession

    async def complete(self, **changes: Any) -> tuple[int, dict[str, Any]]:
        """Status and body of a completion."""
        async with self.http.post(f"{self.url}/v1/completions", json={**PROMPT, **changes}) as response:
            return response.status, await response.json()

    async def wait_ready(self, ready: bool) -> dict[str, Any]:
        """Poll /health until the gateway is ready, or is not."""
        while True:
            async with self.http.get(f"{self.url}/health") as response:
                if (response.status == 200) == ready:
                    document: dict[str, Any] = await response.json()
                    return document
            await asyncio.sleep(0.02)


@asynccontextmanager
async def ring_site(directory: Path, pki: Pki) -> AsyncIterator[RingSite]:
    """Start everything, and end it."""
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
    pipeline = {
        "model": MODEL,
        "model_directory": str(gateway_model),
        "model_digest": model.digest,
        "policy": "exact",
        "epoch": 1,
        "max_tokens_per_sequence": 512,
        "max_sequences": 4,
        "first_stage": {"box": "box1", "host": "127.0.0.1", "port": stages.ring_ports["box1"]},
    }
    try:
        for box in stages.boxes:
            stages.start(box)
        async with (
            connected(stages.client()) as client,
            running(directory, pki, {"main": client}, pipelines={"main": pipeline}) as gateway,
            aiohttp.ClientSession(headers={"Authorization": f"Bearer {KEY}"}) as http,
        ):
            yield RingSite(stages, f"http://127.0.0.1:{gateway.http_port}", http)
    finally:
        stages.stop()


async def broken_stream(site: RingSite, box: str) -> list[Any]:
    """Kill a box after the first token of a stream; the events of that stream, decoded."""
    async with site.http.post(f"{site.url}/v1/completions", json={**PROMPT, "stream": True}) as response:
        assert response.status == 200
        first = await response.content.readuntil(b"\n\n")
        await asyncio.to_thread(site.stages.kill, box)
        rest = await response.content.read()
    datas = [event.split("data: ", 1)[1] for event in (first + rest).decode().removesuffix("\n\n").split("\n\n")]
    assert datas[-1] == "[DONE]"
    return [json.loads(data) for data in datas[:-1]]


async def test_a_killed_stage_ends_streams_with_an_error_and_the_site_comes_back(tmp_path: Path, pki: Pki) -> None:
    async with ring_site(tmp_path, pki) as site:
        status, before = await site.complete()
        assert (status, before["usage"]["completion_tokens"]) == (200, MAX_TOKENS)
        for box in ("box2", "box1"):
            events = await broken_stream(site, box)
            assert events[-1]["error"]["code"] == "unavailable"
            shown = "".join(event["choices"][0]["text"] for event in events[:-1])
            assert before["choices"][0]["text"].startswith(shown)
            document = await site.wait_ready(False)
            assert document["reason"].startswith("pipeline main: ")
            assert document["pipelines"]["main"]["active_sequences"] == 0
            status, refused = await site.complete()
            assert (status, refused["error"]["code"]) == (503, "unavailable")
            site.stages.start(box)
            await site.wait_ready(True)
            assert (await site.complete())[1]["choices"] == before["choices"]
