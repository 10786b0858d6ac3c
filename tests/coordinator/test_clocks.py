"""Wall clocks by heartbeats: what delays can do to the estimate, and whose clock it is that is wrong."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Gauge, generate_latest

from fleet.coordinator.clock_watch import COMPARE_SECONDS, ClockWatch
from fleet.coordinator.clocks import (
    LEAST_SAMPLES,
    LEAST_UNCERTAINTY_SECONDS,
    OFF_SECONDS,
    RIGHT_SECONDS,
    SAMPLES,
    ClockSamples,
    Offset,
    compare,
)
from tests.coordinator.site import SITE, World, until

PERIOD_SECONDS = 0.25
NOW = 1.8e9


class Clocks:
    """A site's clocks by hand: boxes' walls are true time plus an error, heartbeats take their delays."""

    def __init__(self, *boxes: str, own: str = "control") -> None:
        self.true = 0.0
        self.error = dict.fromkeys((own, *boxes), 0.0)
        self.delay = dict.fromkeys(boxes, 0.002)
        self.boxes, self.own = boxes, own
        self.events: list[tuple[str, str, str]] = []
        self.registry = CollectorRegistry()
        gauge = Gauge("offset_seconds", "Offsets.", ["box"], registry=self.registry)
        self.watch = ClockWatch(
            own,
            boxes,
            gauge,
            lambda kind, text, *, box: self.events.append((kind, box, text)),
            wall=lambda: self.wall(own),
            monotonic=lambda: self.true,
        )

    def wall(self, box: str) -> float:
        return NOW + self.true + self.error[box]

    def run(self, seconds: float, *silent: str) -> list[tuple[str, str]]:
        """Time passes; the events of it."""
        before = len(self.events)
        for _ in range(round(seconds / PERIOD_SECONDS)):
            self.true += PERIOD_SECONDS
            for box in self.boxes:
                if box not in silent:
                    self.watch.heard(box, self.wall(box) - self.delay[box])
            self.watch.check()
        return [(kind, box) for kind, box, _ in self.events[before:]]


@given(
    st.floats(-1e6, 1e6),
    st.floats(0, 0.4),
    st.lists(st.floats(0, 3.0), min_size=LEAST_SAMPLES, max_size=3 * SAMPLES),
)
def test_an_estimate_is_late_by_the_least_delay_of_the_last_samples(
    error: float, least: float, more: list[float]
) -> None:
    samples = ClockSamples()
    for number, delay in enumerate(more):
        monotonic = number * PERIOD_SECONDS
        samples.add(NOW + monotonic + error - least - delay, monotonic)
    at = len(more) * PERIOD_SECONDS
    offset = samples.offset(NOW + at, at)
    assert offset is not None
    assert offset.seconds == pytest.approx(error - least - min(more[-SAMPLES:]), abs=1e-3)
    assert LEAST_UNCERTAINTY_SECONDS <= offset.uncertainty_seconds <= max(more) + LEAST_UNCERTAINTY_SECONDS


def test_few_samples_say_nothing() -> None:
    samples = ClockSamples()
    for _ in range(LEAST_SAMPLES - 1):
        samples.add(NOW, 0.0)
    assert samples.offset(NOW, 0.0) is None


def test_delays_of_one_direction_name_nobody() -> None:
    clocks, chance = Clocks("box1", "box2", "box3"), random.Random(4)  # noqa: S311 - delays
    clocks.delay["box2"] = 0.4
    for _ in range(100):
        clocks.delay["box3"] = chance.expovariate(2.0)  # half a second at the mean
        assert clocks.run(PERIOD_SECONDS) == []
    offset = clocks.watch.offset("box2")
    assert offset is not None
    assert -0.41 < offset.seconds < -0.39


@pytest.mark.parametrize("jump", [5.0, -5.0, 1e6, -NOW])
def test_a_box_whose_clock_jumps_is_named_once_and_so_is_its_return(jump: float) -> None:
    clocks = Clocks("box1", "box2", "box3")
    assert clocks.run(20) == []
    clocks.error["box2"] = jump
    assert clocks.run(60) == [("box-clock-off", "box2")]
    assert clocks.watch.off == {"box2"}
    assert ("ahead of" if jump > 0 else "behind") in clocks.events[-1][2]
    clocks.error["box2"] = 0.0
    assert clocks.run(60) == [("box-clock-right", "box2")]
    assert clocks.watch.off == frozenset()


def test_a_clock_at_the_bound_is_named_once() -> None:
    clocks = Clocks("box1", "box2", "box3")
    clocks.error["box2"] = OFF_SECONDS + 0.1
    assert clocks.run(30) == [("box-clock-off", "box2")]
    for error in (OFF_SECONDS - 0.1, OFF_SECONDS + 0.1, RIGHT_SECONDS + 0.1):
        clocks.error["box2"] = error
        assert clocks.run(30) == []
    clocks.error["box2"] = RIGHT_SECONDS - 0.1
    assert clocks.run(30) == [("box-clock-right", "box2")]


@pytest.mark.parametrize("jump", [5.0, -5.0])
def test_when_the_coordinators_own_clock_jumps_it_is_the_one_that_is_named(jump: float) -> None:
    clocks = Clocks("box1", "box2", "box3")
    clocks.run(20)
    clocks.error["control"] = jump
    assert clocks.run(30) == [("box-clock-off", "control")]
    for box in clocks.boxes:  # they have shifted together
        offset = clocks.watch.offset(box)
        assert offset is not None
        assert offset.seconds == pytest.approx(-jump, abs=0.1)
    clocks.error["control"] = 0.0
    assert clocks.run(30) == [("box-clock-right", "control")]


def test_of_two_clocks_nobody_can_say_which_is_wrong() -> None:
    clocks = Clocks("box1")
    clocks.error["box1"] = 5.0
    assert clocks.run(20) == [("box-clock-off", "box1")]
    assert "ahead of that of control; no majority of the clocks agrees, so either may be wrong" in clocks.events[-1][2]


def test_a_stage_on_the_coordinators_box_does_not_count_twice() -> None:
    clocks = Clocks("control", "box2", "box3")
    clocks.error["control"] = 5.0
    assert clocks.run(20) == [("box-clock-off", "control")]


def test_a_box_that_is_silent_has_no_number_and_stays_named_until_it_is_heard() -> None:
    clocks = Clocks("box1", "box2", "box3")
    clocks.error["box2"] = 5.0
    clocks.run(20)
    assert b'offset_seconds{box="box2"}' in generate_latest(clocks.registry)
    clocks.watch.forget("box2")
    assert clocks.run(20, "box2") == []
    assert b'offset_seconds{box="box2"}' not in generate_latest(clocks.registry)
    assert clocks.watch.offset("box2") is None
    clocks.error["box2"] = 0.0
    assert clocks.run(20) == [("box-clock-right", "box2")]


@given(st.dictionaries(st.sampled_from("abcdefgh"), st.floats(-10, 10), min_size=2), st.floats(-1e5, 1e5))
def test_who_is_off_does_not_depend_on_whose_clock_is_the_reference(errors: dict[str, float], shift: float) -> None:
    def off(by: float) -> object:
        offsets = {name: Offset(error + by, 0.0) for name, error in errors.items()}
        return set(compare(offsets, min(errors), frozenset()).off)

    rounded = {name: round(error, 2) for name, error in errors.items()}
    errors = rounded | {}
    spread = sorted({round(abs(one - two), 2) for one in errors.values() for two in errors.values()})
    if not any(abs(each - OFF_SECONDS) < 0.011 for each in spread):
        assert off(0.0) == off(round(shift))


def test_a_majority_decides() -> None:
    def off(*seconds: float) -> tuple[bool, list[str]]:
        found = compare({f"c{n}": Offset(each, 0.0) for n, each in enumerate(seconds)}, "c0", frozenset())
        return found.agree, sorted(found.off)

    assert off(0.0, 0.2, 0.4) == (True, [])
    assert off(0.0, 7.0, 7.1, 7.2) == (True, ["c0"])
    assert off(0.0, 7.0, 7.1, -5.0) == (False, ["c1", "c2", "c3"])
    assert off(0.0, 0.1, 0.2, 9.0, -9.0) == (True, ["c3", "c4"])


async def test_a_site_shows_whose_clock_is_off(site: World) -> None:
    assert site.coordinator is not None
    watch = site.coordinator.context.clocks
    for stage in site.stages.values():
        assert stage.link is not None
        assert stage.link.peer.extra == {"takes": "wall_unix_seconds"}
    site.stages["box2"].clock_error_seconds = 5.0
    await until(lambda: watch.off == {"box2"}, f"named, in {SITE}")
    _, document = await site.ask("GET", "/v1/site")
    box1, box2 = document["boxes"]["box1"], document["boxes"]["box2"]
    assert document["clocks_off"] == ["box2"]
    assert (box1["clock_off"], box2["clock_off"]) == (False, True)
    assert abs(box1["clock_offset_seconds"]) < 1
    assert 4 < box2["clock_offset_seconds"] < 6
    assert box2["clock_uncertainty_seconds"] > 0
    text = generate_latest(site.coordinator.context.metrics.registry).decode()
    assert 'fleet_coordinator_box_clock_offset_seconds{box="box2"} ' in text
    assert [event["box"] for event in await site.events("box-clock-off")] == ["box2"]
    assert (box2["state"], site.epoch) == ("serving", 1), "nothing but the clock is judged by it"
    site.stages["box2"].clock_error_seconds = 0.0
    await until(lambda: not watch.off, "right again")
    assert [event["box"] for event in await site.events("box-clock-right")] == ["box2"]
    assert COMPARE_SECONDS < 5
