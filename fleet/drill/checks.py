"""Whether a drill may begin, whether its box is back, and what the events say about it; pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fleet.drill.breaking import Kind
from fleet.inventory.model import Role, Site
from fleet.observe.coordinator import Event
from fleet.observe.draining import span_of, switching_to
from fleet.observe.health import Answer
from fleet.observe.site_view import WELL_STATES, coordinator_view

CUTS = ("power-cut", "link-cut")
SERVED = "plan-serving"
COMING_STATES = ("returning", "held-down")
"""A box in one of these takes part again by itself."""


@dataclass(frozen=True)
class Refusal:
    """Why there is no drill now, and the next step.

    Attributes:
        passes: it will end by itself; whoever wants the drill may wait for it.
    """

    message: str
    hint: str
    passes: bool = False


def inventory_refusal(site: Site, pipeline: str, box: str, kind: Kind, streams: int) -> Refusal | None:
    """What the inventory alone rules out."""
    spec, most = site.boxes[box], site.pipelines[pipeline].max_sequences
    if streams > most:
        return Refusal(f"pipeline {pipeline} runs {most} answers at once, not {streams}", f"--streams {most}")
    if kind == "leak":
        why = "not possible here: the guard judges the stage's own memory, and nothing outside of it can make it leak"
        return Refusal(why, "fleet guard status --all shows what the guard can tell of its memory")
    if kind == "clock" and site.boxes[box].connection == "local":
        return Refusal(f"{box} is a directory of this machine and has no clock of its own", f"fleet drill heat {box}")
    if kind not in CUTS:
        return None
    if spec.connection == "local":
        why = f"{box} is a directory of this machine and has no link of its own to cut"
        return Refusal(why, f"fleet drill kill {box}, or fleet drill hang {box}")
    others = [role.value for role in spec.roles if role in (Role.COORDINATOR, Role.GATEWAY)]
    if others:
        return Refusal(
            f"{box} is {' and '.join(others)} too: a cut would part the users from the site, which no plan heals",
            f"fleet drill kill {box}",
        )
    return None


def site_refusal(document: Mapping[str, Any], box: str, status: str) -> Refusal | None:
    """What the coordinator's `/v1/site` rules out: a drill begins on a whole site that can do without the box.

    Args:
        status: the command that shows more.
    """
    view = coordinator_view(Answer(dict(document)))
    member = next((row for row in view.members if row.box == box), None)
    if member is None:
        return Refusal(f"the coordinator knows no box {box}", "fleet provision, after a change of the inventory")
    plan = next((row for row in view.plans if row.pipeline == member.pipeline), None)
    if plan is None or plan.state != "serving":
        state = "has no plan" if plan is None else f"is {plan.state} ({plan.note})"
        passes = plan is not None and plan.state == "replanning"
        return Refusal(f"pipeline {member.pipeline} {state}", status, passes)
    out = [row for row in view.members if row.pipeline == member.pipeline and row.state not in WELL_STATES]
    if out:
        rows = ", ".join(f"{row.box} is {row.state}" for row in out)
        coming = all(row.state in COMING_STATES for row in out)
        message = f"{rows}: a drill begins on a whole site"
        return Refusal(message, f"{status}; then fleet undrain, or wait", passes=coming)
    epoch = switching_to(document, plan.pipeline)
    if epoch is not None:
        message = f"pipeline {plan.pipeline} switches to epoch {epoch}"
        return Refusal(message, f"wait for its end: {status}", passes=True)
    if box in plan.cannot_lose:
        return Refusal(
            f"no plan fits without {box}: its loss would stop pipeline {plan.pipeline} until it is back",
            f"fleet plan --without {box} says what is missing",
        )
    if span_of(document, box) is None:
        return Refusal(f"{box} stands by and serves no layers: nobody would notice its loss", status)
    return None


def still_missing(document: Mapping[str, Any], box: str) -> str | None:
    """What is not yet as before the drill; None once the box serves again and the plan is whole.

    A box that is back stands by until the next plan has it: see `standing_by`.
    """
    view = coordinator_view(Answer(dict(document)))
    member = next((row for row in view.members if row.box == box), None)
    if member is None or member.state not in WELL_STATES:
        state = "unknown" if member is None else f"{member.state}{f' ({member.note})' if member.note else ''}"
        return f"{box} is {state}"
    plan = next((row for row in view.plans if row.pipeline == member.pipeline), None)
    if plan is None or plan.state != "serving":
        return f"pipeline {member.pipeline} is {'without plan' if plan is None else plan.state}"
    epoch = switching_to(document, plan.pipeline)
    if epoch is not None:  # without its seconds: every second would be news
        return f"pipeline {plan.pipeline} switches to epoch {epoch}"
    if plan.degraded:
        return f"pipeline {plan.pipeline}: {plan.degraded}"
    return standing_by(box) if member.state == "standby" else None


def standing_by(box: str) -> str:
    """What `still_missing` says of a box that is well and that no plan has yet."""
    return f"{box} stands by"


def switches(events: Sequence[Event], pipeline: str) -> tuple[Event, ...]:
    """The plans that began to serve, with the milliseconds of their phases; the first is the answer to the break."""
    return tuple(event for event in events if event.kind == SERVED and event.pipeline == pipeline)
