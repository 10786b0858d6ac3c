"""Offsets from exchanges, what is done about them, and the record."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleet import RELEASED_UNIX_SECONDS
from fleet.errors import FleetError
from fleet.timing import record
from fleet.timing.boxes import check_own_clock
from fleet.timing.estimate import Exchange, Offset, Verdict, decide, estimate
from fleet.timing.keeper import keeper_of

WAY = st.integers(0, 10**10)
SYNCHRONISED = "0A4D0001,10.77.0.1,3,1796000000.0,0.000001,0.000002,0.000003,1.5,0.0,0.1,0.001,0.002,16.0,Normal\n"
FREE = "7F7F0101,,10,1796000000.0,0.0,0.0,0.0,1.5,0.0,0.1,0.0,0.0,0.0,Normal\n"
LOST = "00000000,,0,0.0,0.0,0.0,0.0,1.5,0.0,0.1,1.0,1.0,0.0,Not synchronised\n"
ANSWERS = "^,*,10.77.0.1,2,6,377,12,0.000001,0.000002,0.000100\n"
SILENT = "^,?,10.77.0.1,0,6,0,4294967295,0.0,0.0,0.0\n"


@given(st.lists(st.tuples(WAY, WAY), min_size=1, max_size=12), st.integers(-(10**18), 10**18), st.integers(0, 10**18))
def test_the_true_offset_is_within_the_bounds(ways: list[tuple[int, int]], ahead: int, sent: int) -> None:
    offset = estimate([Exchange(sent, there + back, sent + there + ahead) for there, back in ways])
    assert abs(offset.nanoseconds - ahead) <= offset.uncertainty_nanoseconds
    assert offset.uncertainty_nanoseconds == min((there + back + 1) // 2 for there, back in ways)


@given(st.lists(st.tuples(WAY, WAY), min_size=1, max_size=12), st.integers(0, 10**18))
def test_a_right_clock_is_never_set(ways: list[tuple[int, int]], sent: int) -> None:
    offset = estimate([Exchange(sent, there + back, sent + there) for there, back in ways])
    assert decide(offset, "") is Verdict.RIGHT


@pytest.mark.parametrize(
    ("ahead", "uncertainty", "keeper", "verdict"),
    [
        (1000, 1000, "", Verdict.RIGHT),
        (-1001, 1000, "", Verdict.SET),
        (1001, 1000, "chronyd follows x", Verdict.KEPT),
        (5, 1000, "chronyd follows x", Verdict.RIGHT),
    ],
)
def test_what_is_done(ahead: int, uncertainty: int, keeper: str, verdict: Verdict) -> None:
    assert decide(Offset(ahead, uncertainty), keeper) is verdict


@pytest.mark.parametrize(
    ("chrony", "timesyncd", "keeper"),
    [
        (None, False, ""),
        (None, True, "systemd-timesyncd follows a time server"),
        (SYNCHRONISED + ANSWERS, False, "chronyd follows 10.77.0.1"),
        (SYNCHRONISED + SILENT, False, ""),
        (FREE, False, ""),
        (LOST + SILENT, False, ""),
    ],
)
def test_what_keeps_a_clock(chrony: str | None, timesyncd: bool, keeper: str) -> None:
    assert keeper_of({"chrony": chrony, "timesyncd": timesyncd}) == keeper


def test_words_that_cannot_be_read_count_as_kept() -> None:
    assert keeper_of({"chrony": "what?\n", "timesyncd": False}).startswith("chronyd may keep it: ")


def test_an_operator_from_the_past_sets_nothing() -> None:
    check_own_clock(RELEASED_UNIX_SECONDS)
    with pytest.raises(FleetError, match="1970-01-01 00:00 UTC, before this release"):
        check_own_clock(0.0)


def test_the_record_is_private_and_capped(tmp_path: Path) -> None:
    state = tmp_path / "state"
    assert record.read(state) == []
    record.add(state, [{"number": number} for number in range(record.MOST_LINES)])
    record.add(state, [{"number": "last"}])
    lines = record.read(state)
    assert (len(lines), lines[0], lines[-1]) == (record.MOST_LINES, {"number": 1}, {"number": "last"})
    assert stat.S_IMODE((state / record.NAME).stat().st_mode) == 0o600
    (state / record.NAME).write_text("half a li")
    with pytest.raises(FleetError, match="not what fleet wrote"):
        record.read(state)
