"""The plan: who holds which decoder layers. Immutable, standard library only, shared by every process."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

PLAN_SCHEMA = 1


@dataclass(frozen=True)
class StagePlan:
    """One stage: decoder layers [start, end) on a box, plus what else it holds.

    Attributes:
        box: the box's name in the inventory.
        start: first decoder layer, inclusive.
        end: last decoder layer, exclusive; start == end is a spare.
        embedding: holds the token embedding (always the first stage).
        head: holds final norm, LM head and sampling (first stage if tied embeddings, else the last).
    """

    box: str
    start: int
    end: int
    embedding: bool
    head: bool


@dataclass(frozen=True)
class PipelinePlan:
    """The ordered stages of one pipeline; ring order is list order.

    Attributes:
        model: the model's name in the inventory.
        model_digest: SHA-256 of the bundle's model.json, hex.
        layers: number of decoder layers of the model.
        policy: numeric policy, e.g. "exact".
        max_sequences: most sequences in flight at once.
        max_tokens_per_sequence: most tokens (prompt and answer) of one sequence.
        stages: non-empty stages in ring order; contiguous and complete.
    """

    model: str
    model_digest: str
    layers: int
    policy: str
    max_sequences: int
    max_tokens_per_sequence: int
    stages: tuple[StagePlan, ...]

    def stage_of(self, box: str) -> StagePlan | None:
        """The stage of a box, or None if the box is spare in this pipeline."""
        return next((stage for stage in self.stages if stage.box == box), None)


@dataclass(frozen=True)
class Plan:
    """A site's plan. A higher epoch replaces a lower one; nothing else ever changes a plan."""

    epoch: int
    pipelines: dict[str, PipelinePlan]

    def to_json(self) -> str:
        """Canonical JSON (sorted keys), so that equal plans have equal bytes."""
        return json.dumps({"schema": PLAN_SCHEMA, **asdict(self)}, sort_keys=True)
