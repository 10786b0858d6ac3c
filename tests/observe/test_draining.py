"""`fleet drain`, `fleet undrain`: what they wait for, and what they say in the end."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest

from fleet.errors import FleetError
from fleet.observe.draining import Span, span_of, spans_of, taken_by, waits_for
from tests.observe.conftest import Site, fleet
from tests.observe.coordinator import ScriptedCoordinator, member, serving, site_document, stage

SWITCHING = {"epoch": 4, "planned": True, "since_seconds": 0.1, "waiting_for": ["box1"]}


def document(box2: str, *, without_box2: bool, switching: dict[str, Any] | None = None) -> dict[str, Any]:
    changed = copy.deepcopy(site_document())
    changed["boxes"]["box2"]["state"] = box2
    changed["pipelines"]["main"]["switching"] = switching
    if without_box2:
        changed["pipelines"]["main"]["stages"] = [stage("box1", 0, 15), stage("box3", 15, 30)]
        changed["pipelines"]["main"]["epoch"] = 4
    return changed


def test_who_took_the_layers() -> None:
    before, after = site_document(), document("drained", without_box2=True)
    assert span_of(before, "box2") == Span("box2", 10, 20)
    assert span_of(after, "box2") is None
    assert taken_by(span_of(before, "box2"), after) == (Span("box1", 10, 15), Span("box3", 15, 20))
    assert taken_by(None, after) == ()
    assert spans_of({"boxes": {"box2": member()}, "pipelines": {"main": {"stages": [7, {"box": "x"}]}}}, "box2") == ()


@pytest.mark.parametrize(
    ("state", "without", "switching", "order", "waits"),
    [
        ("draining", False, None, "drain", "box2 is draining"),
        ("draining", False, SWITCHING, "drain", "box2 is draining; switching to epoch 4"),
        ("drained", True, SWITCHING, "drain", "box2 is drained; switching to epoch 4"),
        ("drained", True, None, "drain", None),
        ("dead", True, None, "drain", None),
        ("serving", False, None, "drain", "box2 is serving"),
        ("drained", True, None, "undrain", "box2 is drained"),
        ("returning", True, None, "undrain", "box2 is returning"),
        ("returning", True, SWITCHING, "undrain", "box2 is returning; switching to epoch 4"),
        ("held-down", True, None, "undrain", "box2 is held-down"),
        ("standby", True, None, "undrain", None),
        ("serving", False, None, "undrain", None),
    ],
)
def test_what_is_still_missing(
    state: str, without: bool, switching: dict[str, Any] | None, order: Any, waits: str | None
) -> None:
    assert waits_for(document(state, without_box2=without, switching=switching), "box2", order) == waits


@pytest.mark.parametrize("state", ["dead", "hung", "never-seen"])
def test_a_dead_box_does_not_come_back_by_an_order(state: str) -> None:
    with pytest.raises(FleetError, match=f"box2 is {state}: it takes part again once it is back"):
        waits_for(document(state, without_box2=True), "box2", "undrain")


async def test_drain_waits_and_names_who_took_the_layers(site: Site) -> None:
    coordinator = ScriptedCoordinator(
        upcoming=[
            document("draining", without_box2=False),
            document("draining", without_box2=False, switching=SWITCHING),
            document("drained", without_box2=True),
        ],
        on_order=lambda box, what: (202, member("draining")),
    )
    async with serving(coordinator, site.pki) as port:
        site.write_endpoints(coordinator_port=port)
        code, out, err = await fleet("drain", "box2", "-i", str(site.inventory))
        assert (code, coordinator.orders) == (0, [("box2", "drain")])
        assert out.startswith("box2 is drained: its layers went to box1 (10-14), box3 (15-19), in ")
        assert "box2 is draining; switching to epoch 4" in err
        code, out, _ = await fleet("drain", "box2", "-i", str(site.inventory))  # once more: nothing changes
        assert (code, out) == (0, "box2 was drained already\n")
        coordinator.on_order = lambda box, what: (202, member("returning"))
        coordinator.upcoming = [document("returning", without_box2=True), document("serving", without_box2=False)]
        code, out, _ = await fleet("undrain", "box2", "-i", str(site.inventory), "-o", "json")
        data = json.loads(out)["data"]
    assert (code, data["state"], data["spans"]) == (0, "serving", [{"box": "box2", "start": 10, "end": 20}])


async def test_no_wait_gives_the_order_and_ends(site: Site) -> None:
    coordinator = ScriptedCoordinator(on_order=lambda box, what: (202, member("draining")))
    async with serving(coordinator, site.pki) as port:
        site.write_endpoints(coordinator_port=port)
        code, out, _ = await fleet("drain", "box2", "--no-wait", "-i", str(site.inventory))
    assert (code, coordinator.orders) == (0, [("box2", "drain")])
    assert out.startswith("box2 is draining; the order stands")


async def test_a_drain_that_does_not_fit_shows_what_each_box_lacks(site: Site) -> None:
    refusal = {"error": "no plan fits without it", "missing_mebibytes": {"box1": 120, "box3": 87}}
    coordinator = ScriptedCoordinator(on_order=lambda box, what: (409, refusal))
    async with serving(coordinator, site.pki) as port:
        site.write_endpoints(coordinator_port=port)
        code, out, err = await fleet("drain", "box2", "-i", str(site.inventory))
    assert (code, out) == (1, "")
    assert "box2 is not drained: no plan fits without it\n  box1 lacks 120 MiB\n  box3 lacks 87 MiB" in err
    assert "next: bring back boxes that are out" in err


async def test_where_others_are_drained_already_one_of_them_is_the_way_out(site: Site) -> None:
    before = document("serving", without_box2=False)
    before["boxes"]["box1"] = {**member("drained"), "pipeline": before["boxes"]["box2"]["pipeline"]}
    coordinator = ScriptedCoordinator(before, on_order=lambda box, what: (409, {"error": "none is there"}))
    async with serving(coordinator, site.pki) as port:
        site.write_endpoints(coordinator_port=port)
        code, _, err = await fleet("drain", "box2", "-i", str(site.inventory))
    assert code == 1
    assert "box2 is not drained: none is there\n  drained already: box1\n  next: fleet undrain box1" in err


async def test_undrain_of_a_box_that_was_not_drained_says_so(site: Site) -> None:
    coordinator = ScriptedCoordinator(
        upcoming=[document("serving", without_box2=False)], on_order=lambda box, what: (202, member("serving"))
    )
    async with serving(coordinator, site.pki) as port:
        site.write_endpoints(coordinator_port=port)
        code, out, _ = await fleet("undrain", "box2", "-i", str(site.inventory))
    assert (code, out) == (0, "box2 was not drained; it serves layers 10-19\n")


async def test_a_name_that_is_no_stage_box_is_refused_before_anyone_is_asked(site: Site) -> None:
    code, _, err = await fleet("drain", "bx2", "-i", str(site.inventory))
    assert (code, 'no pipeline has a box bx2; did you mean "box2"?' in err) == (2, True)
    code, _, err = await fleet("undrain", "control", "-i", str(site.inventory))
    assert (code, "no pipeline has a box control" in err) == (2, True)
