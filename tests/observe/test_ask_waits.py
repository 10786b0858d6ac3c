"""`fleet ask` while the gateway waits for a plan: a comment of the stream becomes a line."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from aiohttp import web

from fleet.gateway.reader import KEEP_ALIVE
from fleet.gateway.reader import REPLANNING as GATEWAY_SAYS
from fleet.observe.asking import REPLANNING
from stage_runtime.link.tls import TlsIdentity
from tests.observe.conftest import Site, fleet

CHUNK = 'data: {"id":"chatcmpl-1","model":"tiny","choices":[{"delta":{"content":"%s"},"finish_reason":%s}]}\n\n'


async def answer(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    for part in (CHUNK % ("one", "null"), f": {GATEWAY_SAYS}\n\n", f": {KEEP_ALIVE}\n\n", CHUNK % (" two", '"stop"')):
        await response.write(part.encode())
    await response.write(b"data: [DONE]\n\n")
    return response


@pytest.fixture
async def gateway_port(site: Site) -> AsyncIterator[int]:
    application = web.Application()
    application.add_routes([web.post("/v1/chat/completions", answer)])
    runner = web.AppRunner(application)
    await runner.setup()
    context = TlsIdentity(site.pki.ca, site.pki.certificate, site.pki.key).server_context(require_certificate=False)
    await web.TCPSite(runner, "127.0.0.1", 0, ssl_context=context).start()
    yield runner.addresses[0][1]
    await runner.cleanup()


async def test_ask_says_that_it_waits_for_a_plan(site: Site, gateway_port: int) -> None:
    site.write_endpoints(gateway_port=gateway_port)
    code, out, err = await fleet("ask", "hi", "--model", "tiny", "-i", str(site.inventory))
    assert (code, out) == (0, "one two\n")
    assert err.splitlines() == ["the answer waits for a new plan: layers move (why: fleet events)"]


def test_ask_knows_the_gateways_comment() -> None:
    assert REPLANNING in GATEWAY_SAYS.encode()
    assert REPLANNING not in KEEP_ALIVE.encode()
