"""What a pipeline is to the planner and the coordinator, apart from the inventory: standard library only."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from fleet.planning.cost import BoxCost, ModelCost
from fleet.planning.split import Range
from fleet.planning.weights import WeightBytes

LARGEST_INTEGER = 2**53
"""Of JSON numbers that every reader keeps exact; no size of ours comes near it."""


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


def spec_to_json(spec: PipelineSpec) -> dict[str, Any]:
    """A pipeline's object in `coordinator.json`, which its name is the key of."""
    data = asdict(spec)
    del data["name"]
    data["boxes"] = list(spec.boxes)
    data["explicit"] = spec.explicit and {box: list(span) for box, span in spec.explicit.items()}
    data["cost"]["layers"] = list(data["cost"]["layers"])
    return data


def spec_from_json(name: str, data: Any) -> PipelineSpec:
    """Parse what `spec_to_json` wrote (already decoded), strictly.

    Raises:
        ValueError: names the key, and what was read and expected.
    """
    where = f"pipelines.{name}"
    keys = {"model", "model_digest", "policy", "max_sequences", "max_tokens_per_sequence", "boxes", "explicit", "cost"}
    _exactly(data, keys, where)
    boxes = data["boxes"]
    if not isinstance(boxes, list) or not boxes or not all(isinstance(box, str) and box for box in boxes):
        raise ValueError(f"{where}.boxes: read {_shown(boxes)}, expected names in ring order")
    if len(set(boxes)) != len(boxes):
        raise ValueError(f"{where}.boxes: a name comes twice in {_shown(boxes)}")
    cost = _cost(data["cost"], f"{where}.cost")
    return PipelineSpec(
        name=name,
        model=_text(data, "model", where),
        model_digest=_text(data, "model_digest", where),
        policy=_text(data, "policy", where),
        max_sequences=_integer(data, "max_sequences", where, low=1),
        max_tokens_per_sequence=_integer(data, "max_tokens_per_sequence", where, low=1),
        boxes=tuple(boxes),
        explicit=_explicit(data["explicit"], boxes, len(cost.layers), f"{where}.explicit"),
        cost=cost,
    )


BOX_COST_KEYS = ("bytes_per_second", "memory_bytes", "keep_free_bytes", "link_bytes_per_second")


def box_to_json(box: BoxCost) -> dict[str, Any]:
    """The planner's share of a box's object in `coordinator.json`: the nominal figures."""
    return {key: getattr(box, key) for key in BOX_COST_KEYS}


def box_from_json(name: str, data: Any) -> BoxCost:
    """Parse the planner's share of a box's object; other keys are the caller's.

    Raises:
        ValueError: names the key, and what was read and expected.
    """
    where = f"boxes.{name}"
    if not isinstance(data, dict) or not data.keys() >= set(BOX_COST_KEYS):
        raise ValueError(f"{where}: read {_shown(data)}, expected a mapping with {', '.join(BOX_COST_KEYS)}")
    return BoxCost(
        name=name,
        bytes_per_second=_rate(data, "bytes_per_second", where),
        memory_bytes=None if data["memory_bytes"] is None else _integer(data, "memory_bytes", where, low=1),
        keep_free_bytes=_integer(data, "keep_free_bytes", where),
        link_bytes_per_second=_rate(data, "link_bytes_per_second", where),
    )


def _cost(data: Any, where: str) -> ModelCost:
    _exactly(data, {"layers", "head", "tied", "trial_bytes", "kv_bytes_per_token", "hidden_size"}, where)
    if not isinstance(data["layers"], list) or not data["layers"]:
        raise ValueError(f"{where}.layers: read {_shown(data['layers'])}, expected an array with an object a layer")
    if not isinstance(data["tied"], bool):
        raise ValueError(f"{where}.tied: read {_shown(data['tied'])}, expected true or false")
    return ModelCost(
        layers=tuple(_weights(layer, f"{where}.layers[{index}]") for index, layer in enumerate(data["layers"])),
        head=_weights(data["head"], f"{where}.head"),
        tied=data["tied"],
        trial_bytes=_integer(data, "trial_bytes", where),
        kv_bytes_per_token=_integer(data, "kv_bytes_per_token", where),
        hidden_size=_integer(data, "hidden_size", where, low=1),
    )


def _weights(data: Any, where: str) -> WeightBytes:
    _exactly(data, {"held", "read", "converting"}, where)
    return WeightBytes(**{key: _integer(data, key, where) for key in ("held", "read", "converting")})


def _explicit(data: Any, boxes: list[str], layers: int, where: str) -> dict[str, Range] | None:
    """Ranges in ring order, contiguous and complete, for every box."""
    if data is None:
        return None
    _exactly(data, set(boxes), where)
    ranges, end = {}, 0
    for box in boxes:
        span = data[box]
        if not isinstance(span, list) or [type(edge) for edge in span] != [int, int] or not end == span[0] <= span[1]:
            raise ValueError(f"{where}.{box}: read {_shown(span)}, expected [{end}, end]")
        ranges[box] = (span[0], span[1])
        end = span[1]
    if end != layers:
        raise ValueError(f"{where}: ranges end at {end}, the model has {layers} layers")
    return ranges


def _exactly(data: Any, keys: set[str], where: str) -> None:
    if not isinstance(data, dict):
        raise ValueError(f"{where}: read {_shown(data)}, expected a mapping")
    if data.keys() != keys:
        raise ValueError(f"{where}: unknown or missing keys {_shown(sorted(keys ^ data.keys()))}")


def _text(data: dict[str, Any], key: str, where: str) -> str:
    value = data[key]
    if not isinstance(value, str) or not value:
        raise ValueError(f"{where}.{key}: read {_shown(value)}, expected a string")
    return value


def _integer(data: dict[str, Any], key: str, where: str, low: int = 0) -> int:
    value = data[key]
    if type(value) is not int or not low <= value <= LARGEST_INTEGER:
        raise ValueError(f"{where}.{key}: read {_shown(value)}, expected an integer from {low}")
    return value


def _rate(data: dict[str, Any], key: str, where: str) -> float:
    value = data[key]
    if type(value) not in (int, float) or not (value > 0 and math.isfinite(value)):
        raise ValueError(f"{where}.{key}: read {_shown(value)}, expected bytes per second, more than 0")
    return float(value)


def _shown(value: Any) -> str:
    return repr(value)[:120]
