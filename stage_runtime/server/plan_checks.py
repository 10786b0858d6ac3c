"""Is a PREPARE something that this box can take part in? Pure: nothing is loaded, nothing is remembered."""

from __future__ import annotations

from dataclasses import dataclass

from fleet.planning.plan import PipelinePlan, StagePlan
from stage_runtime.link.endpoints import BoxAddress
from stage_runtime.link.membership import Prepare
from stage_runtime.link.section import LARGEST_PORT

# A site's bounds (the inventory's own are lower); whatever a message says, memory and loops stay bounded.
LARGEST_SEQUENCES = 65536
LARGEST_TOKENS = 2**31 - 1


@dataclass(frozen=True)
class Expected:
    """What this box's stage.json and the model's manifest say.

    Attributes:
        layers: decoder layers of the model. tied: the head sits on the first stage.
    """

    box: str
    pipeline: str
    policy: str
    model_digest: str
    layers: int
    tied: bool


@dataclass(frozen=True)
class Neighbours:
    """Who is before and after this box in the ring; itself in a pipeline of one stage."""

    predecessor: str
    successor: BoxAddress


def prepare_problem(prepare: Prepare, expected: Expected) -> str:
    """Why this box can't take part; empty if it can.

    Args:
        prepare: what the coordinator sent.
        expected: what this box knows.
    """
    plan = prepare.plan
    told = (prepare.pipeline, plan.model_digest, plan.policy, plan.layers)
    known = (expected.pipeline, expected.model_digest, expected.policy, expected.layers)
    for name, theirs, ours in zip(("pipeline", "model digest", "policy", "layers"), told, known, strict=True):
        if theirs != ours:
            return f"{name} differs: the plan has {theirs!r}, {expected.box} has {ours!r}"
    if not 1 <= plan.max_sequences <= LARGEST_SEQUENCES or not 1 <= plan.max_tokens_per_sequence <= LARGEST_TOKENS:
        return f"{plan.max_sequences} sequences of {plan.max_tokens_per_sequence} tokens are not a load to plan for"
    if problem := stages_problem(plan, tied=expected.tied):
        return problem
    if plan.stage_of(expected.box) is None:
        return f"the plan has no stage of {expected.box}"
    for stage in plan.stages:
        try:
            ring_address(prepare, stage.box)
        except ValueError as error:
            return str(error)
    return ""


def stages_problem(plan: PipelinePlan, *, tied: bool) -> str:
    """Why the stages are not a division of the model's layers; empty if they are."""
    stages = plan.stages
    bounds = [(stage.start, stage.end) for stage in stages]
    whole = [0, *(end for _, end in bounds)]
    if not stages or [start for start, _ in bounds] != whole[:-1] or whole[-1] != plan.layers:
        return f"layers {bounds} are not a division of 0…{plan.layers}"
    if any(start >= end for start, end in bounds):
        return "a stage without layers is no part of a plan"
    if len({stage.box for stage in stages}) != len(stages):
        return "a box occurs twice in the plan"
    if [stage.embedding for stage in stages] != [index == 0 for index in range(len(stages))]:
        return "the first stage, and no other, must hold the embedding"
    head = 0 if tied else len(stages) - 1
    if [stage.head for stage in stages] != [index == head for index in range(len(stages))]:
        return f"the {'first' if tied else 'last'} stage, and no other, must hold the head"
    return ""


def ring_address(prepare: Prepare, box: str) -> BoxAddress:
    """Where a box's ring listens.

    Raises:
        ValueError: the message has no "host:port" for it.
    """
    host, colon, port = prepare.addresses.get(box, "").rpartition(":")
    if not colon or not host or not port.isascii() or not port.isdigit() or not 0 < int(port[:6]) <= LARGEST_PORT:
        raise ValueError(f"the plan has no ring address of {box}: {prepare.addresses.get(box)!r}")
    return BoxAddress(box, host.removeprefix("[").removesuffix("]"), int(port))


def own_stage(prepare: Prepare, box: str) -> StagePlan:
    """The box's part of a plan without problems."""
    stage = prepare.plan.stage_of(box)
    if stage is None:
        raise ValueError(f"the plan has no stage of {box}")
    return stage


def neighbours(prepare: Prepare, box: str) -> Neighbours:
    """The box's neighbours in the ring of a plan without problems."""
    boxes = [stage.box for stage in prepare.plan.stages]
    index = boxes.index(box)
    return Neighbours(boxes[index - 1], ring_address(prepare, boxes[(index + 1) % len(boxes)]))
