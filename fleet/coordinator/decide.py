"""From what is known of a pipeline's boxes to the next action. Pure; the planner's answers are passed in.

Two steps, because plans may take a while to compute: `want` says which plan is needed for which boxes, `conclude` what
follows from the planner's answer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from fleet.planning.plan import PipelinePlan
from fleet.planning.spec import Refusal

How = Literal["whole", "merge", "resplit"]
Planned = PipelinePlan | Refusal | None


@dataclass(frozen=True)
class BoxView:
    """A box as decisions see it.

    Attributes:
        well: its channel is open and it is judged alive.
        condemned: it died, hung, or its process restarted under the plan that serves; a plan without it clears that.
        settled: well for `settle_seconds`. held_down: it died lately.
        expected: it was lost or told to stop just now and may soon be back, or is and will be taken back soon, so that
            a better split without it is not worth a switch.
        drained: an operator wants nothing on it.
        awaited: its channel is gone, but not for so long that it would have dialled again if it lives.
        leaving: it was told to stop. unfit: it could not get ready for a plan, for another reason than memory.
    """

    well: bool
    condemned: bool = False
    awaited: bool = False
    settled: bool = True
    held_down: bool = False
    expected: bool = False
    drained: bool = False
    leaving: bool = False
    unfit: bool = False

    @property
    def usable(self) -> bool:
        """May hold layers if nothing else helps."""
        return self.well and not (self.drained or self.leaving or self.unfit)


@dataclass(frozen=True)
class SwitchView:
    """A switch that waits for votes. `failed`: why it can't succeed any more; empty while it can."""

    plan: PipelinePlan
    planned: bool
    failed: str = ""


@dataclass(frozen=True)
class Situation:
    """A pipeline at one moment.

    Attributes:
        boxes: in ring order. plan: the committed one. switch: under way.
        patient: boxes that have not registered yet may still do so: nothing is broken yet, or everything is.
        fenced: members have given the plan up for one that was never committed, and the coordinator restarted since.
        retiring: the epoch before is still open for what began under it.
        calm: no loss was mended just now, so moving layers for a better split competes with nobody's rebuild.
        improvable: nothing speaks against a planned switch now (the last one has not failed lately).
    """

    boxes: Mapping[str, BoxView]
    plan: PipelinePlan | None
    switch: SwitchView | None = None
    patient: bool = False
    fenced: bool = False
    retiring: bool = False
    improvable: bool = True
    calm: bool = True


@dataclass(frozen=True)
class Wanted:
    """A plan that is needed.

    Attributes:
        how: the planner's function.
        alive: boxes it may use. last_resort: those it may use if no plan fits into `alive`.
        planned: both epochs live for a while. reason: for people.
    """

    how: How
    alive: frozenset[str]
    last_resort: frozenset[str]
    planned: bool
    reason: str


@dataclass(frozen=True)
class GiveUp:
    """The switch under way can't succeed or must not: abort it, then look again."""

    reason: str


@dataclass(frozen=True)
class Start:
    """Begin a switch to this plan."""

    plan: PipelinePlan
    planned: bool
    reason: str


@dataclass(frozen=True)
class Refuse:
    """No plan fits; what serves is broken."""

    refusal: Refusal
    reason: str


@dataclass(frozen=True)
class LetGo:
    """Boxes that leave and without which no plan fits: they may stop now."""

    boxes: tuple[str, ...]
    refusal: Refusal


Action = Start | Refuse | LetGo | None


def available(situation: Situation) -> frozenset[str]:
    """Boxes that plans are made for: members that work, and others that have been well for long enough."""
    held = _members(situation)
    return frozenset(
        name
        for name, box in situation.boxes.items()
        if box.usable and not box.condemned and (name in held or (box.settled and not box.held_down))
    )


def want(situation: Situation) -> Wanted | GiveUp | None:
    """Which plan is needed now; None: nothing is to be done."""
    boxes, plan = situation.boxes, situation.plan
    members = _members(situation)
    lost = [name for name in members if boxes[name].condemned]
    if situation.switch is not None:
        problem = _problem(boxes, situation.switch, lost)
        return GiveUp(problem) if problem else None
    usable = frozenset(name for name, box in boxes.items() if box.usable)
    if (plan is None or lost) and situation.patient and not all(box.well or box.drained for box in boxes.values()):
        return None
    if plan is None:
        return Wanted("whole", usable, usable, False, "the first plan") if usable else None
    working = available(situation)
    if lost or situation.fenced:
        if any(boxes[name].awaited and not boxes[name].condemned for name in members):
            return None  # whoever lives is to be in the new plan
        reason = f"{_names(lost)} lost" if lost else "a box has stopped the ring"
        return Wanted("merge", working, usable, False, reason)
    if not situation.improvable or not all(boxes[name].well for name in members):
        return None  # a member that is cut off from the coordinator alone works on; nothing is moved behind its back
    if going := [name for name in members if name not in working]:
        return Wanted("merge", working, working, True, f"{_names(going)} to be taken out")
    if situation.retiring or not situation.calm:
        return None
    if working <= set(members) and any(box.expected for box in boxes.values()):
        return None
    return Wanted("resplit", working, working, True, "a better split")


def conclude(situation: Situation, wanted: Wanted, answer: Planned, last_answer: Planned) -> Action:
    """What follows from the planner's answers.

    Args:
        answer: for `wanted.alive`. last_answer: for `wanted.last_resort`, asked if `answer` is a refusal.
    """
    result = last_answer if isinstance(answer, Refusal) else answer
    if isinstance(result, PipelinePlan):
        same = result == situation.plan  # a change of the load alone is one too
        return None if wanted.planned and same else Start(result, wanted.planned, wanted.reason)
    if result is None:
        return None
    if not wanted.planned:
        return Refuse(result, wanted.reason)
    leaving = tuple(name for name in _members(situation) if situation.boxes[name].leaving)
    return LetGo(leaving, result) if leaving else None


def _problem(boxes: Mapping[str, BoxView], switch: SwitchView, lost: list[str]) -> str:
    """Why the switch under way must be given up; empty if it need not."""
    if switch.failed:
        return switch.failed
    voters = [stage.box for stage in switch.plan.stages]
    if gone := [name for name in voters if boxes[name].condemned and not boxes[name].well]:
        return f"{_names(gone)} lost while it prepared"
    if switch.planned and lost:
        return f"{_names(lost)} lost under the plan that serves"
    if switch.planned and (going := [name for name in voters if boxes[name].drained or boxes[name].leaving]):
        return f"{_names(going)} to be taken out"
    return ""


def _members(situation: Situation) -> list[str]:
    return [] if situation.plan is None else [stage.box for stage in situation.plan.stages]


def _names(boxes: list[str]) -> str:
    return ", ".join(boxes)
