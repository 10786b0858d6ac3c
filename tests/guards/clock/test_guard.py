from __future__ import annotations

import itertools
import json
import math
import os
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from guards.budgets import Ledger
from guards.clock.chrony import ChronyReading, Tracking, parse_answer
from guards.clock.guard import BUDGET, ClockGuard, ClockMemory, budgets
from guards.clock.packet import Answer
from guards.clock.reading import ClockReading, PeerSkew
from guards.clock.sntp import SntpReading
from guards.clock.wall import WallReading
from guards.findings import Action, Decision, Finding, Repair, State
from guards.guard import ActionFailed, Guard
from guards.roots import Roots
from guards.settings import ClockSettings, GuardSettings
from tests.guards.clock.helpers import BUILT, TimeServer, called, honest, install_chronyc, recorded, serving

NOW = BUILT + 86_400
SETTINGS = GuardSettings()
QUICK = replace(SETTINGS, clock=replace(ClockSettings(), query_seconds=5.0))
FINE = parse_answer(recorded("chrony-4.3-synchronised").replace("127.0.0.1,11,", "127.0.0.1,3,"))
NO_CHRONY = ChronyReading(None, reason="chronyc is not installed")


FOREIGN = [
    {},
    {"set_at_seconds": None},
    {"set_at_seconds": "x", "asked_at_seconds": None},
    {"set_at_seconds": None, "asked_at_seconds": math.nan},
    {"set_at_seconds": True, "asked_at_seconds": None},
    [],
]


class Neighbours:
    """Other boxes that see this one's clock 7 ms ahead."""

    def skews(self) -> Mapping[str, PeerSkew]:
        return {"pi-2": PeerSkew(0.007, 0.0002), "pi-3": PeerSkew(0.007, 0.0002)}


class Broken:
    def skews(self) -> Mapping[str, PeerSkew]:
        raise RuntimeError("no heartbeats\nat all")


def guard(roots: Roots | None = None, **changes: object) -> ClockGuard:
    arguments: dict[str, object] = {
        "servers": ["127.0.0.1"],
        "build_unix_seconds": BUILT,
        "box": "pi-1",
        "in_pipeline": True,
    }
    return ClockGuard(QUICK, roots or Roots(path="/nonexistent"), **{**arguments, **changes})  # type: ignore[arg-type]


def chrony(offset: float, sample_seconds_ago: int = 1) -> ChronyReading:
    """The recorded client with another offset."""
    assert isinstance(FINE.tracking, Tracking)
    tracking = replace(FINE.tracking, offset_seconds=offset)
    return replace(FINE, tracking=tracking, sources=(replace(FINE.sources[0], sample_seconds_ago=sample_seconds_ago),))


def look(
    boot: float, chrony: ChronyReading = NO_CHRONY, *, stepped: float = 0.0, sntp: SntpReading | None = None
) -> ClockReading:
    """At `boot` seconds, with a wall clock that was stepped by so much since boot."""
    return ClockReading(WallReading(NOW + boot + stepped, boot, 1e-6), chrony, sntp, timesyncd_seconds_ago=10.0)


def by_part(decision: Decision[ClockMemory]) -> dict[str, Finding]:
    return {finding.part: finding for finding in decision.findings}


def rounds(*looks: ClockReading, memory: ClockMemory | None = None) -> list[Decision[ClockMemory]]:
    """What the guard decides, look after look."""
    watching = guard()
    decisions = []
    for reading in looks:
        decisions.append(watching.decide(reading, memory or watching.first_memory(), reading.wall.boot_seconds))
        memory = decisions[-1].memory
    return decisions


def answer(offset: float, server: str = "10.0.0.1") -> SntpReading:
    return SntpReading((Answer(server, offset, 0.0004, 0.003, stratum=2, leap=0, free_running=False),))


def test_it_is_a_guard() -> None:
    watching: Guard[ClockReading, ClockMemory] = guard()
    assert watching.name == "clock" and watching.period_seconds == 16.0
    assert watching.deadline_seconds == 17.0


def test_a_fault_is_noticed_within_thirty_seconds_of_the_default_settings() -> None:
    """A period, and the longest round: chronyc, a name, a server."""
    defaults = ClockGuard(SETTINGS, Roots(), servers=[], build_unix_seconds=BUILT, box="pi-1", in_pipeline=True)
    assert defaults.period_seconds + defaults.deadline_seconds < 30


# -- steps


def test_a_step_that_nobody_explains_is_shown_and_chronyd_asked_to_look_again() -> None:
    before, stepped, after, measured, kept = rounds(
        look(1000.0, chrony(0.0, 100)),
        look(1016.0, chrony(0.0, 116), stepped=5.0),
        look(1032.0, chrony(0.0, 132), stepped=5.0),
        look(1048.0, chrony(5.0, 2), stepped=5.0),
        look(1064.0, chrony(0.0, 18)),
    )
    assert by_part(before)["wall-clock-steps"].state is State.HEALTHY and before.actions == ()
    for decision in (stepped, after):
        finding = by_part(decision)["wall-clock-steps"]
        assert finding.state is State.DEGRADED
        assert finding.reason == "the clock was stepped by +5.000000 s, and nothing has measured it since"
    assert [action.arguments["method"] for action in stepped.actions] == ["burst"]
    assert after.actions == ()  # cooling down
    assert by_part(measured)["wall-clock-steps"].state is State.HEALTHY
    assert by_part(measured)["clock"].state is State.UNHEALTHY
    assert [action.arguments["method"] for action in measured.actions] == ["makestep"]
    # and the step back, which chronyd itself made, is its own explanation
    assert by_part(kept)["wall-clock-steps"].reason == "the clock was stepped by -5.000000 s"
    assert by_part(kept)["clock"].state is State.HEALTHY


def test_a_small_step_from_nowhere_is_not_taken_for_chronyd_s_own() -> None:
    _, stepped = rounds(look(1000.0, chrony(0.0, 100)), look(1016.0, chrony(0.0, 116), stepped=0.1))
    assert "nothing has measured" in by_part(stepped)["wall-clock-steps"].reason


def test_a_step_is_measured_at_once_where_the_servers_are_asked() -> None:
    _, stepped, later = rounds(
        look(1000.0, sntp=answer(0.0)),
        look(1016.0, stepped=5.0, sntp=answer(5.0)),
        look(1032.0, stepped=5.0, sntp=answer(5.0)),
    )
    assert by_part(stepped)["wall-clock-steps"].reason == "the clock was stepped by +5.000000 s"
    assert by_part(stepped)["wall-clock-steps"].state is State.DEGRADED
    assert by_part(later)["wall-clock-steps"].state is State.HEALTHY
    assert by_part(stepped)["clock"].state is by_part(later)["clock"].state is State.UNHEALTHY
    assert stepped.actions == ()  # no chronyd to correct it


def test_a_step_without_anyone_to_measure_it_is_shown_for_an_hour() -> None:
    _, stepped, late, too_late = rounds(
        look(1000.0), look(1016.0, stepped=-3.0), look(4600.0, stepped=-3.0), look(4620.0, stepped=-3.0)
    )
    assert by_part(stepped)["wall-clock-steps"].state is by_part(late)["wall-clock-steps"].state is State.DEGRADED
    assert by_part(too_late)["wall-clock-steps"].state is State.HEALTHY and too_late.memory.step is None


def test_a_reboot_is_no_step() -> None:
    _, booted = rounds(look(5000.0, sntp=answer(0.0)), look(20.0, stepped=3000.0, sntp=answer(0.0)))
    assert by_part(booted)["wall-clock-steps"].state is State.HEALTHY and len(booted.memory.samples) == 1


# -- corrections


def test_corrections_are_spaced_and_paid_for() -> None:
    decisions = rounds(*(look(1000.0 + 16 * at, chrony(5.0)) for at in range(40)))
    acted = [at for at, decision in enumerate(decisions) if decision.actions]
    assert acted == [0, 19, 38]  # 304 s apart: the first rounds that are 300 s or more later
    action = decisions[0].actions[0]
    assert action.repair is Repair.CORRECT_CLOCK and action.budget == BUDGET
    assert action.arguments == {"method": "makestep", "offset_milliseconds": 5000.0}


def test_the_budget() -> None:
    budget = budgets(SETTINGS)[BUDGET]
    assert (budget.most, budget.window_seconds, budget.apart_seconds) == (12, 86_400.0, 300.0)
    assert Ledger({}).left(BUDGET, budget, 0.0) == 12


def test_the_cool_downs_outlive_a_reboot() -> None:
    watching = guard()
    memory = watching.first_memory()
    for at, offset in ((1000.0, 5.0), (1016.0, 0.01)):
        memory = watching.decide(look(at, chrony(offset)), memory, at).memory
    again = watching.memory_from_json(json.loads(json.dumps(watching.memory_to_json(memory))))
    assert again == ClockMemory(set_at_seconds=1000.0, asked_at_seconds=1016.0)
    assert watching.decide(look(20.0, chrony(5.0)), again, 1299.0).actions == ()
    assert len(watching.decide(look(20.0, chrony(5.0)), again, 1300.0).actions) == 1
    assert watching.decide(look(20.0, chrony(0.01)), again, 1315.0).actions == ()
    assert len(watching.decide(look(20.0, chrony(0.01)), again, 1316.0).actions) == 1


def test_memory_that_never_corrected() -> None:
    watching = guard()
    assert watching.memory_from_json(watching.memory_to_json(watching.first_memory())) == watching.first_memory()


def test_measuring_anew_costs_nothing() -> None:
    action = rounds(look(1000.0, chrony(0.01)))[0].actions[0]
    assert action.arguments["method"] == "burst" and action.budget == ""


@pytest.mark.parametrize("data", FOREIGN)
def test_foreign_memory_is_refused(data: object) -> None:
    with pytest.raises((ValueError, KeyError, TypeError)):
        guard().memory_from_json(data)  # type: ignore[arg-type]


def test_act(tmp_path: Path) -> None:
    roots = install_chronyc(tmp_path / "bin", recorded("chrony-4.3-ok"))
    action = rounds(look(1000.0, chrony(5.0)))[0].actions[0]
    assert guard(roots).act(action) == "chronyc -n makestep: 200 OK"
    assert called(tmp_path / "bin") == ["-n makestep"]


@pytest.mark.parametrize(
    "action",
    [
        Action(Repair.CORRECT_CLOCK, "clock", "", {"method": "settime"}),
        Action(Repair.CORRECT_CLOCK, "clock", ""),
        Action(Repair.LIMIT_BATCH, "clock", "", {"method": "burst"}),
    ],
)
def test_foreign_actions_are_refused(tmp_path: Path, action: Action) -> None:
    roots = install_chronyc(tmp_path / "bin", recorded("chrony-4.3-ok"))
    with pytest.raises(ActionFailed):
        guard(roots).act(action)
    assert called(tmp_path / "bin") == []


# -- samples


def test_the_drift_of_a_clock_that_runs_away() -> None:
    decisions = rounds(*(look(1000.0 + 16 * at, sntp=answer(300e-6 * 16 * at)) for at in range(20)))
    assert by_part(decisions[3])["drift"].state is State.INITIALISING
    finding = by_part(decisions[-1])["drift"]
    assert finding.state is State.DEGRADED and finding.evidence["drift_ppm"] == pytest.approx(300.0)
    assert by_part(decisions[-1])["clock"].evidence["offset_milliseconds"] == pytest.approx(91.2, abs=10)


def test_a_step_starts_the_drift_anew() -> None:
    steady = [look(1000.0 + 16 * at, sntp=answer(0.0)) for at in range(10)]
    stepped = [look(1160.0 + 16 * at, stepped=2.0, sntp=answer(2.0)) for at in range(10)]
    decisions = rounds(*steady, *stepped)
    assert by_part(decisions[10])["drift"].state is State.INITIALISING
    assert by_part(decisions[-1])["drift"].evidence["drift_ppm"] == 0.0


# -- decide for anything


offsets = st.one_of(st.floats(-1e10, 1e10), st.floats(-0.2, 0.2))
looks = st.builds(
    lambda boot, unix, offset, ago, known, answered: ClockReading(
        WallReading(unix, boot, 1e-6),
        chrony(offset, ago) if known else NO_CHRONY,
        answer(offset) if answered else None,
    ),
    st.floats(0, 1e6),
    st.floats(0, 1e10),
    offsets,
    st.integers(0, 2000),
    st.booleans(),
    st.booleans(),
)


@given(seen=st.lists(looks, max_size=12))
def test_decide_takes_anything_is_pure_and_never_acts_twice_within_the_cool_down(seen: list[ClockReading]) -> None:
    watching = guard()
    memory = watching.first_memory()
    acted: dict[object, list[float]] = {"makestep": [], "burst": []}
    for at, reading in enumerate(seen):
        now = at * 16.0
        decision = watching.decide(reading, memory, now)
        assert decision == watching.decide(reading, memory, now)
        assert [finding.part for finding in decision.findings] == [
            "clock",
            "time-sources",
            "wall-clock-steps",
            "drift",
            "peers",
        ]
        assert all(finding.reason for finding in decision.findings if finding.state.severity > 1)
        if decision.actions:
            acted[decision.actions[0].arguments["method"]].append(now)
            assert reading.chrony.tracking is not None
            if decision.actions[0].arguments["method"] == "makestep":
                right = reading.wall.unix_seconds - reading.chrony.tracking.offset_seconds
                assert BUILT <= right <= BUILT + 20 * 31_556_952.0  # never to a time that can't be
        json.dumps(watching.memory_to_json(decision.memory), allow_nan=False)
        memory = decision.memory
    assert all(late - early >= 300.0 for times in acted.values() for early, late in itertools.pairwise(times))


# -- sense, with real sockets and a chronyc that replays


def test_chrony_that_knows_the_time_is_enough(tmp_path: Path) -> None:
    roots = install_chronyc(tmp_path / "bin", recorded("chrony-4.3-synchronised"))
    server = TimeServer("127.0.0.1", honest())
    with serving(server) as port:
        reading = guard(roots, port=port).sense()
    assert reading.chrony.tracking is not None and reading.sntp is None and server.requests == []
    assert abs(reading.wall.unix_seconds - time.time()) < 60


@pytest.mark.parametrize(
    "chronyd", ["chrony-4.3-no-daemon", "chrony-4.3-unsynchronised", "chrony-4.3-local", None, "README"]
)
def test_otherwise_the_site_s_servers_are_asked(tmp_path: Path, chronyd: str | None) -> None:
    text = "not what chronyc prints\n" if chronyd == "README" else recorded(chronyd) if chronyd else ""
    roots = install_chronyc(tmp_path / "bin", text, code=1) if chronyd else Roots(path="/nonexistent")
    with serving(TimeServer("127.0.0.1", honest(-5.0))) as port:
        watching = guard(roots, port=port)
        reading = watching.sense()
    assert reading.sntp is not None and reading.sntp.answers[0].offset_seconds == pytest.approx(5.0, abs=0.5)
    finding = by_part(watching.decide(reading, watching.first_memory(), 0.0))["clock"]
    assert finding.state is State.UNHEALTHY and "ahead" in finding.reason


def test_timesyncd_s_file_is_read(tmp_path: Path) -> None:
    roots = Roots(run=tmp_path, path="/nonexistent")
    assert guard(roots, servers=[]).sense().timesyncd_seconds_ago is None
    file = tmp_path / "systemd" / "timesync" / "synchronized"
    file.parent.mkdir(parents=True)
    file.touch()
    ago = guard(roots, servers=[]).sense().timesyncd_seconds_ago
    assert ago is not None and 0 <= ago < 60
    os.utime(file, (time.time() - 5000, time.time() - 5000))
    ago = guard(roots, servers=[]).sense().timesyncd_seconds_ago
    assert ago == pytest.approx(5000, abs=60)
    os.utime(file, (time.time() + 5000, time.time() + 5000))  # the clock was set back since
    assert guard(roots, servers=[]).sense().timesyncd_seconds_ago == 0.0


def test_second_opinions() -> None:
    watching = guard(servers=[], peers=Neighbours())
    finding = by_part(watching.decide(watching.sense(), watching.first_memory(), 0.0))["peers"]
    assert finding.state is State.DEGRADED and "pi-2 +7.000 ms, pi-3 +7.000 ms" in finding.reason


def test_broken_second_opinions_cost_nothing_else() -> None:
    watching = guard(servers=[], peers=Broken())
    reading = watching.sense()
    decision = watching.decide(reading, watching.first_memory(), 0.0)
    assert by_part(decision)["peers"].state is State.UNSUPPORTED
    assert "RuntimeError: no heartbeats" in by_part(decision)["peers"].reason
    assert by_part(decision)["clock"].evidence["clock_state"] in ("unsynchronised", "synchronised")


def test_a_bare_machine_has_findings_too() -> None:
    watching = guard(servers=[])
    decision = watching.decide(watching.sense(), watching.first_memory(), 0.0)
    assert len(decision.findings) == 5 and decision.actions == ()
    assert by_part(decision)["time-sources"].state is State.UNSUPPORTED
