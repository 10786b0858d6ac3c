from __future__ import annotations

from dataclasses import replace

import pytest

from guards.clock.agree import Agreement, agree
from guards.clock.chrony import ChronyReading, parse_answer
from guards.clock.judge import Bounds, clock_finding, drift_finding, peers_finding, sources_finding
from guards.clock.packet import Answer
from guards.clock.reading import ClockReading, PeerSkew
from guards.clock.samples import Sample
from guards.clock.sntp import SntpReading
from guards.clock.verdict import Sync, Verdict, verdict_of
from guards.clock.wall import WallReading
from guards.findings import Finding, Repair, State
from guards.settings import ClockSettings
from tests.guards.clock.helpers import BUILT, LIMITS, recorded

NOW = BUILT + 86_400
SETTINGS = ClockSettings()
INSIDE = Bounds.of(SETTINGS, in_pipeline=True)
OUTSIDE = Bounds.of(SETTINGS, in_pipeline=False)
NO_CHRONY = ChronyReading(None, reason="chronyc is not installed")
SYNCHRONISED_TEXT = recorded("chrony-4.3-synchronised")
# the recorded client, as if its server had stratum 2
FINE = parse_answer(SYNCHRONISED_TEXT.replace("127.0.0.1,11,", "127.0.0.1,3,"))
ANSWER = Answer("10.0.0.1", 0.0002, 0.0004, 0.003, stratum=2, leap=0, free_running=False)


def reading(
    chrony: ChronyReading = NO_CHRONY,
    *answers: Answer,
    asked: bool = False,
    failures: tuple[tuple[str, str], ...] = (),
    unix: float = NOW,
    boot: float = 1000.0,
    timesyncd: float | None = None,
    kernel: bool | None = None,
) -> ClockReading:
    sntp = SntpReading(answers, failures) if answers or failures or asked else None
    return ClockReading(WallReading(unix, boot, 1e-6), chrony, sntp, timesyncd, kernel)


def judged(look: ClockReading, samples: tuple[Sample, ...] = ()) -> Verdict:
    agreement = agree(look.sntp.answers if look.sntp else ())
    if agreement.best is not None:
        best = agreement.best
        new = Sample(best.server, look.wall.boot_seconds, best.offset_seconds, best.uncertainty_seconds)
        samples = (*samples, new)
    return verdict_of(look, agreement, samples, LIMITS, SETTINGS)


def clock(look: ClockReading, bounds: Bounds = INSIDE, servers: int = 1, samples: tuple[Sample, ...] = ()) -> Finding:
    return clock_finding(judged(look, samples), look, bounds, SETTINGS, servers=servers, box="pi-1")


def test_chrony_that_follows_a_server() -> None:
    look = reading(FINE)
    verdict, finding = judged(look), clock(look)
    assert (verdict.sync, verdict.keeper, verdict.source) == (Sync.SYNCHRONISED, "chrony", "127.0.0.1")
    assert finding.state is State.HEALTHY and finding.repair is Repair.NONE
    assert finding.evidence["clock_state"] == "synchronised" and finding.evidence["stratum"] == 3
    assert finding.evidence["offset_milliseconds"] == pytest.approx(0.001346)
    assert verdict.drift_ppm == 0.002 and verdict.drift_resolution_ppm == 0.312


@pytest.mark.parametrize(
    ("chrony", "words"),
    [
        (parse_answer(recorded("chrony-4.3-local")), "hands out its own clock as stratum 10"),
        (parse_answer(SYNCHRONISED_TEXT), "time server 127.0.0.1 has stratum 10"),
        (parse_answer(recorded("chrony-4.3-silent").replace(",11,", ",3,")), "none of chronyd's sources has answered"),
        (parse_answer(SYNCHRONISED_TEXT.splitlines()[0] + "\n"), "set by hand"),
    ],
)
def test_chrony_that_follows_nothing_runs_freely(chrony: ChronyReading, words: str) -> None:
    finding = clock(reading(chrony))
    assert finding.evidence["clock_state"] == "free-running" and words in finding.reason
    assert finding.state is State.DEGRADED and finding.repair is Repair.CHECK_TIME_SERVER


def test_a_local_clock_says_nothing_of_its_offset_unless_the_site_s_servers_do() -> None:
    local = parse_answer(recorded("chrony-4.3-local"))
    assert judged(reading(local)).offset_seconds is None
    assert judged(reading(local, ANSWER)).offset_seconds == ANSWER.offset_seconds
    free = replace(ANSWER, free_running=True)
    assert judged(reading(local, free)).reason.startswith("chronyd has no source")


@pytest.mark.parametrize(
    ("boot", "servers", "chrony", "state"),
    [
        (10.0, 1, parse_answer(recorded("chrony-4.3-unsynchronised")), State.INITIALISING),
        (1000.0, 1, parse_answer(recorded("chrony-4.3-unsynchronised")), State.UNHEALTHY),
        (1000.0, 1, NO_CHRONY, State.UNHEALTHY),
        (10.0, 1, NO_CHRONY, State.INITIALISING),
        (1000.0, 0, NO_CHRONY, State.DEGRADED),
    ],
)
def test_nothing_that_says_the_time(boot: float, servers: int, chrony: ChronyReading, state: State) -> None:
    finding = clock(reading(chrony, asked=bool(servers), boot=boot), servers=servers)
    assert finding.evidence["clock_state"] == "unsynchronised" and finding.state is state
    assert finding.evidence["offset_milliseconds"] is None
    assert finding.evidence["without_chrony_because"] == (chrony.reason or None)


@pytest.mark.parametrize("unix", [0.0, 12.0, BUILT - 1, BUILT + 20.1 * 31_556_952, 4e9])
@pytest.mark.parametrize("chrony", [NO_CHRONY, FINE])
def test_times_that_can_not_be_are_insane_whatever_chrony_says(unix: float, chrony: ChronyReading) -> None:
    finding = clock(reading(chrony, unix=unix, boot=5.0))
    assert finding.evidence["clock_state"] == "insane" and finding.state is State.UNHEALTHY
    assert finding.repair is Repair.CORRECT_CLOCK and "`fleet time push pi-1`" in finding.reason


@pytest.mark.parametrize("unix", [BUILT, NOW, BUILT + 19.9 * 31_556_952])
def test_times_that_can_be_are_not(unix: float) -> None:
    assert judged(reading(FINE, unix=unix)).sync is Sync.SYNCHRONISED


@pytest.mark.parametrize(
    ("offset", "bounds", "state", "words"),
    [
        (0.0009, INSIDE, State.HEALTHY, "follows"),
        (-0.0011, INSIDE, State.DEGRADED, "1.100 ms behind; at most 1 ms inside a pipeline"),
        (0.0011, INSIDE, State.DEGRADED, "1.100 ms ahead"),
        (0.0011, OUTSIDE, State.HEALTHY, "follows"),
        (0.110, OUTSIDE, State.DEGRADED, "at most 100 ms are fine"),
        (-5.0, INSIDE, State.UNHEALTHY, "5000.000 ms behind"),
        (-5.0, OUTSIDE, State.UNHEALTHY, "5000.000 ms behind"),
    ],
)
def test_offsets(offset: float, bounds: Bounds, state: State, words: str) -> None:
    assert FINE.tracking is not None
    chrony = replace(FINE, tracking=replace(FINE.tracking, offset_seconds=offset))
    finding = clock(reading(chrony), bounds)
    assert finding.state is state and words in finding.reason
    assert finding.repair is (Repair.NONE if state is State.HEALTHY else Repair.CORRECT_CLOCK)


def test_an_offset_too_unsure_to_tell_is_no_reason_to_correct() -> None:
    wide = replace(ANSWER, offset_seconds=0.004, delay_seconds=0.02)
    finding = clock(reading(NO_CHRONY, wide, timesyncd=60.0))
    assert finding.state is State.DEGRADED and finding.repair is Repair.CHECK_NETWORK
    assert "± 10.000 ms, too unsure to tell" in finding.reason


@pytest.mark.parametrize(
    ("timesyncd", "kernel", "sync", "keeper"),
    [
        (60.0, None, Sync.SYNCHRONISED, "timesyncd"),
        (90_000.0, False, Sync.SYNCHRONISED, "timesyncd"),  # it may only be late to touch its file; we have measured
        (None, True, Sync.SYNCHRONISED, "daemon"),
        (None, False, Sync.FREE_RUNNING, ""),
        (None, None, Sync.FREE_RUNNING, ""),
    ],
)
def test_measured_by_sntp(timesyncd: float | None, kernel: bool | None, sync: Sync, keeper: str) -> None:
    verdict = judged(reading(NO_CHRONY, ANSWER, timesyncd=timesyncd, kernel=kernel))
    assert (verdict.sync, verdict.keeper, verdict.source) == (sync, keeper, "10.0.0.1")
    assert (verdict.offset_seconds, verdict.uncertainty_seconds) == (0.0002, 0.0002)


def test_a_time_server_without_a_source_leaves_the_box_free_running() -> None:
    verdict = judged(reading(NO_CHRONY, replace(ANSWER, free_running=True), timesyncd=60.0))
    assert verdict.sync is Sync.FREE_RUNNING and "10.0.0.1 has no source itself" in verdict.reason


def test_an_unsynchronised_chronyd_does_not_count_as_the_kernel_s_daemon() -> None:
    unsynchronised = parse_answer(recorded("chrony-4.3-unsynchronised"))
    verdict = judged(reading(unsynchronised, ANSWER, kernel=True))
    assert verdict.sync is Sync.FREE_RUNNING and "chronyd is not synchronised" in verdict.reason


def test_servers_that_fall_silent_are_believed_a_while() -> None:
    old = (Sample("10.0.0.1", 900.0, 0.0003, 0.0001),)
    silent = (("10.0.0.1", "did not answer within 3 s"),)
    soon = judged(reading(failures=silent, boot=1000.0, timesyncd=100.0), old)
    assert soon.sync is Sync.SYNCHRONISED and soon.offset_seconds == 0.0003
    later = judged(reading(failures=silent, boot=1021.0, timesyncd=100.0), old)
    assert later.sync is Sync.SYNCHRONISED and later.offset_seconds is None
    much_later = judged(reading(failures=silent, boot=6000.0, timesyncd=5000.0), old)
    assert much_later.sync is Sync.FREE_RUNNING and "timesyncd has not set the clock for 5000 s" in much_later.reason
    assert judged(reading(failures=silent, boot=6000.0), old).sync is Sync.UNSYNCHRONISED


def test_inside_a_pipeline_an_offset_that_can_not_be_measured_is_degraded() -> None:
    silent = reading(failures=(("10.0.0.1", "silent"),), timesyncd=60.0)
    assert clock(silent).state is State.DEGRADED and "can't be measured" in clock(silent).reason
    assert clock(silent, OUTSIDE).state is State.HEALTHY


def sources(look: ClockReading, servers: int = 1) -> Finding:
    agreement = agree(look.sntp.answers) if look.sntp else Agreement(None)
    return sources_finding(look, agreement, SETTINGS, servers=servers)


def test_sources_of_chrony() -> None:
    finding = sources(reading(FINE))
    assert finding.state is State.DEGRADED and finding.reason == "127.0.0.9: silent"
    assert finding.evidence == {"sources_number": 2, "usable_number": 1}
    false = parse_answer(SYNCHRONISED_TEXT.replace("^,?,127.0.0.9,0,2,0", "^,x,127.0.0.9,2,2,377"))
    assert sources(reading(false)).reason == "127.0.0.9: differs from the others"
    assert sources(reading(parse_answer(recorded("chrony-pps")))).state is State.HEALTHY


def test_sources_by_sntp() -> None:
    liar = replace(ANSWER, server="10.0.0.3", offset_seconds=9.0)
    look = reading(NO_CHRONY, ANSWER, replace(ANSWER, server="10.0.0.2"), liar, failures=(("10.0.0.4", "silent"),))
    finding = sources(look)
    assert finding.state is State.DEGRADED and finding.repair is Repair.CHECK_TIME_SERVER
    assert finding.reason == "10.0.0.4: silent; 10.0.0.3: differs from the others"
    assert finding.evidence == {"sources_number": 4, "usable_number": 2}
    assert sources(reading(NO_CHRONY, ANSWER)).state is State.HEALTHY
    assert "disagree" in sources(reading(NO_CHRONY, ANSWER, liar)).reason
    assert sources(reading(failures=(("10.0.0.1", "silent"),), boot=5.0)).state is State.INITIALISING


def test_no_sources() -> None:
    assert sources(reading(), servers=0).state is State.UNSUPPORTED
    assert sources(reading(parse_answer(SYNCHRONISED_TEXT.splitlines()[0] + "\n"))).state is State.HEALTHY


@pytest.mark.parametrize(
    ("ppm", "resolution", "state"),
    [(50.0, 1.0, State.HEALTHY), (-250.0, 1.0, State.DEGRADED), (250.0, 60.0, State.HEALTHY)],
)
def test_drift(ppm: float, resolution: float, state: State) -> None:
    finding = drift_finding(Verdict(Sync.SYNCHRONISED, "", drift_ppm=ppm, drift_resolution_ppm=resolution), SETTINGS)
    assert finding.state is state and finding.evidence["drift_ppm"] == ppm


def test_drift_that_is_not_known() -> None:
    assert drift_finding(Verdict(Sync.UNSYNCHRONISED, ""), SETTINGS).state is State.UNSUPPORTED
    young = Verdict(Sync.SYNCHRONISED, "", source="10.0.0.1", offset_seconds=0.0)
    assert drift_finding(young, SETTINGS).state is State.INITIALISING


def skews(**milliseconds: float) -> dict[str, PeerSkew]:
    return {box: PeerSkew(each / 1e3, 0.0002) for box, each in milliseconds.items()}


@pytest.mark.parametrize(
    ("others", "state", "words"),
    [
        ({}, State.UNSUPPORTED, "no heartbeat"),
        (skews(a=0.3, b=-0.4), State.HEALTHY, ""),
        (skews(a=1.1, b=-1.1), State.HEALTHY, ""),  # may be 0.9 in truth
        (skews(a=5.0), State.DEGRADED, "this clock or the other's"),
        (skews(a=5.0, b=0.1, c=0.1), State.HEALTHY, "others are off: a +5.000 ms"),
        (skews(a=5.0, b=5.1, c=0.1), State.DEGRADED, "most boxes differ from this one"),
        (skews(a=-5.0, b=5.0), State.HEALTHY, "others are off"),
    ],
)
def test_other_boxes(others: dict[str, PeerSkew], state: State, words: str) -> None:
    finding = peers_finding(others, "no heartbeat", INSIDE)
    assert finding.state is state and words in finding.reason
    if others:
        assert finding.evidence["boxes_number"] == len(others)
