from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from guards.clock.chrony import ChronyReading, parse_answer
from guards.clock.correction import Method, correct, correction_argv, method_for
from guards.clock.reading import ClockReading
from guards.clock.verdict import Sync, Verdict
from guards.clock.wall import WallReading
from guards.guard import ActionFailed
from guards.roots import Roots
from guards.settings import ClockSettings
from tests.guards.clock.helpers import BUILT, LIMITS, called, install_chronyc, recorded

NOW = BUILT + 86_400
CHRONY = parse_answer(recorded("chrony-4.3-synchronised"))
VERDICT = Verdict(Sync.SYNCHRONISED, "", keeper="chrony", offset_seconds=0.0, uncertainty_seconds=0.0)


def method(verdict: Verdict, chrony: ChronyReading = CHRONY, unix: float = NOW, step: bool = False) -> Method | None:
    reading = ClockReading(WallReading(unix, 1000.0, 0.0), chrony)
    return method_for(verdict, reading, LIMITS, ClockSettings(), degraded_seconds=0.001, unexplained_step=step)


def test_arguments() -> None:
    assert correction_argv(Method.MAKESTEP) == ("chronyc", "-n", "makestep")
    assert correction_argv(Method.BURST) == ("chronyc", "-n", "burst", "4/4")


@pytest.mark.parametrize(("wanted", "line"), [(Method.MAKESTEP, "-n makestep"), (Method.BURST, "-n burst 4/4")])
def test_a_correction_that_works(tmp_path: Path, wanted: Method, line: str) -> None:
    roots = install_chronyc(tmp_path / "bin", recorded("chrony-4.3-ok"))
    assert correct(roots, wanted, box="pi-1", deadline_seconds=5).endswith(": 200 OK")
    assert called(tmp_path / "bin") == [line]


@pytest.mark.parametrize("answer", ["not-authorised", "failure", "no-daemon"])
def test_a_correction_that_is_refused_says_what_to_do(tmp_path: Path, answer: str) -> None:
    roots = install_chronyc(tmp_path / "bin", recorded(f"chrony-4.3-{answer}"), code=1)
    with pytest.raises(ActionFailed) as raised:
        correct(roots, Method.MAKESTEP, box="pi-1", deadline_seconds=5)
    assert recorded(f"chrony-4.3-{answer}").strip() in str(raised.value)
    assert "`fleet time push pi-1`" in str(raised.value)


def test_an_answer_that_is_not_ok_failed_whatever_the_exit_code(tmp_path: Path) -> None:
    roots = install_chronyc(tmp_path / "bin", "")
    with pytest.raises(ActionFailed, match="exit code 0"):
        correct(roots, Method.BURST, box="pi-1", deadline_seconds=5)


def test_a_chronyc_that_is_missing_or_hangs(tmp_path: Path) -> None:
    with pytest.raises(ActionFailed, match="not installed; set the clock by `fleet time push pi-1`"):
        correct(Roots(path="/nonexistent"), Method.BURST, box="pi-1", deadline_seconds=5)
    roots = install_chronyc(tmp_path / "bin", "", before="exec /bin/sleep 30")
    with pytest.raises(ActionFailed, match="did not answer within"):
        correct(roots, Method.BURST, box="pi-1", deadline_seconds=0.2)


@pytest.mark.parametrize(
    ("offset", "expected"),
    [
        (0.0, None),
        (0.001, None),
        (-0.0011, Method.BURST),
        (0.128, Method.BURST),
        (0.129, Method.MAKESTEP),
        (-5.0, Method.MAKESTEP),
        (NOW, None),  # the source says 1970
        (-30 * 31_556_952.0, None),  # the source says 2056
    ],
)
def test_small_offsets_are_slewed_and_large_ones_set(offset: float, expected: Method | None) -> None:
    assert method(replace(VERDICT, offset_seconds=offset)) is expected


def test_1970_is_set_right_by_a_source_that_is_not_mad() -> None:
    insane = replace(VERDICT, sync=Sync.INSANE, offset_seconds=-NOW)
    assert method(insane, unix=0.0) is Method.MAKESTEP


def test_1970_without_a_measurement_asks_for_one() -> None:
    insane = Verdict(Sync.INSANE, "")
    assert method(insane, parse_answer(recorded("chrony-4.3-unsynchronised")), unix=0.0) is Method.BURST


def test_after_a_step_chronyd_is_asked_to_look_again_before_anything_is_set() -> None:
    assert method(replace(VERDICT, offset_seconds=-5.0), step=True) is Method.BURST


def test_an_offset_that_may_be_none_is_left_alone() -> None:
    assert method(Verdict(Sync.FREE_RUNNING, "", offset_seconds=0.005, uncertainty_seconds=0.0045)) is None


def test_without_chronyd_or_its_sources_there_is_nothing_to_do() -> None:
    off = replace(VERDICT, offset_seconds=5.0)
    assert method(off, ChronyReading(None, reason="chronyc is not installed")) is None
    assert method(off, parse_answer(recorded("chrony-4.3-local"))) is None
