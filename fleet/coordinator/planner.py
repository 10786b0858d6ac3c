"""The planner with a memory: what it answered for the same boxes is looked up, new questions are asked in a thread."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field

from fleet.coordinator.decide import How, Planned
from fleet.planning import heal
from fleet.planning.cost import BoxCost
from fleet.planning.plan import PipelinePlan
from fleet.planning.spec import Holding, PipelineSpec

Boxes = frozenset[str]


@dataclass(frozen=True)
class Outlook:
    """What follows from a plan before anything happens.

    Attributes:
        merges: boxes that live → the merge, for every single loss. standby: box → what it keeps ready.
        unsurvivable: boxes whose single loss no plan survives.
    """

    merges: Mapping[Boxes, Planned] = field(default_factory=dict)
    standby: Mapping[str, Holding] = field(default_factory=dict)
    unsurvivable: tuple[str, ...] = ()


class Planner:
    """Plans of one pipeline, from the present costs of its boxes.

    Attributes:
        outlook: of the plan that serves, once it has been worked out.
    """

    def __init__(self, spec: PipelineSpec) -> None:
        self.spec = spec
        self.outlook = Outlook()
        self._costs: dict[str, BoxCost] = {}
        self._answers: dict[tuple[How, Boxes], Planned] = {}
        self._plan: PipelinePlan | None = None

    def use(self, costs: Mapping[str, BoxCost], plan: PipelinePlan | None) -> bool:
        """Take these costs and this plan as the present ones.

        Returns:
            Whether anything differs from what was used before; then all answers are forgotten.
        """
        if costs == self._costs and plan == self._plan:
            return False
        self._costs, self._plan = dict(costs), plan
        self._answers = {}
        return True

    def known(self, how: How, alive: Boxes) -> bool:
        """Whether `answer` can tell without thinking."""
        return (how, alive) in self._answers

    def answer(self, how: How, alive: Boxes) -> Planned:
        """What was worked out for these boxes.

        Raises:
            KeyError: nothing yet; see `think`.
        """
        return self._answers[how, alive]

    async def think(self, how: How, alive: Boxes) -> Planned:
        """Work an answer out, in a thread; it is remembered unless costs or plan change meanwhile."""
        costs, plan, answers = self._costs, self._plan, self._answers
        answer = await asyncio.to_thread(_ask, self.spec, costs, plan, how, alive)
        answers[how, alive] = answer
        return answer

    async def look_ahead(self, alive: Boxes) -> None:
        """Work out the outlook of the present plan; its merges then are known answers."""
        costs, plan, answers = self._costs, self._plan, self._answers
        if plan is None:
            self.outlook = Outlook()
            return
        outlook = await asyncio.to_thread(_look_ahead, self.spec, costs, plan, alive)
        if answers is self._answers:
            self.outlook = outlook
            answers.update({("merge", left): merge for left, merge in outlook.merges.items()})


def _ask(
    spec: PipelineSpec, costs: Mapping[str, BoxCost], plan: PipelinePlan | None, how: How, alive: Boxes
) -> Planned:
    if plan is None or how == "whole":
        return heal.whole_plan(spec, costs, alive)
    if how == "merge":
        return heal.merge(spec, plan, costs, alive)
    return heal.resplit(spec, plan, costs, alive)


def _look_ahead(spec: PipelineSpec, costs: Mapping[str, BoxCost], plan: PipelinePlan, alive: Boxes) -> Outlook:
    losses = [alive - {stage.box} for stage in plan.stages if stage.box in alive]
    return Outlook(
        {left: heal.merge(spec, plan, costs, left) for left in losses},
        heal.standby(spec, plan, costs, alive),
        heal.unsurvivable(spec, plan, costs, alive),
    )
