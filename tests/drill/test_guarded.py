"""What counts as tripped in a drill of the guards."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from fleet.drill.guarded import unwell_parts, worse_than

STATES = ("unsupported", "healthy", "initialising", "degraded", "unhealthy")


def document(**parts: str) -> dict[str, Any]:
    """Of `/v1/guards`."""
    findings = [{"part": part, "state": state, "reason": f"{part} is {state}"} for part, state in parts.items()]
    return {"guards": {"surroundings": {"findings": findings}}}


def test_a_disk_that_was_degraded_trips_when_it_is_full() -> None:
    before = unwell_parts(document(disk="degraded", nic="degraded"), "surroundings")
    full = unwell_parts(document(disk="unhealthy", nic="degraded"), "surroundings")
    assert worse_than(before, full) == {"disk": "disk is unhealthy"}
    assert worse_than(full, before) == {}


@given(st.dictionaries(st.sampled_from("abc"), st.sampled_from(STATES)), st.sampled_from(STATES))
def test_nothing_is_worse_than_itself(parts: dict[str, str], worst: str) -> None:
    now = unwell_parts(document(**parts), "surroundings")
    assert worse_than(now, now) == {}
    assert set(worse_than({}, now)) == {part for part, state in parts.items() if state in STATES[3:]}
    assert unwell_parts(document(a=worst), "thermal") == {}
