"""What coordinator.sqlite holds, and the JSON of it; read strictly, as a worn card may hand back other bytes."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import Literal, TypeVar, get_args

from fleet.planning.plan import PipelinePlan
from stage_runtime.link.control import decode_control, encode_control, later
from stage_runtime.link.frames import FrameError

# Epochs are counted from 1; a number beyond this is a lie, and would leave none to give out.
LARGEST_EPOCH = 2**62
# The slowest box takes milliseconds for a step of one layer, and no clock tells less than a nanosecond. The planner
# counts in whole picoseconds, for which what lies beyond is no number.
LONGEST_STEP_SECONDS = 3600.0
SHORTEST_STEP_SECONDS = 1e-9

EpochState = Literal["preparing", "committed", "aborted", "retired"]
T = TypeVar("T")
LIVE_STATES = frozenset({"preparing", "committed"})


@dataclass(frozen=True)
class EpochRecord:
    """One epoch of a pipeline."""

    epoch: int
    plan: PipelinePlan
    state: EpochState
    planned: bool


@dataclass(frozen=True)
class BoxRecord:
    """What outlives the coordinator of a box.

    Attributes:
        incarnation, process_id, address: of its last registration.
        memory_bytes, layer_seconds, head_seconds: measured there; None: not yet.
        deaths, hold_down_seconds: of its hold-down, as seconds that remained when this was written.
        drained: an operator wants nothing on it.
        lease, lease_seconds: that it holds, empty for none; as seconds from when it was given.
    """

    incarnation: int = 0
    process_id: str = ""
    address: str = ""
    memory_bytes: int | None = None
    layer_seconds: float | None = None
    head_seconds: float | None = None
    deaths: int = 0
    hold_down_seconds: float = 0.0
    drained: bool = False
    lease: str = later("")
    lease_seconds: float = later(0.0)


@dataclass(frozen=True)
class Event:
    """One line of history, as the API gives it; `id` is 0 until it is stored."""

    kind: str
    text: str
    pipeline: str = ""
    box: str = ""
    milliseconds: dict[str, int] = field(default_factory=dict)
    id: int = 0
    unix_seconds: float = 0.0


@dataclass(frozen=True)
class Kept:
    """Everything that a start reads.

    Attributes:
        reserved: pipeline → highest epoch that may have been given out. epochs: pipeline → records, oldest first.
    """

    reserved: dict[str, int]
    epochs: dict[str, list[EpochRecord]]
    boxes: dict[str, BoxRecord]


def is_epoch(number: object) -> bool:
    """Whether it can be the number of an epoch."""
    return type(number) is int and 0 < number <= LARGEST_EPOCH


def is_step(seconds: float | None) -> bool:
    """Whether so many seconds can be those of a step, or say that it has not been measured."""
    return not seconds or SHORTEST_STEP_SECONDS <= seconds <= LONGEST_STEP_SECONDS


def plan_to_json(plan: PipelinePlan) -> str:
    """Canonical JSON of a pipeline's plan."""
    return json.dumps(asdict(plan), sort_keys=True)


def plan_from_json(text: str) -> PipelinePlan:
    """What `plan_to_json` wrote.

    Raises:
        ValueError: it is none, or one whose stages are not contiguous and complete.
    """
    plan = _decoded(PipelinePlan, text)
    end = 0
    for stage in plan.stages:
        if not end == stage.start < stage.end:
            raise ValueError(f"{stage.box} begins at layer {stage.start}, expected {end}")
        end = stage.end
    if end != plan.layers or len({stage.box for stage in plan.stages}) != len(plan.stages):
        raise ValueError(f"its stages end at layer {end} of {plan.layers}, or a box comes twice")
    return plan


def epoch_of(epoch: object, plan: object, state: object, planned: object) -> EpochRecord:
    """The epoch of a row.

    Raises:
        ValueError: it is not as it was written.
    """
    if not (is_epoch(epoch) and isinstance(plan, str) and state in get_args(EpochState)):
        raise ValueError(f"epoch {epoch!r} in state {state!r}")
    return EpochRecord(epoch, plan_from_json(plan), state, bool(planned))  # type: ignore[arg-type]


def box_to_json(record: BoxRecord) -> str:
    """A box's record as JSON."""
    return encode_control(record).decode()


def box_from_json(text: str) -> BoxRecord:
    """What `box_to_json` wrote.

    Raises:
        ValueError: it is none, or its numbers can't be true.
    """
    record = _decoded(BoxRecord, text)
    steps = is_step(record.layer_seconds) and is_step(record.head_seconds)
    if not (steps and record.hold_down_seconds >= 0 and record.lease_seconds >= 0):
        raise ValueError("its seconds can't be true")
    return record


def _decoded(kind: type[T], text: str) -> T:
    try:
        return decode_control(kind, text.encode())
    except FrameError as error:
        raise ValueError(str(error)) from None
