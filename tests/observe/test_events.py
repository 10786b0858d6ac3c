"""`fleet events`: the last ones, of one box, and those that come."""

from __future__ import annotations

import asyncio
import json
from datetime import timezone
from typing import Any

import pytest

from fleet.observe.coordinator import EVENTS_A_PAGE, event_of
from fleet.observe.event_rows import EVENT_COLUMNS, event_line, event_rows
from tests.observe.conftest import Site, fleet, start
from tests.observe.coordinator import ScriptedCoordinator, serving


def event(number: int, **changes: Any) -> dict[str, Any]:
    return {
        "id": number, "unix_seconds": 1_700_000_000.0 + number, "kind": "box-dead", "pipeline": "main", "box": "box2",
        "text": f"event {number}", "milliseconds": {}, **changes,
    }  # fmt: skip


PHASES = {"detect": 41.4, "plan": 2, "prepare": 220, "commit": 11, "ring": 160}


def test_a_row_and_a_line() -> None:
    found = [event_of(event(1)), event_of(event(2, kind="plan-serving", box="", milliseconds=PHASES))]
    rows = [dict(zip(EVENT_COLUMNS, row, strict=True)) for row in event_rows(found, timezone.utc)]
    assert rows[0] == {
        "id": "1", "when": "11-14 22:13:21", "event": "box-dead", "pipeline": "", "box": "box2", "what": "event 1",
        "ms": "",
    }  # fmt: skip
    assert rows[1]["ms"] == "detect 41, plan 2, prepare 220, commit 11, ring 160"
    assert event_line(found[0], timezone.utc) == "11-14 22:13:21  box-dead  [main box2]  event 1"
    assert event_line(found[1], timezone.utc).endswith(
        "event 2  (detect 41, plan 2, prepare 220, commit 11, ring 160 ms)"
    )


def test_the_pipeline_is_named_where_there_are_several() -> None:
    rows = event_rows([event_of(event(1)), event_of(event(2, pipeline="other"))], timezone.utc)
    assert [row[3] for row in rows] == ["main", "other"]


@pytest.mark.parametrize("entry", [{}, {"id": "x", "unix_seconds": 1e300, "milliseconds": [1]}, {"unix_seconds": True}])
def test_any_entry_makes_a_row(entry: dict[str, Any]) -> None:
    assert event_rows([event_of(entry)]) == [("0", *event_rows([event_of(entry)])[0][1:])]


async def test_the_last_events_newest_last(site: Site) -> None:
    count = EVENTS_A_PAGE + 20  # more than one page
    coordinator = ScriptedCoordinator(events=[event(n, box=f"box{n % 2 + 1}") for n in range(1, count + 1)])
    async with serving(coordinator, site.pki) as port:
        site.write_endpoints(coordinator_port=port)
        code, out, _ = await fleet("events", "-i", str(site.inventory), "--limit", "3", "-o", "json")
        numbers = [entry["id"] for entry in json.loads(out)["data"]]
        assert (code, numbers) == (0, [count - 2, count - 1, count])
        _, out, _ = await fleet("events", "-i", str(site.inventory), "--limit", "2", "--box", "box1")
        ids = [line.split("\t")[0] for line in out.splitlines()[1:]]
        assert ids == [str(n) for n in range(1, count + 1) if n % 2 == 0][-2:]
        _, out, _ = await fleet("events", "-i", str(site.inventory), "--after", str(count - 1))
        assert len(out.splitlines()) == 2


async def test_a_box_that_nobody_knows_is_named(site: Site) -> None:
    coordinator = ScriptedCoordinator(events=[event(1, box="box9")])
    async with serving(coordinator, site.pki) as port:
        site.write_endpoints(coordinator_port=port)
        code, out, err = await fleet("events", "-i", str(site.inventory), "--box", "bx2")
        assert (code, out) == (2, "")
        assert 'no box bx2, and no event about one; did you mean "box2"?' in err
        for box, lines in (("box2", 1), ("box9", 2)):  # one without events, one that the inventory has no more
            code, out, _ = await fleet("events", "-i", str(site.inventory), "--box", box)
            assert (code, len(out.splitlines())) == (0, lines)


async def test_follow_prints_what_comes(site: Site) -> None:
    coordinator = ScriptedCoordinator(events=[event(1)])
    async with serving(coordinator, site.pki) as port:
        site.write_endpoints(coordinator_port=port)
        process = await start("events", "-i", str(site.inventory), "--follow", "-o", "json")
        assert process.stdout is not None
        first = json.loads(await process.stdout.readline())
        coordinator.events.append(event(2))
        second = json.loads(await process.stdout.readline())
        process.kill()
        await process.communicate()
    assert [(line["kind"], line["data"]["id"]) for line in (first, second)] == [("event", 1), ("event", 2)]


async def test_a_coordinator_that_is_away_ends_with_3(site: Site) -> None:
    site.write_endpoints(coordinator_port=1)
    code, out, err = await fleet("events", "-i", str(site.inventory), "-o", "json")
    document = json.loads(out)
    assert (code, document["kind"], document["data"]["exit_code"]) == (3, "error", 3)
    assert f"next: fleet status -i {site.inventory}" in err


async def test_follow_waits_for_a_coordinator_that_restarts(site: Site) -> None:
    coordinator = ScriptedCoordinator(events=[event(1)])
    async with serving(coordinator, site.pki) as port:
        site.write_endpoints(coordinator_port=port)
        process = await start("events", "-i", str(site.inventory), "--follow")
        assert process.stdout is not None
        assert process.stderr is not None
        assert b"event 1" in await process.stdout.readline()
    waiting = await asyncio.wait_for(process.stderr.readline(), 20)
    process.kill()
    await process.communicate()
    assert b"waiting for it" in waiting
