"""What generates tokens in the benchmarks: real stage processes on loopback, and `transformers` as the peer."""

from __future__ import annotations

import asyncio
import json
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import aiohttp
import torch
from prometheus_client.parser import text_string_to_metric_families

from fleet.bundle.model_info import ModelInfo
from fleet.planning.cost import BoxCost, CostTable, Load
from fleet.planning.plan import Plan, StagePlan
from fleet.planning.site import model_cost
from fleet.planning.split import split
from fleet.provision.render_etc import KV_BLOCK_TOKENS, PREFILL_CHUNK_TOKENS
from stage_runtime.link.client import PipelineClient
from stage_runtime.link.messages import FinishedEvent
from stage_runtime.link.tls import server_name
from stage_runtime.server.compute import ComputeThread
from tests.golden.make_golden import load_model
from tests.stage_runtime.site import SITE, StageSite, connected, request

MAX_SEQUENCES = 8
MAX_TOKENS_PER_SEQUENCE = 256
THREADS = 1


@dataclass(frozen=True)
class Timeline:
    """When the tokens of some requests came, by the monotonic clock.

    Attributes:
        start: the requests were sent.
        arrivals: of each request, one time a token.
    """

    start: float
    arrivals: list[list[float]]


class Contender(Protocol):
    """Generates greedily."""

    async def generate(self, prompts: list[list[int]], count: int) -> Timeline:
        """`count` tokens behind every prompt, all at once; prompts have equal lengths."""


class StagePipeline:
    """A pipeline of running stage processes, as a gateway sees it.

    Attributes:
        ready_seconds: from the start of the processes until the ring served.
    """

    def __init__(self, site: StageSite, client: PipelineClient, ready_seconds: float) -> None:
        self.ready_seconds = ready_seconds
        self._site = site
        self._client = client

    async def generate(self, prompts: list[list[int]], count: int) -> Timeline:
        """Over the ring port, with TLS."""
        start = time.monotonic()
        return Timeline(start, list(await asyncio.gather(*(self._arrivals(prompt, count) for prompt in prompts))))

    async def _arrivals(self, prompt: list[int], count: int) -> list[float]:
        arrivals: list[float] = []
        async for event in self._client.generate(request(prompt, count)):
            if isinstance(event, FinishedEvent):
                if event.reason != "length":
                    raise RuntimeError(f"a sequence ended by {event.reason}: {event.message}")
                return arrivals
            arrivals.append(time.monotonic())
        raise RuntimeError("a sequence has no end")

    async def compute_seconds(self) -> float:
        """What the stages' compute threads have worked so far, all together."""
        total = 0.0
        context = self._site.gateway_tls.client_context()
        async with aiohttp.ClientSession() as session:
            for box, port in self._site.metrics_ports.items():
                url = f"https://127.0.0.1:{port}/metrics"
                async with session.get(url, ssl=context, server_hostname=server_name(box, SITE)) as answer:
                    answer.raise_for_status()
                    families = text_string_to_metric_families(await answer.text())
                    total += next(
                        family.samples[0].value for family in families if family.name == "fleet_stage_compute_seconds"
                    )
        return total

    def memory_bytes(self) -> dict[str, int]:
        """Box → proportional set size of its stage process."""
        return {box: _pss_bytes(process.pid) for box, process in self._site.processes.items()}


def _pss_bytes(pid: int) -> int:
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))


def planned_stages(info: ModelInfo, boxes: list[str]) -> tuple[StagePlan, ...]:
    """What the planner gives to equal boxes."""
    layers, tied = info.config.num_hidden_layers, info.config.tie_word_embeddings
    table = CostTable(model_cost(info, "packed"), Load(MAX_SEQUENCES, MAX_TOKENS_PER_SEQUENCE))
    spans = split(table, [BoxCost(box, 1e9, None, 0, 125e6) for box in boxes])
    return tuple(
        StagePlan(box, start, end, embedding=start == 0, head=start == 0 if tied else end == layers)
        for box, (start, end) in zip(boxes, spans, strict=True)
    )


@asynccontextmanager
async def running(info: ModelInfo, stages: int) -> AsyncIterator[StagePipeline]:
    """Start the stages, wait until the ring serves, and stop them in the end."""
    with tempfile.TemporaryDirectory(prefix="fleet-bench-") as directory:
        site = StageSite(
            Path(directory),
            info.directory,
            info.digest,
            layers=info.config.num_hidden_layers,
            tied=info.config.tie_word_embeddings,
            stages=stages,
            max_sequences=MAX_SEQUENCES,
            max_tokens_per_sequence=MAX_TOKENS_PER_SEQUENCE,
            threads=THREADS,
            max_batch_sequences=MAX_SEQUENCES,
            prefill_chunk_tokens=PREFILL_CHUNK_TOKENS,
            kv_block_tokens=KV_BLOCK_TOKENS,
        )
        pipeline = replace(site.plan.pipelines["main"], stages=planned_stages(info, site.boxes))
        site.plan = Plan(site.plan.epoch, {"main": pipeline})
        try:
            start = time.monotonic()
            for box in site.boxes:
                site.start(box)
            async with connected(site.client()) as client:
                yield StagePipeline(site, client, time.monotonic() - start)
        finally:
            site.stop()


class TransformersPeer:
    """`transformers` in FP32 with its own default attention, one thread; a batch is one tensor."""

    def __init__(self, info: ModelInfo) -> None:
        description = json.loads((info.directory / "model.json").read_bytes())
        self._model = load_model(info.directory, description)
        self._model.set_attn_implementation("sdpa")
        self._thread = ComputeThread(THREADS)

    async def generate(self, prompts: list[list[int]], count: int) -> Timeline:
        """All prompts as one batch, which is the peer's best case: they start and end together."""
        return await self._thread.run(self._generate, prompts, count)

    def close(self) -> None:
        """End the thread."""
        self._thread.close()

    @torch.inference_mode()
    def _generate(self, prompts: list[list[int]], count: int) -> Timeline:
        start, times, cache = time.monotonic(), [], None
        step = torch.tensor(prompts)
        for _ in range(count):
            output = self._model(input_ids=step, past_key_values=cache, use_cache=True, logits_to_keep=1)
            cache, step = output.past_key_values, output.logits[:, -1].argmax(-1, keepdim=True)
            times.append(time.monotonic())
        return Timeline(start, [times] * len(prompts))
