"""`fleet drill` as a process: a real supervisord loses its stage, TLS servers speak for gateway and coordinator."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from fleet.inventory.sitefile import SiteFile
from fleet.provision.agent.rpc import SupervisorRpc
from fleet.provision.render_layout import layout_of
from fleet.provision.state_directory import site_lock
from stage_runtime.link.tls import TlsIdentity
from tests.drill.conftest import process_state, until
from tests.gateway.site import KEY, Pki, make_pki
from tests.observe.conftest import fleet, start
from tests.observe.coordinator import ScriptedCoordinator, serving

PHASES = {"detect": 12, "plan": 1, "prepare": 30, "commit": 4, "ring": 80}
SERVING = {
    "id": 8, "unix_seconds": 1.7e9, "kind": "plan-serving", "pipeline": "main", "box": "", "text": "plan 4 serves",
    "milliseconds": PHASES,
}  # fmt: skip
DEAD = {**SERVING, "id": 7, "kind": "box-dead", "box": "box1", "text": "box1 is dead", "milliseconds": {}}
BEFORE = {**DEAD, "id": 6, "kind": "coordinator-started", "text": "started"}
TOKENS = list(range(100, 140))
TOKEN_SECONDS = 0.02


@dataclass
class ScriptedGateway:
    """Streams token ids.

    Attributes:
        second: makes the tokens of the second round from those of the first. asked: bodies as they came in.
    """

    second: Callable[[list[int]], list[int]] = lambda tokens: tokens
    on_second: Callable[[], None] = lambda: None
    asked: list[dict[str, Any]] = field(default_factory=list)

    async def answer(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        again = any(other["seed"] == body["seed"] for other in self.asked)
        self.asked.append(body)
        if request.headers.get("Authorization") != f"Bearer {KEY}":
            return web.json_response({"error": {"message": "no key"}}, status=401)
        if again:
            self.on_second()
        tokens = [body["seed"] + token for token in TOKENS]
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for token in self.second(tokens) if again else tokens:
            await self._event(response, {"delta": {"content": "x"}, "token_ids": [token], "finish_reason": None})
            await asyncio.sleep(TOKEN_SECONDS)
        await response.write(b": waiting for a plan\n\n")
        await self._event(response, {"delta": {}, "token_ids": [], "finish_reason": "length"})
        await response.write(b"data: [DONE]\n\n")
        return response

    @staticmethod
    async def _event(response: web.StreamResponse, choice: dict[str, Any]) -> None:
        document = {"id": "chatcmpl-1", "choices": [{"index": 0, **choice}]}
        await response.write(f"id: 1\ndata: {json.dumps(document)}\n\n".encode())


@dataclass(frozen=True)
class Drilled:
    """A site that can be drilled."""

    site_file: SiteFile
    gateway: ScriptedGateway
    coordinator: ScriptedCoordinator

    async def drill(self, *arguments: str) -> tuple[int, str, str]:
        return await fleet("drill", *arguments, "-i", str(self.site_file.file))


@asynccontextmanager
async def gateway_of(gateway: ScriptedGateway, pki: Pki) -> AsyncIterator[int]:
    application = web.Application()
    application.add_routes([web.post("/v1/chat/completions", gateway.answer)])
    runner = web.AppRunner(application)
    await runner.setup()
    context = TlsIdentity(pki.ca, pki.certificate, pki.key).server_context(require_certificate=False)
    await web.TCPSite(runner, "127.0.0.1", 0, ssl_context=context).start()
    try:
        yield runner.addresses[0][1]
    finally:
        await runner.cleanup()


@pytest.fixture
async def drilled(site_file: SiteFile) -> AsyncIterator[Drilled]:
    state = site_file.state_directory
    pki = make_pki(state, site="small")
    (state / "api_key").write_text(KEY)
    gateway, coordinator = ScriptedGateway(), ScriptedCoordinator(events=[BEFORE])
    gateway.on_second = lambda: coordinator.events.extend([DEAD, SERVING][len(coordinator.events) - 1 :])
    async with gateway_of(gateway, pki) as gateway_port, serving(coordinator, pki) as coordinator_port:
        places = {
            name: {"host": "127.0.0.1", "port": port, "server_name": "control.small.fleet.internal"}
            for name, port in (("gateway", gateway_port), ("coordinator", coordinator_port))
        }
        (state / "endpoints.json").write_text(json.dumps({"schema": 1, "stages": {}, **places}))
        yield Drilled(site_file, gateway, coordinator)


async def test_a_kill_that_nobody_notices(drilled: Drilled, supervisor: SupervisorRpc) -> None:
    before = supervisor.programs()["stage"]["pid"]
    code, out, err = await drilled.drill("kill", "box1", "--yes", "-o", "json")
    data = json.loads(out)["data"]
    assert (code, data["noticed"], data["missing"], data["exit_code"]) == (0, False, "", 0)
    assert data["done"] == f"killed the stage (process {before})"
    assert [(one["mode"], one["tokens"], one["completed"]) for one in data["streams"]] == [
        ("greedy", 40, True),
        ("seeded", 40, True),
    ] * 2
    assert [event["id"] for event in data["events"]] == [7, 8]
    assert data["switches"][0]["milliseconds"] == PHASES
    assert "in mid-answer: killed the stage" in err
    until(lambda: supervisor.programs()["stage"]["pid"] not in {0, before}, "another process of the stage")
    assert {body["temperature"] for body in drilled.gateway.asked} == {0.0, 0.8}


async def test_lost_tokens_are_reported_and_end_with_1(drilled: Drilled, supervisor: SupervisorRpc) -> None:
    drilled.gateway.second = lambda tokens: tokens[:20] + tokens[22:]
    code, out, err = await drilled.drill("kill", "box1", "--yes", "--streams", "2")
    rows = [line.split("\t") for line in out.splitlines()[1:]]
    assert (code, [row[:6] for row in rows]) == (
        1,
        [["greedy-1", "38", "yes", "2", "0", "0"], ["seeded-1", "38", "yes", "2", "0", "0"]],
    )
    assert "plan 4 serves: detect 12, plan 1, prepare 30, commit 4, ring 80 ms" in err
    assert "users would have noticed failed, lost, repeated or changed output" in err


async def test_nothing_is_broken_where_the_undisturbed_round_fails(drilled: Drilled, supervisor: SupervisorRpc) -> None:
    before = supervisor.programs()["stage"]["pid"]
    (drilled.site_file.state_directory / "api_key").write_text("another")
    code, _, err = await drilled.drill("kill", "box1", "--yes")
    assert (code, "the undisturbed answer failed already: HTTP 401: no key" in err) == (1, True)
    assert supervisor.programs()["stage"]["pid"] == before


async def test_a_switch_under_way_is_waited_for(drilled: Drilled) -> None:
    """After a provisioning the planner may still spread the layers: no reason to fail."""
    main = drilled.coordinator.document["pipelines"]["main"]
    for epoch in (4, 5):
        seconds = 0.5 * (epoch - 4)
        switching = {"epoch": epoch, "planned": True, "since_seconds": seconds, "waiting_for": ["box1"]}
        asyncio.get_running_loop().call_later(seconds, main.update, {"switching": switching})
    asyncio.get_running_loop().call_later(4.0, main.update, {"switching": None})
    code, _, err = await drilled.drill("kill", "box1")
    assert (code, "next: add --yes" in err) == (2, True)
    assert "waiting for a whole site, at most " in err
    assert "pipeline main switches to epoch 5" in err


async def test_ctrl_c_says_that_the_box_heals_itself(drilled: Drilled, supervisor: SupervisorRpc) -> None:
    stage = supervisor.programs()["stage"]["pid"]
    process = await start("drill", "hang", "box1", "--yes", "--seconds", "4", "-i", str(drilled.site_file.file))
    assert process.stderr is not None
    while b"stopped the stage" not in await process.stderr.readline():
        pass
    until(lambda: process_state(stage) == "T", "the signal takes effect")
    process.send_signal(signal.SIGINT)
    _, err = await process.communicate()
    assert process.returncode == 130
    assert b"box1 may still be broken; it heals itself within 4 s" in err
    until(lambda: process_state(stage) == "S", "the stage goes on")


async def test_a_drill_needs_a_yes(drilled: Drilled) -> None:
    code, _, err = await drilled.drill("kill", "box1")
    assert (code, "next: add --yes" in err) == (2, True)
    assert "kills the stage process of box1 (layers 0-9); supervisord" in err
    assert drilled.gateway.asked == []


async def test_what_is_refused_before_anything_runs(drilled: Drilled) -> None:
    code, _, err = await drilled.drill("link-cut", "box1", "--yes")
    assert (code, "is a directory of this machine" in err) == (1, True)
    for kind, says in (("leak", "not possible here"), ("clock", "has no clock of its own")):
        code, _, err = await drilled.drill(kind, "box1", "--yes")
        assert (code, says in err) == (1, True)
    drilled.coordinator.document["pipelines"]["main"]["unsurvivable"] = ["box1"]
    code, _, err = await drilled.drill("kill", "box1", "--yes")
    assert (code, "no plan fits without box1" in err) == (1, True)
    with site_lock(drilled.site_file.state_directory, "drill.lock"):
        code, _, err = await drilled.drill("kill", "box1", "--yes")
    assert (code, "site is locked by process" in err) == (4, True)
    assert drilled.gateway.asked == []


async def test_heat_trips_the_guard_and_it_recovers(drilled: Drilled, supervisor: SupervisorRpc) -> None:
    """The guards' page is played, by what the box really shows."""
    state = drilled.site_file.state_directory
    zone = Path(layout_of(drilled.site_file, "box1", os.getuid()).run_directory) / "drill/thermal/thermal_zone0/temp"
    seen: list[bool] = []

    async def page(_: web.Request) -> web.Response:
        seen.append(zone.exists())
        part = {"part": "limit", "state": "degraded" if zone.exists() else "healthy", "reason": "batch limit 4 → 3"}
        return web.json_response({"guards": {"thermal": {"state": part["state"], "findings": [part]}}})

    application = web.Application()
    application.add_routes([web.get("/v1/guards", page)])
    runner = web.AppRunner(application)
    await runner.setup()
    endpoints = json.loads((state / "endpoints.json").read_text())
    context = make_pki(state, site="small")
    tls = TlsIdentity(context.ca, context.certificate, context.key).server_context(require_certificate=False)
    await web.TCPSite(runner, "127.0.0.1", 0, ssl_context=tls).start()
    place = {**endpoints["gateway"], "port": runner.addresses[0][1]}
    (state / "endpoints.json").write_text(json.dumps({**endpoints, "guards": {"box1": place}}))
    try:
        code, out, err = await drilled.drill("heat", "box1", "--yes", "-o", "json")
    finally:
        await runner.cleanup()
    assert (code, "its guards read 86 °C" in err) == (0, True), err
    data = json.loads(out)["data"]
    assert (data["tripped"], data["noticed"]) == ({"limit": "batch limit 4 → 3"}, False)
    assert (seen[0], True in seen, seen[-1]) == (False, True, False)
