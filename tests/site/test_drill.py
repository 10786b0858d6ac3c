"""`fleet drill` on real boxes over ssh: what it breaks heals by itself, and users would have noticed a pause only."""

from __future__ import annotations

import pytest

from tests.figures import note
from tests.site.commands import fleet
from tests.site.healing import Healing

pytestmark = pytest.mark.lab

SECONDS = 6.0


@pytest.mark.parametrize(("kind", "box"), [("link-cut", "box3"), ("power-cut", "box2"), ("hang", "box1")])
def test_a_drill_breaks_a_box_and_nothing_is_lost(heal: Healing, kind: str, box: str) -> None:
    heal.watch.wait_whole()
    before = heal.watch.last_event_id()
    routes = heal.box(box).exec(["ip", "route"]).stdout
    answer = fleet("drill", kind, box, "--seconds", str(SECONDS), "--yes", "-o", "json", "-i", heal.site.file)
    streams = answer.data["streams"]
    assert len(streams) == 4
    assert all(stream["completed"] and stream["lost"] == stream["repeated"] == 0 for stream in streams)
    assert heal.watch.wait_for_event("box-dead", before, box=box)
    pause = max(stream["longest_pause_milliseconds"] for stream in streams)
    whole = answer.data["whole_after_seconds"]
    note(f"drill {kind} of {box}: longest pause {pause:.0f} ms, whole again after {whole:.1f} s")
    assert heal.box(box).exec(["ip", "route"]).stdout == routes, "the cut is undone"
    heal.watch.wait_whole()
