"""The whole guard on a recorded box, with a stage that obeys."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from guards.findings import Action, Decision, Repair, State
from guards.guard import ActionFailed
from guards.settings import ThermalSettings
from guards.thermal.guard import ThermalGuard
from guards.thermal.memory import ThermalMemory
from tests.guards.thermal.trees import Tree

SETTINGS = replace(ThermalSettings(), zone_deadline_seconds=0.3, up_dwell_seconds=10.0)


class ObedientStage:
    """Takes limits over; a restart forgets them."""

    def __init__(self) -> None:
        self.answers, self.refuses = True, False
        self.restart()

    def restart(self) -> None:
        self.batch, self.duty = 4, 100.0

    def health(self) -> Mapping[str, Any] | None:
        document = {
            "max_batch_sequences": 4,
            "batch_limit_sequences": self.batch,
            "duty_limit_percent": self.duty,
            "tokens_per_second": 12.5,
            "open_sequences": 2,
        }
        return document if self.answers else None

    def limit_batch(self, sequences: int) -> None:
        self._obey()
        self.batch = sequences

    def limit_duty(self, percent: float) -> None:
        self._obey()
        self.duty = percent

    def _obey(self) -> None:
        if self.refuses:
            raise ActionFailed("not now")


class Box:
    """A guard that goes round after round."""

    def __init__(self, tree: Tree) -> None:
        self.tree = tree
        self.stage = ObedientStage()
        self.guard = ThermalGuard(tree.roots, SETTINGS, self.stage)
        self.memory = self.guard.first_memory()
        self.now_seconds = 1000.0

    def round(self) -> Decision[ThermalMemory]:
        decision = self.guard.decide(self.guard.sense(), self.memory, self.now_seconds)
        for action in decision.actions:
            assert self.guard.act(action)
        self.memory = decision.memory
        self.now_seconds += SETTINGS.period_seconds
        return decision

    def rounds(self, count: int) -> None:
        for _ in range(count):
            self.round()


@pytest.fixture
def box(tree: Tree) -> Box:
    """A Raspberry Pi 4."""
    return Box(tree.lay_out("pi4"))


def test_heated_it_lowers_in_one_period_and_cooled_it_comes_back(box: Box) -> None:
    box.round()
    assert (box.stage.batch, box.stage.duty) == (4, 100.0)
    box.tree.heat(86.0)
    box.round()
    assert (box.stage.batch, box.stage.duty) == (3, 100.0)
    box.rounds(40)
    assert (box.stage.batch, box.stage.duty) == (1, 25.0)
    box.tree.heat(60.0)
    box.rounds(5 * 40)
    assert (box.stage.batch, box.stage.duty) == (4, 100.0)


def test_a_restarted_stage_is_limited_again(box: Box) -> None:
    box.tree.heat(86.0)
    box.rounds(4)
    box.tree.heat(75.0)
    box.rounds(20)
    limits = box.stage.batch, box.stage.duty
    assert limits != (4, 100.0)
    box.stage.restart()
    box.round()
    assert (box.stage.batch, box.stage.duty) == limits


def test_a_restarted_guard_goes_on_where_it_was(box: Box) -> None:
    box.tree.heat(86.0)
    box.rounds(3)
    limits = box.stage.batch, box.stage.duty
    guard = ThermalGuard(box.tree.roots, SETTINGS, box.stage)
    box.memory = guard.memory_from_json(guard.memory_to_json(box.memory))
    box.guard = guard
    box.tree.heat(65.0)
    box.round()
    assert (box.stage.batch, box.stage.duty) == limits  # the dwell is kept too
    box.now_seconds += SETTINGS.up_dwell_seconds
    box.round()
    assert (box.stage.batch, box.stage.duty) != limits


def test_sensors_that_all_fail_hold_the_limits(box: Box) -> None:
    box.tree.heat(86.0)
    box.rounds(3)
    limits = box.stage.batch, box.stage.duty
    box.tree.fault("class/thermal/thermal_zone0/temp", "EIO")
    box.rounds(60)
    assert (box.stage.batch, box.stage.duty) == limits
    found = {each.part: each for each in box.round().findings}
    assert found["temperature"].state is State.DEGRADED
    assert "EIO" in found["sensors"].reason


def test_a_zone_that_hangs_does_not_stop_it(tree: Tree) -> None:
    box = Box(tree.lay_out("orin-nano"))
    box.tree.heat(86.0, zone=8)
    box.rounds(2)
    assert box.stage.batch == 3
    found = {each.part: each for each in box.round().findings}
    assert found["temperature"].evidence["zone"] == "thermal_zone8/tj-thermal"
    assert "cv0-thermal: hung" in found["sensors"].reason


def test_throttle_bits_alone_lower_the_limits(box: Box) -> None:
    box.tree.fault("class/thermal/thermal_zone0/temp", "EINVAL")
    box.tree.write("devices/platform/soc/soc:firmware/get_throttled", "80008")
    found = {each.part: each for each in box.round().findings}
    assert box.stage.batch == 3
    assert found["throttling"].state is State.DEGRADED
    box.tree.write("devices/platform/soc/soc:firmware/get_throttled", "80000")
    box.rounds(20)
    assert box.stage.batch == 3


def test_a_silent_stage_costs_nothing_but_its_limits(box: Box) -> None:
    box.round()
    box.stage.answers = False
    box.tree.heat(86.0)
    decision = box.round()
    assert decision.actions == ()
    box.stage.answers = True
    box.round()
    assert box.stage.batch < 4


def test_a_stage_that_refuses_fails_the_action(box: Box) -> None:
    box.stage.refuses = True
    with pytest.raises(ActionFailed, match="not now"):
        box.guard.act(Action(Repair.LIMIT_BATCH, "stage", "heat", {"sequences": 1}))
    with pytest.raises(ActionFailed, match="does not do kill-program"):
        box.guard.act(Action(Repair.KILL_PROGRAM, "stage", "heat"))


def test_a_box_without_a_stage_is_watched(tree: Tree) -> None:
    guard = ThermalGuard(tree.lay_out("pi5").roots, SETTINGS, None)
    tree.heat(97.0)
    decision = guard.decide(guard.sense(), guard.first_memory(), 0.0)
    assert decision.actions == ()
    assert {each.part: each.state for each in decision.findings}["temperature"] is State.UNHEALTHY
    with pytest.raises(ActionFailed, match="no stage"):
        guard.act(Action(Repair.LIMIT_BATCH, "stage", "heat", {"sequences": 1}))


def test_settings_without_sense_are_refused_at_once(tree: Tree) -> None:
    with pytest.raises(ValueError, match="no ladder"):
        ThermalGuard(tree.roots, replace(SETTINGS, step_percent=100.0), None)


@pytest.mark.parametrize(
    "document",
    [
        {},
        {"max_batch_sequences": 0},
        {"max_batch_sequences": "8", "batch_limit_sequences": None},
        {"max_batch_sequences": True, "tokens_per_second": float("nan"), "open_sequences": -1},
    ],
)
def test_a_nonsensical_health_document_limits_nothing(
    box: Box, document: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(box.stage, "health", lambda: document)
    box.tree.heat(90.0)
    assert box.round().actions == ()
