"""`fleet ask` and `fleet status` as processes, against listeners with the site's certificates."""

from __future__ import annotations

import asyncio
import json
import signal
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web
from tokenizers import Tokenizer

from fleet.observe.asking import QUIET_SECONDS
from stage_runtime.link.messages import FinishedEvent, TokenEvent
from stage_runtime.link.tls import TlsIdentity
from tests.gateway.site import KEY, ScriptedPipeline, free_port, running, says
from tests.observe.conftest import Site, fleet, start
from tests.observe.coordinator import ScriptedCoordinator, serving
from tests.observe.test_status import STAGE


@pytest.fixture
def tokenizer(site: Site) -> Tokenizer:
    return Tokenizer.from_file(str(site.directory / "model" / "tokenizer.json"))


@asynccontextmanager
async def stage_of(site: Site, document: dict[str, Any], status: int = 200) -> AsyncIterator[int]:
    """A stage's health port: mutual TLS, one document."""

    async def health(request: web.Request) -> web.Response:
        return web.json_response(document, status=status)

    application = web.Application()
    application.add_routes([web.get("/health", health)])
    runner = web.AppRunner(application)
    await runner.setup()
    context = TlsIdentity(site.pki.ca, site.pki.certificate, site.pki.key).server_context()
    assert context.verify_mode == ssl.CERT_REQUIRED
    await web.TCPSite(runner, "127.0.0.1", 0, ssl_context=context).start()
    yield runner.addresses[0][1]
    await runner.cleanup()


async def test_ask_prints_the_answer(site: Site, tokenizer: Tokenizer) -> None:
    pipeline = ScriptedPipeline(says(tokenizer, "the lazy dog €"))
    async with running(site.directory, site.pki, {"main": pipeline}) as gateway:
        site.write_endpoints(gateway_port=gateway.https_port)
        options = ("--max-tokens", "40", "--temperature", "0", "--seed", "5", "--system", "be brief")
        answer = await fleet("ask", "hi", "-i", str(site.inventory), *options)
        code, out, _ = await fleet("ask", "hi", "-i", str(site.inventory), "-o", "json")
    assert answer == (0, "the lazy dog €\n", "")
    request = pipeline.requests[0]
    assert (request.max_tokens, request.sampling.temperature, request.sampling.seed) == (40, 0.0, 5)
    assert "be brief" in tokenizer.decode(list(request.prompt))
    data = json.loads(out)["data"]
    assert (code, data["text"], data["finish_reason"]) == (0, "the lazy dog €", "stop")
    assert data["usage"]["completion_tokens"] > 0


async def test_ask_shows_each_token_as_it_comes_and_ctrl_c_cancels(site: Site, tokenizer: Tokenizer) -> None:
    token = tokenizer.encode("one").ids[0]
    pipeline = ScriptedPipeline(lambda request: [TokenEvent(0, token), asyncio.Event()])
    async with running(site.directory, site.pki, {"main": pipeline}) as gateway:
        site.write_endpoints(gateway_port=gateway.https_port)
        process = await start("ask", "hi", "-i", str(site.inventory))
        assert process.stdout is not None
        assert await process.stdout.readexactly(1) == tokenizer.decode([token])[:1].encode()
        process.send_signal(signal.SIGINT)
        _, err = await process.communicate()
        await pipeline.closing.wait()
    assert process.returncode == 130
    assert "Traceback" not in err.decode()
    assert pipeline.closed == [pipeline.requests[0].sequence_id]


async def test_ask_says_what_it_waits_for(site: Site, tokenizer: Tokenizer) -> None:
    pipeline = ScriptedPipeline(lambda request: [asyncio.Event()])
    async with running(site.directory, site.pki, {"main": pipeline}) as gateway:
        site.write_endpoints(gateway_port=gateway.https_port)
        process = await start("ask", "hi", "-i", str(site.inventory))
        assert process.stderr is not None
        line = (await process.stderr.readline()).decode()
        process.kill()
        await process.communicate()
    assert f"waiting for the first token from {gateway.url.replace('localhost', '127.0.0.1')}" in line
    assert f"{QUIET_SECONDS:.0f} s" in line


async def test_ask_names_the_next_command(site: Site, tokenizer: Tokenizer) -> None:
    code, _, err = await fleet("ask", "hi", "-i", str(site.inventory))
    assert (code, "was not provisioned from here" in err, "next: fleet provision" in err) == (1, True, True)
    site.write_endpoints(gateway_port=free_port())
    code, _, err = await fleet("ask", "hi", "-i", str(site.inventory))
    assert (code, "refused" in err, f"next: fleet status -i {site.inventory}" in err) == (3, True, True)
    failed = FinishedEvent("error", "a bug")  # what is unavailable is asked again, a bug ends the answer
    pipeline = ScriptedPipeline(says(tokenizer, "the dog", after=failed))
    async with running(site.directory, site.pki, {"main": pipeline}) as gateway:
        site.write_endpoints(gateway_port=gateway.https_port)
        code, out, err = await fleet("ask", "hi", "-i", str(site.inventory))
        assert (code, out, "the answer broke off: " in err) == (1, "the dog", True)
        code, _, err = await fleet("ask", "hi", "-i", str(site.inventory), "--model", "other")
        assert (code, "there is tiny" in err) == (1, True)
        (site.directory / ".fleet" / "demo" / "api_key").write_text("another")
        code, _, err = await fleet("ask", "hi", "-i", str(site.inventory))
        assert (code, "API key is not known" in err) == (1, True)
    assert "Traceback" not in err


async def test_status_shows_the_site(site: Site, tokenizer: Tokenizer) -> None:
    pipeline = ScriptedPipeline(says(tokenizer, "x"))
    async with (
        running(site.directory, site.pki, {"main": pipeline}) as gateway,
        stage_of(site, STAGE) as port,
        serving(ScriptedCoordinator(), site.pki) as coordinator_port,
    ):
        ports = {"gateway_port": gateway.https_port, "coordinator_port": coordinator_port}
        site.write_endpoints(**ports, stage_port=port)
        code, out, err = await fleet("status", "-i", str(site.inventory))
        assert (code, err) == (0, "every stage, the gateway and the coordinator serve\n")
        rows = [line.split("\t") for line in out.splitlines()]
        assert rows[1][:4] == ["box1", "ready", "0-10", "embedding, head"]
        assert ["main", "serving", "3", "box1 box2 box3", "", "", "", ""] in rows
        assert ["box2", "serving", "5 min", "25%", "52", "", ""] in rows
        state, url = site.directory / ".fleet" / "demo", f"https://127.0.0.1:{gateway.https_port}/v1"
        assert f"API {url} · CA {state}/ca/ca.crt · key in {state}/api_key" in out
        code, out, _ = await fleet("status", "-i", str(site.inventory), "-o", "json")
        document = json.loads(out)
        assert (document["kind"], document["data"]["stages"][0]["layers"]) == ("status", [0, 11])
        assert document["data"]["coordinator"]["plans"][0]["order"] == ["box1", "box2", "box3"]
        assert document["data"]["clients"] == {
            "base_url": url,
            "ca_file": f"{state}/ca/ca.crt",
            "api_key_in": f"{state}/api_key",
        }
        assert KEY not in out
        site.write_endpoints(**ports, stage_port=free_port())
        code, out, err = await fleet("status", "-i", str(site.inventory))
        assert (code, "unreachable" in out) == (3, True)
        assert err.startswith("box1: unreachable: 127.0.0.1:")
        assert f"next: fleet provision {site.inventory} --check" in err


async def test_status_without_a_coordinator_shows_the_rest(site: Site, tokenizer: Tokenizer) -> None:
    pipeline = ScriptedPipeline(says(tokenizer, "x"))
    async with running(site.directory, site.pki, {"main": pipeline}) as gateway, stage_of(site, STAGE) as port:
        site.write_endpoints(gateway_port=gateway.https_port, stage_port=port, coordinator_port=free_port())
        code, out, err = await fleet("status", "-i", str(site.inventory))
    assert (code, out.splitlines()[1].split("\t")[:2]) == (3, ["box1", "ready"])
    assert "coordinator: unreachable: 127.0.0.1:" in err
    assert "the site serves on with the plan that it has, and nothing is healed until it is back" in err


async def test_endpoints_of_an_older_version_say_what_to_do(site: Site) -> None:
    site.write_endpoints()
    path = site.directory / ".fleet" / "demo" / "endpoints.json"
    document = json.loads(path.read_text())
    del document["coordinator"]
    path.write_text(json.dumps(document))
    code, _, err = await fleet("status", "-i", str(site.inventory))
    assert (code, "it names no coordinator" in err, f"next: fleet provision {site.inventory}" in err) == (1, True, True)


async def test_status_of_a_failed_stage(site: Site) -> None:
    failed = {**STAGE, "state": "failed", "reason": "layer-003.safetensors: digest differs"}
    async with stage_of(site, failed, 503) as port:
        site.write_endpoints(gateway_port=free_port(), stage_port=port, coordinator_port=free_port())
        code, out, err = await fleet("status", "-i", str(site.inventory))
    assert code == 1
    assert out.splitlines()[1].startswith("box1\tfailed")
    assert "box1: failed: layer-003.safetensors: digest differs" in err
    assert "gateway: unreachable" in err
