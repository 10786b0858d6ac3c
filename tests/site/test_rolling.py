"""A change that restarts every stage, while answers run: boxes take turns and no answer notices, or all go at once."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.figures import note
from tests.site.commands import Answer, fleet
from tests.site.conftest import ALL_BOXES
from tests.site.healing import Healing
from tests.site.streams import PROMPTS
from tests.site.watch import kinds

pytestmark = pytest.mark.lab

CHANGED = dict.fromkeys(ALL_BOXES, "changed")
"""Every stage has its reserve of memory in its configuration, the coordinator all of them, the gateway none."""

FOUR = (PROMPTS[0], PROMPTS[2], PROMPTS[4], PROMPTS[7])
"""Two greedy and two seeded ones."""


@pytest.fixture
def changed(lab_inventory: Path) -> Iterator[Path]:
    """The site with another reserve of memory."""
    text = lab_inventory.read_text(encoding="utf-8")
    path = lab_inventory.with_name("lab-rolling.yaml")
    path.write_text(text.replace("memory_keep_free_mib: 256", "memory_keep_free_mib: 260"), encoding="utf-8")
    try:
        yield path
    finally:
        path.unlink()


def results(answer: Answer) -> dict[str, str]:
    """Box → its result."""
    return {row["box"]: row["result"] for row in answer.data["boxes"]}


def test_stages_restart_in_turns_and_no_answer_notices(heal: Healing, changed: Path, lab_inventory: Path) -> None:
    before = heal.watch.last_event_id()
    done: list[Answer] = []
    try:
        run = heal.stream(
            fault=lambda: done.append(fleet("provision", changed, "-o", "json")),
            until=heal.watch.is_whole,
            prompts=FOUR,
        )
        heal.assert_equal(run, "a changed configuration, box by box")
        assert results(done[0]) == CHANGED, done[0].stderr
        assert "boxes restart one after the other" in done[0].stderr
        events = heal.watch.events(before)
        plans = [event["text"] for event in events if event["kind"] == "plan-preparing"]
        note(f"a changed configuration, box by box: {len(plans)} planned switches")
        assert not {"box-dead", "box-hung", "plan-refused", "gateway-lost"} & set(kinds(events)), heal.watch.report()
        assert [text for text in plans if ", planned, " not in text] == []
        fleet("provision", changed, "--check", "--fail-on-changes")
    finally:
        back: list[Answer] = []
        run = heal.stream(
            fault=lambda: back.append(fleet("provision", lab_inventory, "--at-once", "-o", "json")),
            until=heal.watch.is_whole,
            prompts=FOUR,
        )
    assert results(back[0]) == CHANGED, back[0].stderr
    assert "one after the other" not in back[0].stderr
    heal.assert_equal(run, "the same back again, all boxes at once")
