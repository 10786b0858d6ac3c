"""What becomes of a pipeline without some of its boxes, before it happens. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from fleet.planning.cost import BoxCost
from fleet.planning.forecast import PipelineForecast, forecast_plan
from fleet.planning.merge import merge, moved_layers
from fleet.planning.plan import PipelinePlan
from fleet.planning.spec import PipelineSpec, Refusal
from fleet.planning.standby import unsurvivable


@dataclass(frozen=True)
class Loss:
    """A pipeline that has lost boxes and serves on.

    Attributes:
        boxes: that are lost, in ring order.
        after: the merged plan. forecast: of that plan.
        moved_layers: layers that change their holder.
    """

    boxes: tuple[str, ...]
    after: PipelinePlan
    forecast: PipelineForecast
    moved_layers: int


def lose(
    spec: PipelineSpec, plan: PipelinePlan, boxes: Mapping[str, BoxCost], without: Collection[str]
) -> Loss | Refusal:
    """Merge a plan without some boxes; boxes of other pipelines are left aside."""
    alive = [name for name in spec.boxes if name not in without]
    after = merge(spec, plan, boxes, alive)
    if isinstance(after, Refusal):
        return after
    lost = tuple(name for name in spec.boxes if name in without)
    return Loss(lost, after, forecast_plan(spec, after, boxes, alive), moved_layers(plan, after))


@dataclass(frozen=True)
class Outlook:
    """A pipeline's plan and what may become of it.

    Attributes:
        plan: with all boxes. forecast: of that plan.
        unsurvivable: boxes whose single loss no plan survives.
        loss: what was asked about; None if nothing was, or if it is about other pipelines' boxes.
    """

    plan: PipelinePlan
    forecast: PipelineForecast
    unsurvivable: tuple[str, ...]
    loss: Loss | Refusal | None


def look_ahead(
    spec: PipelineSpec, plan: PipelinePlan, boxes: Mapping[str, BoxCost], without: Collection[str]
) -> Outlook:
    """The outlook of a plan that has all its boxes, with the loss of some if any are named."""
    concerned = any(name in without for name in spec.boxes)
    return Outlook(
        plan=plan,
        forecast=forecast_plan(spec, plan, boxes, spec.boxes),
        unsurvivable=unsurvivable(spec, plan, boxes, spec.boxes),
        loss=lose(spec, plan, boxes, without) if concerned else None,
    )
