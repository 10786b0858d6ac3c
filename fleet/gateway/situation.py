"""What the gateway knows about a pipeline from the coordinator's last route. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from stage_runtime.link.membership import Route


@dataclass(frozen=True)
class Situation:
    """Where a pipeline's requests go, or why nowhere.

    Attributes:
        state: as in `Route`; "none" before the first route.
        reason: why it is not serving, for people.
        epoch: of the plan that serves, or served last.
        first_stage: box; empty unless serving.
        degraded: serving with less than the whole site; empty otherwise.
        missing_mebibytes: box → MiB that it lacks for a plan.
        retry_after_seconds: what a client of a refused pipeline is told; None where nobody said.
    """

    state: Literal["serving", "replanning", "refused", "none"] = "none"
    reason: str = "no route from the coordinator yet"
    epoch: int = 0
    first_stage: str = ""
    degraded: str = ""
    missing_mebibytes: dict[str, str] = field(default_factory=dict)
    retry_after_seconds: float | None = None


def situation_of(route: Route) -> Situation:
    """The situation that a route describes."""
    return Situation(
        state=route.state,
        reason=_reason(route),
        epoch=route.epoch,
        first_stage=route.first_stage,
        degraded=route.degraded,
        missing_mebibytes=route.missing_mebibytes,
        retry_after_seconds=route.retry_after_seconds if route.state == "refused" else None,
    )


def _reason(route: Route) -> str:
    if route.state == "serving":
        return ""
    if route.state == "refused":
        missing = ", ".join(
            f"{box} lacks {mebibytes} MiB" for box, mebibytes in sorted(route.missing_mebibytes.items())
        )
        return "; ".join(part for part in ("no plan fits", route.reason, missing) if part)
    if route.state == "replanning":
        return f"waits for a new plan: {route.reason}" if route.reason else "waits for a new plan"
    return route.reason or "no plan has been made yet"
