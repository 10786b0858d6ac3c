"""Leases: guards ask with their own client before they take a box that serves out of its pipeline."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest

from guards.leases import CoordinatorLeases
from guards.restarts import LeaseRefused
from stage_runtime.link.tls import server_name
from tests.coordinator.site import SITE, World, until


def client(site: World, box: str, seconds: float = 30.0) -> CoordinatorLeases:
    assert site.coordinator is not None
    return CoordinatorLeases(
        SITE,
        box,
        site.ca.issue(box),
        coordinator_box="control",
        host="127.0.0.1",
        port=site.coordinator.http_port,
        lease_seconds=seconds,
    )


@asynccontextmanager
async def leased(site: World, box: str, seconds: float = 30.0) -> AsyncIterator[None]:
    """The guards' client blocks, as their threads do."""
    lease = client(site, box, seconds).take("it leaks")
    await asyncio.to_thread(lease.__enter__)
    try:
        yield
    finally:
        await asyncio.to_thread(lease.__exit__, None, None, None)


async def refusal(site: World, box: str) -> str:
    with pytest.raises(LeaseRefused) as caught:
        async with leased(site, box):
            pass
    return str(caught.value)


async def post(site: World, path: str, body: bytes, who: str, method: str = "POST") -> tuple[int, Any]:
    assert site.coordinator is not None
    url = f"https://127.0.0.1:{site.coordinator.http_port}{path}"
    context = site.ca.issue(who).client_context()
    async with (
        aiohttp.ClientSession() as session,
        session.request(method, url, data=body, ssl=context, server_hostname=server_name("control", SITE)) as response,
    ):
        return response.status, await response.json(content_type=None)


async def test_one_box_of_a_pipeline_at_a_time(site: World) -> None:
    async with leased(site, "box2"):
        assert await refusal(site, "box3") == "the coordinator on control gives no lease: box2 has the lease"
        async with leased(site, "box2"):  # its guards were killed meanwhile, and ask again
            pass
    async with leased(site, "box3"):
        pass
    kinds = [event["kind"] for event in await site.events("lease-taken", "lease-returned", "lease-ended")]
    assert kinds == ["lease-taken", "lease-returned", "lease-taken", "lease-returned"]


async def test_while_one_is_away_nobody_else_goes(site: World) -> None:
    before = site.epoch
    async with leased(site, "box2"):
        await site.stages["box2"].leave()
        await site.serving(before + 1, {"box1", "box3"})
    assert "box2 is away, and is waited for" in await refusal(site, "box3")


async def test_the_last_box_stays(site: World) -> None:
    before = site.epoch
    for number, box in enumerate(("box1", "box2"), 1):
        assert (await site.ask("POST", f"/v1/boxes/{box}/drain"))[0] == 202
        await site.serving(before + number)
        await until(lambda: site.pipeline.switching.draining is None, "the old plan is retired")
    assert "no other box can take over" in await refusal(site, "box3")


async def test_one_that_is_not_given_back_ends(site: World) -> None:
    path = "/v1/boxes/box2/lease"
    status, lease = await post(site, path, b'{"because": "it leaks", "seconds": 0.05}', "box2")
    assert (status, lease["seconds"]) == (200, 0.05)
    await until(lambda: site.pipeline.leases.held is None, "it ends")
    async with leased(site, "box3"):
        pass
    assert (await post(site, f"{path}/{lease['lease']}", b"", "box2", "DELETE"))[0] == 404
    assert len(await site.events("lease-ended")) == 1


@pytest.mark.parametrize(
    ("path", "body", "who", "status"),
    [
        ("/v1/boxes/box2/lease", {"because": "x", "seconds": 1}, "box3", 403),
        ("/v1/boxes/box2/drain", {}, "box2", 403),
        ("/v1/boxes/box9/lease", {"because": "x", "seconds": 1}, "box9", 404),
        ("/v1/boxes/box2/lease", {"because": "x", "seconds": 0}, "box2", 400),
        ("/v1/boxes/box2/lease", {"because": "", "seconds": 1}, "box2", 400),
        ("/v1/boxes/box2/lease", {"because": "x", "seconds": 1, "more": 1}, "box2", 400),
        ("/v1/boxes/box2/lease", [], "box2", 400),
        ("/v1/boxes/box2/lease", {"because": "x" * 5000, "seconds": 1}, "box2", 413),
        ("/v1/boxes/box2/lease", {"because": "line\nline" + "x" * 500, "seconds": 1e5}, "box2", 200),
        ("/v1/boxes/box2/lease", {"because": "by hand", "seconds": 5}, "operator", 200),
    ],
)
async def test_who_may_ask_and_how(site: World, path: str, body: object, who: str, status: int) -> None:
    answered, document = await post(site, path, json.dumps(body).encode(), who)
    assert answered == status
    if status == 200:
        assert document["seconds"] <= 3600
        (taken,) = await site.events("lease-taken")
        assert "\n" not in taken["text"]
        assert len(taken["text"]) < 300
    else:
        assert document["reason"]


async def test_no_coordinator_no_lease(site: World) -> None:
    asking = client(site, "box2")
    await site.stop()
    with pytest.raises(LeaseRefused, match="can't be asked"):
        await asyncio.to_thread(asking.take("it leaks").__enter__)
