"""A forecast in words and rows. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fleet.planning.cost import MIB
from fleet.planning.forecast import PipelineForecast, StageForecast
from fleet.planning.plan import PipelinePlan
from fleet.planning.spec import Refusal
from fleet.planning.what_if import Loss, Outlook

COLUMNS = ("box", "layers", "holds", "step ms", "needs MiB", "may use MiB", "head-room MiB")


def stage_row(plan: PipelinePlan, stage: StageForecast) -> tuple[str, ...]:
    """One table row of a stage; a spare box shows no figures."""
    start, end = stage.span
    if start == end:
        return (stage.box, "spare", "", "", "", _mebibytes(stage.usable_bytes), "")
    placed = plan.stage_of(stage.box)
    extras = [] if placed is None else [word for word in ("embedding", "head") if getattr(placed, word)]
    headroom = None if stage.usable_bytes is None else stage.usable_bytes - stage.cost.needed_bytes
    return (
        stage.box,
        f"{start}-{end - 1} ({end - start})",
        ", ".join(extras),
        f"{stage.cost.seconds * 1e3:.2f}",
        _mebibytes(stage.cost.needed_bytes),
        _mebibytes(stage.usable_bytes),
        _mebibytes(headroom),
    )


def summary(name: str, plan: PipelinePlan, predicted: PipelineForecast) -> str:
    """What the figures mean, and what they rest on."""
    return (
        f"pipeline {name}: {plan.layers} layers of {plan.model}, policy {plan.policy}. "
        f"Predicted: {predicted.tokens_per_second_single:.0f} tokens/s for one request, "
        f"{predicted.tokens_per_second_full:.0f} for {plan.max_sequences} at once; "
        f"{predicted.bottleneck} is the bottleneck. "
        "From nominal memory bandwidth per thread, not measured; memory that the inventory does not give is not judged."
    )


def survival(name: str, unsurvivable: Sequence[str]) -> str:
    """Which single loss the site can't survive."""
    if not unsurvivable:
        return f"pipeline {name}: it survives the loss of any single box."
    which = unsurvivable[0] if len(unsurvivable) == 1 else f"any one of {', '.join(unsurvivable)}"
    return f"pipeline {name}: it does not survive the loss of {which}."


def loss_summary(name: str, plan: PipelinePlan, before: PipelineForecast, loss: Loss) -> str:
    """Tokens per second before and after, and what moves."""
    after = loss.forecast
    return (
        f"pipeline {name} without {', '.join(loss.boxes)}: {loss.moved_layers} of {plan.layers} layers move. "
        f"Predicted tokens/s: {before.tokens_per_second_single:.0f} before, {after.tokens_per_second_single:.0f} after "
        f"for one request; {before.tokens_per_second_full:.0f} before, {after.tokens_per_second_full:.0f} after "
        f"for {plan.max_sequences} at once; {after.bottleneck} is the bottleneck."
    )


def outlook_as_data(outlook: Outlook) -> dict[str, Any]:
    """An outlook for scripts: the plan's figures, and under `without` those after the loss that was asked about."""
    return {
        **as_data(outlook.plan, outlook.forecast),
        "unsurvivable": list(outlook.unsurvivable),
        "without": None if outlook.loss is None else _loss_as_data(outlook.loss),
    }


def _loss_as_data(loss: Loss | Refusal) -> dict[str, Any]:
    """A loss for scripts; `refused` is None where the pipeline serves on."""
    if isinstance(loss, Refusal):
        return {"refused": loss.reason, "missing_bytes": dict(loss.missing_bytes)}
    figures = as_data(loss.after, loss.forecast)
    return {"refused": None, "lost": list(loss.boxes), "moved_layers": loss.moved_layers, **figures}


def as_data(plan: PipelinePlan, predicted: PipelineForecast) -> dict[str, Any]:
    """The same for scripts."""
    return {
        "model": plan.model,
        "model_digest": plan.model_digest,
        "policy": plan.policy,
        "tokens_per_second_single": predicted.tokens_per_second_single,
        "tokens_per_second_full": predicted.tokens_per_second_full,
        "bottleneck": predicted.bottleneck,
        "stages": [
            {
                "box": stage.box,
                "layers": list(stage.span),
                "step_seconds": stage.cost.seconds,
                "needed_bytes": stage.cost.needed_bytes,
                "usable_bytes": stage.usable_bytes,
            }
            for stage in predicted.stages
        ],
    }


def _mebibytes(size_bytes: int | None) -> str:
    return "unknown" if size_bytes is None else f"{size_bytes / MIB:.0f}"
