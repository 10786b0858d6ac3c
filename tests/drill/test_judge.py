"""What a disturbed answer lost, repeated or changed."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleet.drill.judge import (
    EVIDENCE_TOKENS,
    Difference,
    StreamRun,
    StreamSpec,
    StreamVerdict,
    compare,
    noticed,
    verdict,
)

WANTED = (10, 11, 12, 13, 14, 15, 16, 17, 18, 19)


@pytest.mark.parametrize(
    ("got", "completed", "difference"),
    [
        (WANTED, True, Difference()),
        ((*WANTED[:5], *WANTED[4:9]), True, Difference(repeated=1)),
        ((*WANTED[:5], *WANTED[2:7]), True, Difference(repeated=3)),
        ((*WANTED[:5], *WANTED[6:], 99), True, Difference(lost=1)),
        ((*WANTED[:3], *WANTED[5:], 98, 99), True, Difference(lost=2)),
        ((*WANTED[:5], 77, *WANTED[6:]), True, Difference(changed=1)),
        ((*WANTED[:5], 70, 71, 72, 73, 74), True, Difference(changed=5)),
        (WANTED[:6], False, Difference(lost=4)),
        ((), False, Difference(lost=10)),
        (WANTED[:6], True, Difference(changed=4)),  # it came to an end of its own, but elsewhere
        ((*WANTED, 20), True, Difference(changed=1)),
        ((*WANTED[:5], *WANTED[3:6]), False, Difference(repeated=2, lost=4)),
        ((*WANTED[:3], *WANTED[5:8]), False, Difference(lost=4)),
        ((*WANTED[:5], 70, 71), False, Difference(lost=3, changed=2)),
        (WANTED, False, Difference()),
    ],
)
def test_one_difference(got: tuple[int, ...], completed: bool, difference: Difference) -> None:
    assert compare(WANTED, got, completed=completed) == difference


distinct = st.lists(st.integers(0, 10_000), unique=True, min_size=12, max_size=40)


@given(distinct, st.data())
def test_repeated_tokens_are_counted_wherever_they_are(wanted: list[int], data: st.DataObject) -> None:
    at = data.draw(st.integers(1, len(wanted) - EVIDENCE_TOKENS))
    shift = data.draw(st.integers(1, at))
    got = (wanted[:at] + wanted[at - shift :])[: len(wanted)]
    assert compare(wanted, got, completed=True) == Difference(repeated=shift)


@given(distinct, st.data())
def test_lost_tokens_are_counted_wherever_they_are(wanted: list[int], data: st.DataObject) -> None:
    at = data.draw(st.integers(0, len(wanted) - EVIDENCE_TOKENS - 1))
    shift = data.draw(st.integers(1, len(wanted) - EVIDENCE_TOKENS - at))
    got = wanted[:at] + wanted[at + shift :] + [-number for number in range(1, shift + 1)]
    assert compare(wanted, got, completed=True) == Difference(lost=shift)


@given(st.lists(st.integers(0, 3), max_size=20), st.lists(st.integers(0, 3), max_size=20), st.booleans())
def test_only_equal_answers_have_no_difference(wanted: list[int], got: list[int], completed: bool) -> None:
    difference = compare(wanted, got, completed=completed)
    same = wanted == got or (not completed and got[: len(wanted)] == wanted)
    assert (difference == Difference()) == same
    assert min(difference.lost, difference.repeated, difference.changed) >= 0


SPEC = StreamSpec("greedy-1", "hi", 0.0, 1, 20)


def run(
    tokens: tuple[int, ...], seconds: tuple[float, ...], reason: str | None = "length", error: str = ""
) -> StreamRun:
    return StreamRun(tokens, seconds, reason, error)


def test_a_pause_and_nothing_else() -> None:
    found = verdict(SPEC, run((1, 2, 3), (0.0, 0.1, 0.2)), run((1, 2, 3), (5.0, 5.9, 6.0)))
    assert (found.completed, found.lost, found.repeated, found.changed, found.first_difference) == (True, 0, 0, 0, None)
    assert round(found.longest_pause_milliseconds) == 900
    assert round(found.usual_pause_milliseconds) == 100
    assert not noticed([found], "exact")


def test_an_answer_that_broke_off() -> None:
    found = verdict(SPEC, run((1, 2, 3, 4), (0, 1, 2, 3)), run((1, 2), (0, 1), None, "the ring broke"))
    assert (found.completed, found.lost, found.error) == (False, 2, "the ring broke")
    assert noticed([found], "int8")


def test_an_error_after_the_last_token_is_no_complete_answer() -> None:
    found = verdict(SPEC, run((1, 2), (0, 1)), run((1, 2), (0, 1), "length", "late trouble"))
    assert not found.completed
    assert noticed([found], "exact")


@pytest.mark.parametrize(
    ("changes", "policy", "expected"),
    [
        ({}, "exact", False),
        ({"changed": 1}, "exact", True),
        ({"changed": 1}, "int8", False),
        ({"lost": 1}, "int8", True),
        ({"repeated": 1}, "int8", True),
        ({"completed": False}, "int8", True),
    ],
)
def test_what_counts_as_noticed(changes: dict[str, int], policy: str, expected: bool) -> None:
    well = {"completed": True, "lost": 0, "repeated": 0, "changed": 0, **changes}
    found = StreamVerdict(
        "a", "greedy", 3, bool(well["completed"]), well["lost"], well["repeated"], well["changed"], None, 1.0, 1.0, ""
    )
    assert noticed([found], policy) == expected
