"""A stage process from outside: pages, admin socket, refusals, failure states, drain."""

from __future__ import annotations

import asyncio
import shutil
import ssl
import stat
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from stage_runtime.link.client import PipelineClient
from stage_runtime.link.tls import server_name
from tests.stage_runtime.conftest import Served
from tests.stage_runtime.pki import SiteCa
from tests.stage_runtime.site import SITE, StageSite, answer, connected, eventually, request
from tests.stage_runtime.tiny import TinyModel


async def get(site: StageSite, box: str, path: str, context: ssl.SSLContext) -> tuple[int, str]:
    """A page of the metrics port."""
    url = f"https://127.0.0.1:{site.metrics_ports[box]}{path}"
    async with (
        aiohttp.ClientSession() as session,
        session.get(url, ssl=context, server_hostname=server_name(box, SITE)) as response,
    ):
        return response.status, await response.text()


async def test_only_livez_is_open(tied: Served, tmp_path: Path) -> None:
    site = tied.site
    await site.wait_state("box2", "loaded", "ready")
    anonymous = ssl.create_default_context(cafile=str(site.ca.path))
    assert await get(site, "box2", "/livez", anonymous) == (200, "ok\n")
    assert (await get(site, "box2", "/health", anonymous))[0] == 403
    assert (await get(site, "box2", "/metrics", anonymous))[0] == 403
    assert (await get(site, "box2", "/nothing", anonymous))[0] == 403
    stranger = site.ca.issue("box2", site="other").client_context()
    assert (await get(site, "box2", "/health", stranger))[0] == 403


async def test_health_and_metrics(tied: Served) -> None:
    site = tied.site
    operator = site.ca.issue("operator").client_context()
    async with connected(site.client()) as client:
        await answer(client, request([5, 6], 4))
        await site.wait_state("box3", "ready")
        await eventually(lambda: client.status.largest_logit_difference is not None)
        status, _ = await get(site, "box3", "/health", operator)
        _, text = await get(site, "box3", "/metrics", operator)
        health = await site.health("box1")
    assert status == 200
    assert (health["state"], health["reason"], health["layers"]) == ("ready", "", [0, 2])
    assert (health["embedding"], health["head"], health["policy"], health["epoch"]) == (True, True, "exact", 1)
    assert health["model_digest"] == tied.model.digest
    assert health["weight_bytes"] > 0
    assert health["rss_bytes"] > health["weight_bytes"]
    assert health["largest_logit_difference"] < 1e-3
    assert health["tokens_per_second"] > 0
    assert set(health["timings_seconds"]) == {"load", "warm_up"}
    for line in ('fleet_stage_state_flag{state="ready"} 1.0', 'fleet_stage_state_flag{state="failed"} 0.0'):
        assert line in text
    for name in ("kv_cache_bytes", "rings_lost_total", "connections_refused_total", "weights_bytes"):
        assert f"\nfleet_stage_{name} " in text


async def test_a_spare_is_loaded_and_takes_no_links(tied: Served) -> None:
    health = await tied.site.wait_state("spare1", "loaded")
    assert health["layers"] == [0, 0]
    heard = tied.site.giver.stages["spare1"]
    await eventually(lambda: heard.heartbeats[-1].ready_layers == 0)  # the layers that it was measured with are freed
    assert (await tied.site.health("spare1"))["weight_bytes"] == 0
    client = tied.site.client(first_stage_box="spare1", port=tied.site.ring_ports["spare1"])
    assert (health["epoch"], health["reason"]) == (0, "no plan yet")
    assert "link with spare1: closed by the peer" in await refusal(client)
    client = tied.site.client(first_stage_box="box2", port=tied.site.ring_ports["box2"])
    assert "gateways talk to the first stage, 'box1'" in await refusal(client)


async def test_the_admin_socket(tied: Served) -> None:
    site = tied.site
    await site.wait_state("box2", "loaded", "ready")
    assert stat.S_IMODE(site.admin_socket("box2").stat().st_mode) == 0o600
    assert await site.admin("box2", {"op": "batch-limit", "sequences": 2}) == {"batch_limit_sequences": 2}
    assert (await site.health("box2"))["batch_limit_sequences"] == 2
    async with connected(site.client()) as client:  # the lowered limit travels along the ring and nothing breaks
        ends = await asyncio.gather(*(answer(client, request([i + 3], 5)) for i in range(6)))
    assert all(tokens == tied.model.greedy([i + 3], 5) for i, (tokens, _) in enumerate(ends))
    assert await site.admin("box2", {"op": "batch-limit", "sequences": 99}) == {"batch_limit_sequences": 8}
    for wrong in ({"op": "stop"}, {"op": "batch-limit", "sequences": 0}, {"op": "batch-limit"}, {}):
        assert "error" in await site.admin("box2", wrong)
    reader, writer = await asyncio.open_unix_connection(str(site.admin_socket("box2")))
    writer.write(b"no json\n")
    assert b"no JSON" in await reader.readline()
    writer.close()


async def refusal(client: PipelineClient) -> str:
    """Why the client can't connect."""
    task = asyncio.ensure_future(client.run())
    try:
        await eventually(lambda: client.status.reason != "not connected")
        return client.status.reason
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"model_digest": "e" * 64}, f"'{'e' * 64}'"),
        ({"policy": "bf16"}, "box1 has 'exact', control has 'bf16'"),
        ({"box": "box9"}, "the certificate's CN is 'control'"),
    ],
)
async def test_a_gateway_that_differs_is_refused(tied: Served, changes: dict[str, Any], reason: str) -> None:
    await tied.site.wait_state("box1", "loaded", "ready")
    assert reason in await refusal(tied.site.client(**changes))


async def test_a_gateway_of_another_ca_is_refused(tied: Served, tmp_path: Path) -> None:
    stranger = SiteCa(tmp_path, SITE).issue("control")
    stranger.ca = tied.site.ca.path
    await tied.site.wait_state("box1", "loaded", "ready")
    assert "box1" in await refusal(tied.site.client(tls=stranger))
    await eventually(lambda: "certificate verify failed" in tied.site.log("box1"))


async def test_a_damaged_shard_fails_the_stage_by_name(tied_model: TinyModel, tmp_path: Path) -> None:
    directory = Path(shutil.copytree(tied_model.directory, tmp_path / "model"))
    shard = directory / "layer-000.safetensors"
    shard.write_bytes(shard.read_bytes()[:-8])
    site = StageSite(tmp_path, directory, tied_model.digest, layers=6, tied=True, stages=1)
    site.start("box1")
    try:
        health = await site.wait_state("box1", "failed")
        assert "layer-000.safetensors" in health["reason"]
        operator = site.ca.issue("operator").client_context()
        assert (await get(site, "box1", "/health", operator))[0] == 503
        assert site.terminate("box1") == 0
    finally:
        site.stop()


async def wait_open(site: StageSite, box: str) -> None:
    """Until a box computes a sequence; a gateway hears of it once a second only, when it may be over."""
    for _ in range(1000):
        if (await site.health(box))["open_sequences"]:
            return
        await asyncio.sleep(0.01)
    raise AssertionError(f"{box} computes no sequence")


async def test_a_stop_without_a_coordinator_drains_first(tied_model: TinyModel, tmp_path: Path) -> None:
    site = StageSite(tmp_path, tied_model.directory, tied_model.digest, layers=6, tied=True, stages=2)
    for box in site.boxes:
        site.start(box)
    try:
        async with connected(site.client()) as client:
            await asyncio.to_thread(site.giver.go)
            open_answer = asyncio.ensure_future(answer(client, request([7, 8], 150)))
            await wait_open(site, "box1")
            code = asyncio.ensure_future(asyncio.to_thread(site.terminate, "box2"))
            await eventually(lambda: not client.status.ready)
            assert client.status.reason == "box2 stops"
            _, refused = await answer(client, request([7, 8], 2))
            assert refused.reason == "unavailable"
            tokens, end = await open_answer
            assert (tokens, end.reason) == (tied_model.greedy([7, 8], 150), "length")
            assert await code == 0
        assert site.terminate("box1") == 0
        assert not site.admin_socket("box1").exists()
    finally:
        site.stop()


async def test_a_stop_serves_on_until_others_have_the_layers(tied_model: TinyModel, tmp_path: Path) -> None:
    site = StageSite(tmp_path, tied_model.directory, tied_model.digest, layers=6, tied=True, stages=2)
    for box in site.boxes:
        site.start(box)
    try:
        async with connected(site.client()) as client:
            open_answer = asyncio.ensure_future(answer(client, request([7, 8], 200)))
            await wait_open(site, "box1")
            code = asyncio.ensure_future(asyncio.to_thread(site.terminate, "box2"))
            await eventually(lambda: site.giver.stages["box2"].leaving == ["box2 was told to stop"])
            assert client.status.ready  # nothing has changed for anyone yet
            epoch = await asyncio.to_thread(site.giver.switch, site.pipeline_plan("box1"), planned=True)
            tokens, end = await open_answer
            assert (tokens, end.reason) == (tied_model.greedy([7, 8], 200), "length")
            assert not code.done()
            await asyncio.to_thread(site.giver.retire, epoch - 1)
            assert await code == 0
            async with connected(site.client(epoch)) as new:
                assert (await answer(new, request([7, 8], 9)))[0] == tied_model.greedy([7, 8], 9)
        site.processes["box1"].terminate()
        await eventually(lambda: bool(site.giver.stages["box1"].leaving))
        assert site.terminate("box1") == 0  # a second signal does not wait
    finally:
        site.stop()


async def test_a_box_with_another_model_declines_the_plan(
    tied_model: TinyModel, untied_model: TinyModel, tmp_path: Path
) -> None:
    site = StageSite(tmp_path, tied_model.directory, tied_model.digest, layers=6, tied=True, stages=2)
    site.start("box1")
    site.start("box2", model_directory=str(untied_model.directory), model_digest=untied_model.digest)
    try:
        votes = site.giver.stages["box2"].votes
        await eventually(lambda: bool(votes))
        assert not votes[0].yes
        assert tied_model.digest in votes[0].reason
        assert untied_model.digest in votes[0].reason
        health = await site.wait_state("box2", "loaded")
        assert health["epoch"] == 0
    finally:
        site.stop()
