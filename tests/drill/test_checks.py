"""When a drill may begin, and when its box is back."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from fleet.drill.checks import inventory_refusal, site_refusal, still_missing, switches
from fleet.inventory.loader import load_site
from fleet.observe.coordinator import event_of
from tests.observe.coordinator import member, site_document
from tests.provision.sites import write_site


def document(box: str = "", plan: dict[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
    found = site_document()
    found["pipelines"]["main"].update(plan or {})
    if box:
        found["boxes"][box].update(changes)
    return found


HELD = {"state": "held-down", "hold_down_seconds_left": 12.0}
SWITCHING = {"epoch": 4, "planned": True, "since_seconds": 1.0, "waiting_for": []}


@pytest.mark.parametrize(
    ("found", "message"),
    [
        (document(), None),
        (document(plan={"unsurvivable": ["box1"]}), None),
        (document(plan={"unsurvivable": ["box2"]}), "no plan fits without box2"),
        (document("box3", state="dead"), "box3 is dead: a drill begins on a whole site"),
        (document("box2", state="held-down"), "box2 is held-down"),
        (document(plan={"switching": SWITCHING}), "pipeline main switches to epoch 4"),
        (document(plan={"state": "refused", "reason": "no memory"}), r"pipeline main is refused \(no memory\)"),
        (document(plan={"stages": [{"box": "box1", "layers": [0, 30]}]}), "box2 stands by and serves no layers"),
        ({**document(), "boxes": {"box1": member()}}, "the coordinator knows no box box2"),
        ({**document(), "pipelines": {}}, "pipeline main has no plan"),
        ({}, "the coordinator knows no box box2"),
    ],
)
def test_a_drill_begins_on_a_whole_site(found: dict[str, Any], message: str | None) -> None:
    refusal = site_refusal(found, "box2", "fleet status")
    if message is None:
        assert refusal is None
        return
    assert refusal is not None
    assert re.search(message, refusal.message)
    assert refusal.hint


@pytest.mark.parametrize(
    ("found", "passes"),
    [
        (document("box2", state="held-down"), True),
        (document("box3", state="returning"), True),
        (document("box3", state="drained"), False),
        (document("box3", state="dead"), False),
        (document(plan={"switching": SWITCHING}), True),
        (document(plan={"state": "replanning"}), True),
        (document(plan={"state": "refused"}), False),
        (document(plan={"unsurvivable": ["box2"]}), False),
    ],
)
def test_what_ends_by_itself_is_worth_a_wait(found: dict[str, Any], passes: bool) -> None:
    refusal = site_refusal(found, "box2", "fleet status")
    assert refusal is not None
    assert refusal.passes == passes


@pytest.mark.parametrize(
    ("found", "missing"),
    [
        (document(), None),
        (document("box2", state="standby"), "box2 stands by"),
        (
            document("box2", state="held-down", hold_down_seconds_left=12.0),
            "box2 is held-down (12 s of hold-down left)",
        ),
        (document(plan={"degraded": "box2 is out"}), "pipeline main: box2 is out"),
        (document(plan={"switching": SWITCHING}), "pipeline main switches to epoch 4"),
        (document(plan={"state": "replanning"}), "pipeline main is replanning"),
        ({}, "box2 is unknown"),
    ],
)
def test_when_the_site_is_whole_again(found: dict[str, Any], missing: str | None) -> None:
    assert still_missing(found, "box2") == missing


@pytest.mark.parametrize("kind", ["power-cut", "kill", "hang", "link-cut"])
def test_a_local_box_has_no_link_to_cut(tmp_path: Path, kind: Any) -> None:
    site = write_site(tmp_path, connection="local").site
    refusal = inventory_refusal(site, "main", "box2", kind, 4)
    assert (refusal is not None) == (kind in ("power-cut", "link-cut"))
    assert refusal is None or "fleet drill kill box2" in refusal.hint


@pytest.mark.parametrize("kind", ["power-cut", "link-cut"])
def test_a_box_that_users_need_is_not_cut_off(tmp_path: Path, kind: Any) -> None:
    site_file = write_site(tmp_path)
    assert inventory_refusal(site_file.site, "main", "box2", kind, 4) is None
    text = site_file.file.read_text()
    box2 = "box2: {address: 10.77.0.12"
    text = text.replace(box2, f"{box2}, roles: [stage, gateway]").replace("[coordinator, gateway]", "[coordinator]")
    site_file.file.write_text(text)
    refusal = inventory_refusal(load_site(site_file.file).site, "main", "box2", kind, 4)
    assert refusal is not None
    assert refusal.message.startswith("box2 is gateway too")


def test_no_more_streams_than_the_pipeline_runs_at_once(tmp_path: Path) -> None:
    refusal = inventory_refusal(write_site(tmp_path).site, "main", "box2", "kill", 5)
    assert refusal is not None
    assert (refusal.message, refusal.hint) == ("pipeline main runs 4 answers at once, not 5", "--streams 4")


def test_the_plans_that_served_since() -> None:
    kinds = (("box-dead", "main"), ("plan-serving", "other"), ("plan-serving", "main"), ("plan-committed", "main"))
    events = [event_of({"id": n, "kind": kind, "pipeline": name}) for n, (kind, name) in enumerate(kinds, 1)]
    assert [event.id for event in switches(events, "main")] == [3]
