"""From the coordinator's document to rows."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fleet.observe.health import Answer
from fleet.observe.site_view import MEMBER_COLUMNS, PLAN_COLUMNS, coordinator_view, duration
from tests.observe.coordinator import member, site_document
from tests.observe.test_status import json_values


def plan_cells(**changes: Any) -> dict[str, str]:
    document = site_document()
    document["pipelines"]["main"].update(changes)
    return dict(zip(PLAN_COLUMNS, coordinator_view(Answer(document)).plans[0].cells(), strict=True))


def member_cells(state: str, **changes: Any) -> dict[str, str]:
    document = site_document()
    document["boxes"] = {"box1": member(state, **changes)}
    return dict(zip(MEMBER_COLUMNS, coordinator_view(Answer(document)).members[0].cells(), strict=True))


def test_a_whole_site() -> None:
    assert plan_cells() == {
        "pipeline": "main", "plan": "serving", "epoch": "3", "order": "box1 box2 box3", "spare": "",
        "cannot lose": "", "switching": "", "note": "",
    }  # fmt: skip
    assert member_cells("serving") == {
        "box": "box1", "member": "serving", "since": "5 min", "load": "25%", "°C": "52", "guards": "", "note": "",
    }  # fmt: skip


def test_what_a_degraded_and_switching_pipeline_says() -> None:
    switching = {"epoch": 5, "planned": True, "since_seconds": 3.2, "waiting_for": ["box2"]}
    cells = plan_cells(degraded="box2 is out", unsurvivable=["box1", "box3"], switching=switching, spares=["box2"])
    assert (cells["note"], cells["cannot lose"], cells["spare"]) == ("box2 is out", "box1 box3", "box2")
    assert cells["switching"] == "to epoch 5, planned, 3 s, waits for box2"


def test_a_refused_plan_names_what_each_box_lacks() -> None:
    cells = plan_cells(state="refused", reason="no plan fits", missing_mebibytes={"box1": 120, "box3": "7"})
    assert (cells["plan"], cells["note"]) == ("refused", "no plan fits; box1 lacks 120 MiB, box3 lacks 7 MiB")


@pytest.mark.parametrize(
    ("state", "changes", "note"),
    [
        ("held-down", {"hold_down_seconds_left": 41.6}, "42 s of hold-down left"),
        ("serving", {"slow": True}, "slow: its steps take far longer than they used to"),
        ("dead", {"reason": "its ring is silent", "heartbeat": None}, "its ring is silent"),
        ("drained", {"hold_down_seconds_left": None}, ""),
    ],
)
def test_a_box_that_is_not_well(state: str, changes: dict[str, Any], note: str) -> None:
    cells = member_cells(state, **changes)
    assert (cells["member"], cells["note"]) == (state, note)


@pytest.mark.parametrize(
    ("seconds", "words"), [(0.4, "0 s"), (119, "119 s"), (120, "2 min"), (7200, "2 h"), (172800, "2 d")]
)
def test_durations(seconds: float, words: str) -> None:
    assert duration(seconds) == words


PIPELINE_KEYS = st.sampled_from([*site_document()["pipelines"]["main"]])
BOX_KEYS = st.sampled_from([*member()])


@settings(deadline=None)
@given(
    st.dictionaries(st.text(max_size=3), st.dictionaries(PIPELINE_KEYS, json_values)),
    st.dictionaries(st.text(max_size=3), st.dictionaries(BOX_KEYS, json_values)),
)
def test_any_document_makes_rows(pipelines: dict[str, Any], boxes: dict[str, Any]) -> None:
    view = coordinator_view(Answer({"pipelines": pipelines, "boxes": boxes}))
    assert (len(view.plans), len(view.members)) == (len(pipelines), len(boxes))
    assert all(isinstance(cell, str) for row in (*view.plans, *view.members) for cell in row.cells())
