"""The ring's probe on models whose numbers are too large for policy `exact`: refused by name, and nothing serves."""

from __future__ import annotations

import asyncio
import ssl
from pathlib import Path

import pytest
import torch
from transformers import LlamaForCausalLM

from stage_runtime.engine.probe import probe_token_ids
from stage_runtime.link.messages import FinishedEvent
from tests.stage_runtime.conftest import Served, serve
from tests.stage_runtime.site import answer, connected, eventually, request
from tests.stage_runtime.test_process import get
from tests.stage_runtime.tiny import VOCABULARY, make_model

# FP32 has 24 bits: rounding errors of logits around a million are about 0.1, far more than the 1e-3 that is allowed
LARGE = 1e6
# beyond FP32's largest number, 3.4e38, once the head has summed up
INFINITE = 3e38
DAMAGED = 300


@pytest.mark.parametrize(("tied", "norm", "found"), [(True, LARGE, "apart"), (False, INFINITE, "not finite numbers")])
async def test_a_model_beyond_the_policy_is_refused(tmp_path: Path, tied: bool, norm: float, found: str) -> None:
    model = make_model(
        tmp_path / "model", tied=tied, dtype=torch.float32, adapt=lambda built: built.model.norm.weight.fill_(norm)
    )
    for served in serve(tmp_path, model, stages=2):
        await check_refused(served, found, head="box1" if tied else "box2")


async def test_a_text_without_finite_logits_ends_alone(tmp_path: Path) -> None:
    def damage(built: LlamaForCausalLM) -> None:
        built.model.embed_tokens.weight[DAMAGED] = torch.inf

    assert DAMAGED not in probe_token_ids(VOCABULARY)
    model = make_model(tmp_path / "model", tied=False, dtype=torch.float32, adapt=damage)
    for served in serve(tmp_path, model, stages=1):
        async with connected(served.site.client()) as client:
            wanted = [request([DAMAGED], 5), request([DAMAGED], 5, temperature=1.0, logprobs=3), request([5, 6], 8)]
            first, second, healthy = await asyncio.gather(*(answer(client, each) for each in wanted))
            for tokens, end in (first, second):
                assert (tokens, end.reason) == ([], "error")
                assert "not finite" in end.message
            assert healthy[0] == model.greedy([5, 6], 8)
            await served.site.wait_kv_empty()


async def check_refused(served: Served, found: str, head: str) -> None:
    """Gateway, first stage and head's holder say why; requests end at once; the processes live on."""
    site = served.site
    client = site.client()
    task = asyncio.ensure_future(client.run())
    try:
        await eventually(lambda: "policy exact is refused" in client.status.reason, lambda: client.status)
        assert found in client.status.reason
        assert not client.status.ready
        assert await answer(client, request([5], 3)) == (
            [],
            FinishedEvent("unavailable", client.status.reason, prompt_tokens=1),
        )
        operator: ssl.SSLContext = site.ca.issue("operator").client_context()
        for box in {"box1", head}:
            health = await site.wait_state(box, "failed")
            assert found in health["reason"]
            status, text = await get(site, box, "/health", operator)
            assert status == 503
            assert "Infinity" not in text, "JSON has no infinities"
            assert "fleet_stage_probe_largest_logit_difference" in (await get(site, box, "/metrics", operator))[1]
        await site.wait_kv_empty()
        assert all(site.terminate(box) == 0 for box in site.boxes)
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
