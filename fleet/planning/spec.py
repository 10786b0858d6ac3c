"""What a pipeline is to the planner and the coordinator, apart from the inventory: standard library only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from fleet.planning.cost import ModelCost
from fleet.planning.split import Range


@dataclass(frozen=True)
class PipelineSpec:
    """What stays the same whatever box dies.

    Attributes:
        name: of the pipeline. model: its name in the inventory. model_digest: hex.
        policy: numeric policy.
        max_sequences: in flight at once. max_tokens_per_sequence: prompt and answer.
        boxes: names in ring order, spares too.
        explicit: box → range, where the inventory says who holds what while all boxes live; None: the planner decides.
        cost: the model's.
    """

    name: str
    model: str
    model_digest: str
    policy: str
    max_sequences: int
    max_tokens_per_sequence: int
    boxes: tuple[str, ...]
    explicit: Mapping[str, Range] | None
    cost: ModelCost


@dataclass(frozen=True)
class Holding:
    """Pieces of a model that a box keeps in memory beside those it serves, ready for a takeover."""

    layers: tuple[int, ...] = ()
    head: bool = False
    embedding: bool = False


@dataclass(frozen=True)
class Refusal:
    """No plan fits.

    Attributes:
        missing_bytes: box → what it lacks under the plan that lacks least; empty when no box lives.
        reason: one line for people.
    """

    missing_bytes: Mapping[str, int]
    reason: str
