"""The verdict table, and rules that hold for all evidence."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleet.coordinator.judge import Accusation, Evidence, Thresholds, judge, ring_trouble
from stage_runtime.link.membership import LinkReport

LIMITS = Thresholds(hung=10.0, ring_trouble=2.0, redial=3.0, dial=6.0)
OPEN = Evidence("open", 100.0, True, state="ready")
LOST = Evidence("lost", 0.1, True)
NEVER = Evidence("never", 0.1, True)
CLOSED, SILENT = Accusation("box1", "closed", 0.0), Accusation("box1", "silent", 0.0)
HEARD, REFUSED = Accusation("box3", "connected", 50.0), Accusation("box1", "unreachable", 0.0)


@pytest.mark.parametrize(
    ("evidence", "kind", "said"),
    [
        (OPEN, "alive", ""),
        (replace(OPEN, said=(CLOSED, SILENT)), "alive", ""),  # only the ring lost: it forms again
        (replace(OPEN, state="failed", reason="no shard"), "dead", "no shard"),
        (replace(OPEN, working_seconds=11.0, still_seconds=11.0), "hung", "finished none"),
        (replace(OPEN, working_seconds=11.0, still_seconds=1.0), "alive", ""),  # a long queue that moves
        (replace(OPEN, working_seconds=1.0, still_seconds=500.0), "alive", ""),  # was idle until just now
        (replace(OPEN, quiet_seconds=11.0), "hung", "no heartbeat"),
        (LOST, "waiting", "lost"),
        (replace(LOST, said=(CLOSED,)), "dead", "box1 reports its link closed"),
        (replace(LOST, said=(SILENT,)), "dead", "silent"),
        (replace(LOST, said=(REFUSED,)), "dead", "unreachable"),
        (replace(LOST, said=(HEARD, CLOSED)), "dead", "closed"),
        (replace(LOST, channel_seconds=500.0, said=(HEARD,)), "waiting", "neighbours hear it"),
        (replace(LOST, channel_seconds=5.9), "waiting", ""),
        (replace(LOST, channel_seconds=6.0), "dead", "not dialled again"),
        (replace(LOST, channel_seconds=500.0, witness=False), "waiting", "no other box"),  # we are cut off ourselves
        (NEVER, "waiting", "not registered"),
        (replace(NEVER, said=(CLOSED,)), "waiting", "closed"),  # it may be dialling, its ring died with another's
        (replace(NEVER, channel_seconds=3.0, said=(CLOSED,)), "dead", "closed"),
        (replace(NEVER, channel_seconds=6.0), "dead", "not dialled"),
    ],
)
def test_the_table(evidence: Evidence, kind: str, said: str) -> None:
    verdict = judge(evidence, LIMITS)
    assert (verdict.kind, said in verdict.reason) == (kind, True)


@pytest.mark.parametrize(
    ("step", "usual", "slow"),
    [(None, None, False), (0.1, None, False), (0.1, 0.05, False), (0.16, 0.05, True), (None, 0.1, False)],
)
def test_slow_is_only_reported(step: float | None, usual: float | None, slow: bool) -> None:
    verdict = judge(replace(OPEN, step_seconds=step, usual_step_seconds=usual), LIMITS)
    assert (verdict.kind, verdict.slow) == ("alive", slow)


kinds = st.sampled_from(["connected", "closed", "silent", "unreachable"])
seconds = st.floats(0, 1e6)
accusations = st.lists(st.builds(Accusation, st.sampled_from(["box1", "box3"]), kinds, seconds), max_size=4)
evidences = st.builds(
    Evidence,
    channel=st.sampled_from(["never", "open", "lost"]),
    channel_seconds=seconds,
    witness=st.booleans(),
    said=accusations.map(tuple),
    state=st.sampled_from(["", "loading", "loaded", "ready", "failed"]),
    quiet_seconds=seconds,
    still_seconds=seconds,
    working_seconds=seconds,
)


@given(evidences)
def test_nobody_dies_of_one_witness(evidence: Evidence) -> None:
    """A verdict against a box needs two things at least: no channel and somebody or some time; or its own word."""
    verdict = judge(evidence, LIMITS)
    if verdict.kind == "dead" and evidence.channel != "open":
        accused = any(each.kind != "connected" for each in evidence.said)
        assert accused or evidence.channel_seconds >= LIMITS.dial
        assert accused or evidence.witness
    if verdict.kind == "hung":
        assert evidence.channel == "open"
        assert max(evidence.still_seconds, evidence.quiet_seconds) >= LIMITS.hung
    if verdict.kind != "alive":
        assert verdict.reason


@given(evidences)
def test_more_time_never_revives(evidence: Evidence) -> None:
    later = replace(
        evidence,
        channel_seconds=evidence.channel_seconds + 1,
        quiet_seconds=evidence.quiet_seconds + 1,
        still_seconds=evidence.still_seconds + 1,
        working_seconds=evidence.working_seconds + 1 if evidence.working_seconds else 0.0,
    )
    if judge(evidence, LIMITS).kind in ("dead", "hung"):
        assert judge(later, LIMITS).kind in ("dead", "hung")


ORDER = ("box1", "box2", "box3", "box4")


def said(reporter: str, about: str, kind: str, age: float) -> dict[tuple[str, str], tuple[LinkReport, float]]:
    report = LinkReport(about, 1, kind, "text", 0.0)  # type: ignore[arg-type]
    return {(reporter, about): (report, age)}


@pytest.mark.parametrize(
    ("reports", "out"),
    [
        ({}, None),
        (said("box1", "box2", "connected", 99), None),
        (said("box1", "box2", "closed", 1.9), None),
        (said("box1", "box2", "closed", 2.0), "box2"),  # of two, the later one: the first stage holds the most
        (said("box2", "box1", "closed", 2.0), "box2"),
        (said("box2", "box3", "closed", 9) | said("box4", "box3", "silent", 9), "box3"),
        (said("box3", "box2", "closed", 9) | said("box3", "box4", "silent", 9), "box3"),
        (said("box1", "box9", "closed", 9), None),
    ],
)
def test_who_is_left_out_of_a_ring_that_does_not_form(
    reports: dict[tuple[str, str], tuple[LinkReport, float]], out: str | None
) -> None:
    trouble = ring_trouble(reports, ORDER, ORDER, LIMITS)
    assert (trouble.box if trouble else None) == out


def test_the_dead_have_no_ring_trouble() -> None:
    assert ring_trouble(said("box1", "box2", "closed", 9), ORDER, ("box1", "box3", "box4"), LIMITS) is None
