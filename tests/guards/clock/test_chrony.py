from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from guards.clock.chrony import ChronyReading, ChronyUnreadable, SourceState, parse_answer, parse_tracking, read_chrony
from guards.roots import Roots
from tests.guards.clock.helpers import called, install_chronyc, recorded

ANSWERS = [recorded(f"chrony-{name}") for name in ("4.3-synchronised", "4.3-local", "4.3-unsynchronised", "pps")]


def test_a_synchronised_client() -> None:
    reading = parse_answer(recorded("chrony-4.3-synchronised"))
    tracking = reading.tracking
    assert tracking is not None
    assert (tracking.reference, tracking.name, tracking.stratum, tracking.leap) == (
        "7F000001",
        "127.0.0.1",
        11,
        "Normal",
    )
    assert tracking.offset_seconds == pytest.approx(0.000001346)  # "System time" is negative: fast
    assert (tracking.frequency_ppm, tracking.skew_ppm) == (0.002, 0.312)
    assert (tracking.root_delay_seconds, tracking.root_dispersion_seconds) == (0.000005308, 0.000002146)
    assert tracking.rms_offset_seconds == 0.000000592
    assert tracking.synchronised and not tracking.free_running
    chosen, silent = reading.sources
    assert (chosen.state, chosen.reach, chosen.sample_seconds_ago) == (SourceState.SELECTED, 0o377, 1)
    assert (silent.state, silent.reach, silent.sample_seconds_ago) == (SourceState.UNUSABLE, 0, None)
    assert reading.reachable and reading.sample_seconds_ago == 1


def test_a_clock_five_seconds_behind_has_a_negative_offset() -> None:
    tracking = parse_answer(recorded("chrony-4.3-behind")).tracking
    assert tracking is not None and tracking.offset_seconds == pytest.approx(-4.999998569)


def test_local_stratum_runs_freely() -> None:
    reading = parse_answer(recorded("chrony-4.3-local"))
    assert reading.tracking is not None
    assert reading.tracking.synchronised and reading.tracking.free_running
    assert reading.sources == () and not reading.reachable and reading.sample_seconds_ago is None


def test_not_synchronised() -> None:
    reading = parse_answer(recorded("chrony-4.3-unsynchronised"))
    assert reading.tracking is not None and not reading.tracking.synchronised
    assert reading.sample_seconds_ago is None


def test_stratum_16_is_not_synchronised_whatever_the_leap_status() -> None:
    line = recorded("chrony-4.3-synchronised").splitlines()[0]
    assert not parse_tracking(line.replace(",11,", ",16,")).synchronised


def test_sources_that_fell_silent() -> None:
    reading = parse_answer(recorded("chrony-4.3-silent"))
    assert reading.tracking is not None and reading.tracking.synchronised
    assert not reading.reachable and reading.sample_seconds_ago == 509


def test_reference_clocks() -> None:
    reading = parse_answer(recorded("chrony-pps"))
    assert reading.tracking is not None and reading.tracking.name == "PPS" and reading.tracking.stratum == 1
    assert [source.mode for source in reading.sources] == ["#", "#"]
    assert reading.sample_seconds_ago == 4


def test_version_3() -> None:
    tracking = parse_tracking(recorded("chrony-3.x-tracking").rstrip("\n"))
    assert (tracking.offset_seconds, tracking.frequency_ppm) == (-0.000052616, -18.484)  # both reported as slow


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "nothing"),
        (recorded("chrony-4.3-no-daemon"), "506 Cannot talk to daemon"),
        ("506 Cannot talk to daemon\n506 Cannot talk to daemon\n", "506"),
        ("501 Not authorised\n", "501"),
        (recorded("chrony-4.3-synchronised").splitlines()[0] + "\n506 Cannot talk to daemon\n", "506"),
        (recorded("chrony-4.3-synchronised").replace(",Normal", ",Normal,0"), "15 fields instead of 14"),
        (recorded("chrony-4.3-synchronised").replace(",Normal", ""), "13 fields"),
        (recorded("chrony-4.3-synchronised").replace(",Normal", ",Normale"), "leap status"),
        (recorded("chrony-4.3-synchronised").replace("0.002,", "nan,"), "frequency"),
        (recorded("chrony-4.3-synchronised").replace("-0.000001346", "inf"), "system time"),
        (recorded("chrony-4.3-synchronised").replace("-0.000001346", "9" * 400 + ".0"), "system time"),
        (recorded("chrony-4.3-synchronised").replace("7F000001", "127.0.0.1"), "hexadecimal"),
        (recorded("chrony-4.3-synchronised").replace("^,*", "^,!"), "state"),
        (recorded("chrony-4.3-synchronised").replace(",377,", ",399,"), "reach"),
        (recorded("chrony-4.3-synchronised").rstrip("\n"), "cut short"),
        ("Reference ID    : 7F000001 (127.0.0.1)\n", "fields"),
    ],
)
def test_what_can_not_be_read_is_refused(text: str, reason: str) -> None:
    with pytest.raises(ChronyUnreadable, match=reason):
        parse_answer(text)


@given(text=st.sampled_from(ANSWERS), data=st.data())
def test_an_answer_cut_anywhere_is_refused_or_lacks_whole_sources(text: str, data: st.DataObject) -> None:
    cut = text[: data.draw(st.integers(0, len(text) - 1))]
    whole = parse_answer(text)
    try:
        reading = parse_answer(cut)
    except ChronyUnreadable:
        return
    assert reading.tracking == whole.tracking and reading.sources == whole.sources[: len(reading.sources)]


@given(text=st.sampled_from(ANSWERS), data=st.data(), wrong=st.text(max_size=12))
def test_a_wrong_character_is_refused_or_read(text: str, data: st.DataObject, wrong: str) -> None:
    at = data.draw(st.integers(0, len(text)))
    try:
        reading = parse_answer(text[:at] + wrong + text[at:])
    except ChronyUnreadable as error:
        assert str(error)
    else:
        assert isinstance(reading, ChronyReading)


def test_one_process_asks_both(tmp_path: Path) -> None:
    roots = install_chronyc(tmp_path / "bin", recorded("chrony-4.3-synchronised"))
    reading = read_chrony(roots, deadline_seconds=5)
    assert reading == parse_answer(recorded("chrony-4.3-synchronised"))
    assert called(tmp_path / "bin") == ["-c -n -m tracking sources"]


def test_without_chronyc() -> None:
    reading = read_chrony(Roots(path="/nonexistent"), deadline_seconds=5)
    assert reading.tracking is None and reading.reason == "chronyc is not installed"


def test_without_chronyd(tmp_path: Path) -> None:
    roots = install_chronyc(tmp_path / "bin", recorded("chrony-4.3-no-daemon"), code=1)
    reading = read_chrony(roots, deadline_seconds=5)
    assert reading.tracking is None and reading.reason == "chronyc: 506 Cannot talk to daemon"


def test_a_chronyc_that_hangs(tmp_path: Path) -> None:
    roots = install_chronyc(tmp_path / "bin", "", before="exec /bin/sleep 30")
    reading = read_chrony(roots, deadline_seconds=0.2)
    assert reading.tracking is None and "did not answer within 0.2 s" in reading.reason
