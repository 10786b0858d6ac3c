"""What is decided in each situation."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleet.coordinator.decide import (
    BoxView,
    GiveUp,
    LetGo,
    Refuse,
    Situation,
    Start,
    SwitchView,
    Wanted,
    available,
    conclude,
    want,
)
from fleet.planning.plan import PipelinePlan, StagePlan
from fleet.planning.spec import Refusal

WELL, DEAD = BoxView(True), BoxView(False, condemned=True, settled=False)
LOST_LATELY, CUT_OFF = BoxView(False, awaited=True), BoxView(False)
ALL = frozenset({"box1", "box2", "box3"})
REFUSAL = Refusal({"box1": 5}, "too little memory")


def plan(*boxes: str) -> PipelinePlan:
    stages = tuple(StagePlan(box, at, at + 1, at == 0, at == 0) for at, box in enumerate(boxes))
    return PipelinePlan("m", "d", len(boxes), "exact", 1, 16, stages)


PLAN = plan("box1", "box2", "box3")


def situation(one: BoxView = WELL, two: BoxView = WELL, three: BoxView = WELL, **changes: Any) -> Situation:
    return Situation({"box1": one, "box2": two, "box3": three}, **{"plan": PLAN, **changes})


@pytest.mark.parametrize(
    ("where", "how", "alive", "planned"),
    [
        (situation(), "resplit", ALL, True),
        (situation(two=DEAD), "merge", ALL - {"box2"}, False),
        (situation(two=replace(WELL, condemned=True)), "merge", ALL - {"box2"}, False),  # restarted
        (situation(two=replace(WELL, drained=True)), "merge", ALL - {"box2"}, True),
        (situation(two=replace(WELL, leaving=True)), "merge", ALL - {"box2"}, True),
        (situation(two=replace(WELL, leaving=True), calm=False), "merge", ALL - {"box2"}, True),
        (situation(two=DEAD, three=replace(WELL, leaving=True)), "merge", {"box1"}, False),
        (situation(plan=None), "whole", ALL, False),
        (situation(two=DEAD, plan=None), "whole", ALL - {"box2"}, False),
        (situation(two=DEAD, plan=plan("box1", "box3")), "resplit", ALL - {"box2"}, True),
        (situation(two=replace(DEAD, expected=True), plan=plan("box1")), "resplit", ALL - {"box2"}, True),
        (situation(two=replace(WELL, held_down=True), plan=plan("box1", "box3")), "resplit", ALL - {"box2"}, True),
        (situation(two=replace(WELL, settled=False), plan=plan("box1", "box3")), "resplit", ALL - {"box2"}, True),
        (situation(fenced=True), "merge", ALL, False),
    ],
)
def test_what_is_wanted(where: Situation, how: str, alive: frozenset[str], planned: bool) -> None:
    wanted = want(where)
    assert isinstance(wanted, Wanted)
    assert (wanted.how, wanted.alive, wanted.planned) == (how, frozenset(alive), planned)


@pytest.mark.parametrize(
    "where",
    [
        situation(two=CUT_OFF),  # it works on: nothing is moved behind its back
        situation(two=CUT_OFF, three=replace(WELL, drained=True)),
        situation(two=DEAD, three=LOST_LATELY),  # it may be dialling: it is to be in the new plan
        situation(retiring=True),
        situation(improvable=False),
        situation(calm=False),
        situation(two=replace(DEAD, expected=True), plan=plan("box1", "box3")),
        situation(two=replace(WELL, settled=False, expected=True), plan=plan("box1", "box3")),
        situation(two=replace(WELL, drained=True), improvable=False),
        situation(two=CUT_OFF, plan=None, patient=True),
        situation(CUT_OFF, CUT_OFF, CUT_OFF, plan=None),
        situation(switch=SwitchView(PLAN, True)),
        situation(two=DEAD, switch=SwitchView(plan("box1", "box3"), False)),
        situation(two=replace(WELL, drained=True), switch=SwitchView(plan("box1", "box3"), True)),
    ],
)
def test_nothing_is_done(where: Situation) -> None:
    assert want(where) is None


@pytest.mark.parametrize(
    "where",
    [
        situation(switch=SwitchView(PLAN, True, "box1 votes no")),
        situation(two=DEAD, switch=SwitchView(PLAN, False)),
        situation(two=DEAD, switch=SwitchView(plan("box1", "box3"), True)),  # what serves is broken: no time to drain
        situation(three=replace(WELL, leaving=True), switch=SwitchView(PLAN, True)),
    ],
)
def test_a_switch_is_given_up(where: Situation) -> None:
    assert isinstance(want(where), GiveUp)


def test_the_last_resort_takes_boxes_that_are_held_down() -> None:
    where = situation(two=replace(WELL, condemned=True, held_down=True, settled=False))
    wanted = want(where)
    assert isinstance(wanted, Wanted)
    assert (wanted.alive, wanted.last_resort) == (ALL - {"box2"}, ALL)
    assert conclude(where, wanted, REFUSAL, PLAN) == Start(PLAN, False, "box2 lost")
    assert conclude(where, wanted, REFUSAL, REFUSAL) == Refuse(REFUSAL, "box2 lost")


def test_what_follows_from_planned_answers() -> None:
    leaving = situation(two=replace(WELL, leaving=True))
    drained = situation(two=replace(WELL, drained=True))
    for where, expected in ((leaving, LetGo(("box2",), REFUSAL)), (drained, None)):
        wanted = want(where)
        assert isinstance(wanted, Wanted)
        assert conclude(where, wanted, REFUSAL, REFUSAL) == expected
    wanted = want(situation())
    assert isinstance(wanted, Wanted)
    assert conclude(situation(), wanted, None, None) is None
    assert conclude(situation(), wanted, PLAN, PLAN) is None  # a plan that changes nothing is no plan


views = st.builds(BoxView, *[st.booleans()] * 7)
plans = st.sampled_from([None, PLAN, plan("box1"), plan("box1", "box3")])
switches = st.none() | st.builds(
    SwitchView, st.sampled_from([PLAN, plan("box2")]), st.booleans(), st.sampled_from(["", "no"])
)
situations = st.builds(
    lambda a, b, c, p, s, *flags: Situation({"box1": a, "box2": b, "box3": c}, p, s, *flags),
    views,
    views,
    views,
    plans,
    switches,
    *[st.booleans()] * 4,
)


@given(situations)
def test_plans_are_never_made_with_boxes_that_can_not_work(where: Situation) -> None:
    wanted = want(where)
    if isinstance(wanted, Wanted):
        assert where.switch is None
        for name in wanted.alive | wanted.last_resort:
            box = where.boxes[name]
            assert box.well and not (box.drained or box.leaving or box.unfit)
        assert wanted.alive <= wanted.last_resort
    members = [stage.box for stage in where.plan.stages] if where.plan else []
    assert all(not where.boxes[name].condemned for name in available(where))
    assert all(name in members or not where.boxes[name].held_down for name in available(where))


@given(situations)
def test_a_loss_is_never_drained(where: Situation) -> None:
    wanted = want(where)
    if isinstance(wanted, Wanted) and where.plan is not None:
        lost = any(where.boxes[stage.box].condemned for stage in where.plan.stages)
        assert not (lost and wanted.planned)
