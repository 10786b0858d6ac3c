"""What gateways and people are told of a pipeline and its boxes. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Literal

from fleet.coordinator.state import BoxState, members
from fleet.coordinator.switching import Switching
from fleet.coordinator.text import line
from fleet.planning.cost import MIB
from fleet.planning.spec import PipelineSpec, Refusal
from stage_runtime.link.membership import Route

# What a client is told that is refused because no plan fits: a box that reboots is back in about so long.
RETRY_AFTER_SECONDS = 15.0
# Of each text of a ROUTE, however many boxes are out: a frame that is too long would reach no gateway.
TEXT_CHARACTERS = 2000

StateName = Literal["serving", "replanning", "refused", "none"]


def pipeline_state(
    spec: PipelineSpec, switching: Switching, refusal: Refusal | None, boxes: Mapping[str, BoxState]
) -> tuple[StateName, str]:
    """The state of a pipeline, and why; the reason is empty while it serves."""
    switch = switching.switch
    if switch is not None and not switch.record.planned:
        return "replanning", switch.reason
    if refusal is not None:
        return "refused", refusal.reason
    if switching.serving is None:
        missing = [name for name in spec.boxes if boxes[name].peer is None]
        return "none", f"no plan yet; not registered: {', '.join(missing)}" if missing else "no plan yet"
    if lost := [name for name in members(switching.plan) if boxes[name].condemned]:
        return "replanning", f"{', '.join(lost)} lost"
    if switching.fenced:
        return "replanning", "a box has stopped the ring, e.g. for a switch that was not committed"
    return "serving", ""


def degraded(spec: PipelineSpec, boxes: Mapping[str, BoxState]) -> str:
    """Which boxes are out, for people; empty if none is."""
    out = []
    for box in (boxes[name] for name in spec.boxes):
        if box.condemned or box.out:
            out.append(f"{box.name}: {box.condemned or 'held down after it was lost'}")
        elif box.record.drained:
            out.append(f"{box.name}: drained")
        elif not box.known:
            out.append(f"{box.name}: not seen")
        elif box.verdict.kind == "waiting":
            out.append(f"{box.name}: not heard")
    return "; ".join(out)


def route_of(spec: PipelineSpec, switching: Switching, refusal: Refusal | None, boxes: Mapping[str, BoxState]) -> Route:
    """Where a pipeline's requests go now."""
    state, reason = pipeline_state(spec, switching, refusal, boxes)
    serving = switching.serving
    first = boxes[serving.record.plan.stages[0].box] if serving is not None and state == "serving" else None
    return Route(
        pipeline=spec.name,
        epoch=switching.epoch,
        state=state,
        reason=line(reason, TEXT_CHARACTERS),
        first_stage=first.name if first else "",
        host=first.host if first else "",
        port=first.port if first else 0,
        max_sequences=spec.max_sequences,
        max_tokens_per_sequence=spec.max_tokens_per_sequence,
        retry_after_seconds=RETRY_AFTER_SECONDS,
        missing_mebibytes={name: str(amount) for name, amount in missing_mebibytes(refusal).items()},
        degraded=line(degraded(spec, boxes), TEXT_CHARACTERS) if state == "serving" else "",
        planned=bool(serving and serving.record.planned and switching.draining),
    )


def missing_mebibytes(refusal: Refusal | None) -> dict[str, int]:
    """Box → MiB that it lacks, rounded up; boxes that lack nothing are left out."""
    missing = refusal.missing_bytes if refusal is not None else {}
    return {box: math.ceil(amount / MIB) for box, amount in missing.items() if amount}
