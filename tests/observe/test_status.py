"""From answers to rows and exit code."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fleet.observe.health import Answer, SiteAnswers
from fleet.observe.status import PIPELINE_COLUMNS, STAGE_COLUMNS, site_status
from tests.observe.coordinator import site_document

STAGE = {
    "schema": 1, "box": "box1", "state": "ready", "reason": "", "version": "0.1.0", "pipeline": "main",
    "layers": [0, 11], "embedding": True, "head": True, "epoch": 3, "policy": "exact", "model_digest": "ab" * 32,
    "kernel": "packed", "weight_bytes": 77 * 2**20, "kv_bytes": 2**20, "rss_bytes": 400 * 2**20,
    "tokens_per_second": 17.25, "largest_logit_difference": 2.5e-5, "timings_seconds": {"load": 1.0, "warm_up": 0.5},
}  # fmt: skip
PIPELINE = {
    "model": "smollm2", "first_stage": "box1", "ready": True, "reason": "", "epoch": 3, "policy": "exact",
    "largest_logit_difference": 2.5e-5, "active_sequences": 1, "queued_sequences": 0, "tokens_per_second": 17.25,
}  # fmt: skip
GATEWAY = {"schema": 1, "state": "ready", "reason": "", "pipelines": {"main": PIPELINE}}
AWAY = Answer(None, unreachable=True, error="192.0.2.1:7403: no answer within 2 s")
BROKEN = Answer(None, error="192.0.2.1:7403: TLS: certificate verify failed")
READY = Answer(GATEWAY)
COORDINATOR = Answer(site_document())
WAITING = Answer({**GATEWAY, "state": "unavailable", "reason": "box2 is away"})


def stage(**changes: Any) -> Answer:
    return Answer({**STAGE, **changes})


def test_a_row_says_who_holds_what() -> None:
    status = site_status(
        SiteAnswers({"box1": stage(), "box2": stage(layers=[11, 11], embedding=False, head=False)}, READY, COORDINATOR)
    )
    assert dict(zip(STAGE_COLUMNS, status.stages[0].cells(), strict=True)) == {
        "box": "box1", "state": "ready", "layers": "0-10", "holds": "embedding, head", "weights MiB": "77",
        "KV MiB": "1.0", "RSS MiB": "400", "tokens/s": "17.2", "epoch": "3", "kernel": "packed",
    }  # fmt: skip
    assert status.stages[1].cells()[2:4] == ("none", "–")
    assert dict(zip(PIPELINE_COLUMNS, status.pipelines[0].cells(), strict=True)) == {
        "pipeline": "main", "state": "ready", "model": "smollm2", "epoch": "3", "policy": "exact",
        "logit δ": "2.5e-05", "tokens/s": "17.2", "active": "1", "queued": "0",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("stages", "gateway", "code"),
    [
        ([stage(), stage(state="loaded")], READY, 0),
        ([stage(), stage(state="loading")], READY, 1),
        ([stage(), stage(state="failed", reason="shard damaged")], WAITING, 1),
        ([stage(), AWAY], WAITING, 3),
        ([AWAY, AWAY], AWAY, 3),
        ([stage()], AWAY, 3),
        ([stage(), BROKEN], READY, 1),
        ([AWAY, BROKEN], WAITING, 1),
        ([AWAY, stage()], BROKEN, 1),
        ([stage()], WAITING, 1),
        ([stage()], None, 0),
    ],
)
def test_exit_codes(stages: list[Answer], gateway: Answer | None, code: int) -> None:
    boxes = {f"box{number}": answer for number, answer in enumerate(stages)}
    status = site_status(SiteAnswers(boxes, gateway, COORDINATOR))
    assert status.exit_code == code
    assert bool(status.failures) == (code != 0)


@pytest.mark.parametrize(("coordinator", "code"), [(COORDINATOR, 0), (None, 0), (AWAY, 3), (BROKEN, 1)])
def test_a_site_without_its_coordinator_serves_but_is_not_well(coordinator: Answer | None, code: int) -> None:
    status = site_status(SiteAnswers({"box1": stage()}, READY, coordinator))
    assert status.exit_code == code
    assert [line.split(":")[0] for line in status.failures] == ([] if code == 0 else ["coordinator"])


def test_an_unreachable_box_is_a_row_of_its_own_with_the_reason() -> None:
    status = site_status(SiteAnswers({"box1": stage(), "box2": AWAY}, AWAY, AWAY))
    assert status.stages[1].cells()[:2] == ("box2", "unreachable")
    assert status.stages[1].note == AWAY.error
    assert status.failures[-1] == f"coordinator: unreachable: {AWAY.error}; nothing is healed until it is back"
    assert (status.gateway_state, status.pipelines[0].cells()[:2]) == ("unreachable", ("(gateway)", "unreachable"))


def test_what_a_serving_stage_has_to_say_is_a_note_and_no_failure() -> None:
    status = site_status(SiteAnswers({"box1": stage(state="loaded", reason="waits for box2")}, READY, COORDINATOR))
    assert (status.notes, status.failures) == (("box1: waits for box2",), ())


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


@settings(deadline=None)
@given(
    st.fixed_dictionaries({}, optional=dict.fromkeys(STAGE, json_values)),
    st.fixed_dictionaries({}, optional={"state": json_values, "pipelines": st.dictionaries(st.text(), json_values)}),
)
def test_any_answer_makes_rows(stage_document: dict[str, Any], gateway_document: dict[str, Any]) -> None:
    status = site_status(SiteAnswers({"box1": Answer(stage_document)}, Answer(gateway_document), COORDINATOR))
    assert all(isinstance(cell, str) for row in (*status.stages, *status.pipelines) for cell in row.cells())
    assert status.exit_code in (0, 1)
