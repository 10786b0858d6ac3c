"""From a site's inventory and its models to the plan, and why it looks so. Pure: models are read by the caller."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from dataclasses import dataclass

from fleet.bundle.model_info import ModelInfo
from fleet.errors import FleetError
from fleet.inventory.model import Box, Pipeline, Site
from fleet.planning.cost import (
    MIB,
    NOMINAL_BYTES_PER_SECOND_PER_THREAD,
    ROW_FRACTION,
    BoxCost,
    CostTable,
    Load,
    ModelCost,
    StageCost,
)
from fleet.planning.plan import PipelinePlan, Plan, StagePlan
from fleet.planning.split import Range, measure, split
from fleet.planning.weights import FP32_BYTES, KernelName, head_weights, layer_weights

FIRST_EPOCH = 1
# FP16 weights stay FP16, packed, where torch has the kernel; elsewhere, and for other stored types, FP32 is held.
PACKED_ARCHITECTURE = "x86_64"
PACKED_DTYPE = "F16"
# Cores of a box that neither its profile nor its own entry gives: a Raspberry Pi 5 has four.
CORES_WHEN_UNKNOWN = 4


@dataclass(frozen=True)
class StageForecast:
    """What the planner expects of one box: its range, its cost, and the memory it may use (None: not known)."""

    box: str
    span: Range
    cost: StageCost
    usable_bytes: int | None


@dataclass(frozen=True)
class PipelineForecast:
    """What the planner expects of a pipeline, from nominal figures until measured ones replace them.

    Attributes:
        stages: one a box, spares too, in ring order.
        tokens_per_second: of one request alone; of all `max_sequences` together.
        bottleneck: the box whose stage takes longest.
    """

    stages: tuple[StageForecast, ...]
    tokens_per_second_single: float
    tokens_per_second_full: float
    bottleneck: str


def cores_of(site: Site, box: Box) -> int:
    """Cores that a stage of the box may use: declared, else its profile's; local boxes share a machine."""
    if box.threads is not None:
        return box.threads
    profile = site.device_profiles[box.profile]
    if box.connection == "local":
        neighbours = sum(1 for other in site.boxes.values() if other.connection == "local" and "stage" in other.roles)
        return max(1, (profile.cores or os.cpu_count() or 1) // max(1, neighbours))
    return profile.cores or CORES_WHEN_UNKNOWN


def box_cost(site: Site, name: str) -> BoxCost:
    """A box's nominal cost, from the inventory alone."""
    box = site.boxes[name]
    memory = site.device_profiles[box.profile].memory_mib
    return BoxCost(
        name=name,
        bytes_per_second=cores_of(site, box) * NOMINAL_BYTES_PER_SECOND_PER_THREAD,
        memory_bytes=None if memory is None else memory * MIB,
        keep_free_bytes=box.memory_keep_free_mib * MIB,
        link_bytes_per_second=box.link_mbit_per_second * 1e6 / 8,
    )


def model_cost(info: ModelInfo, kernel: KernelName) -> ModelCost:
    """A model's cost with the weights that one of the stage's kernels holds."""
    config = info.config
    layer, dense = layer_weights(config, kernel), layer_weights(config, "dense")
    return ModelCost(
        layers=(layer,) * config.num_hidden_layers,
        head=head_weights(config, kernel),
        tied=config.tie_word_embeddings,
        trial_bytes=dense.held + (0 if kernel == "dense" else layer.held),
        kv_bytes_per_token=2 * config.num_key_value_heads * config.head_dim * FP32_BYTES,
        hidden_size=config.hidden_size,
    )


def kernel_of(site: Site, pipeline: Pipeline, info: ModelInfo) -> KernelName:
    """The kernel that a pipeline is planned with: packed if every box has it, else the larger one for all."""
    architectures = {site.device_profiles[site.boxes[name].profile].architecture for name in pipeline.boxes}
    names = {platform.machine() if name == "auto" else name for name in architectures}
    return "packed" if names == {PACKED_ARCHITECTURE} and info.weight_dtype == PACKED_DTYPE else "dense"


def _table(site: Site, pipeline: Pipeline, info: ModelInfo) -> CostTable:
    load = Load(pipeline.max_sequences, pipeline.max_tokens_per_sequence)
    return CostTable(model_cost(info, kernel_of(site, pipeline, info)), load)


def _explicit(pipeline: Pipeline) -> list[Range] | None:
    if pipeline.layers == "auto":
        return None
    spans = []
    for name in pipeline.boxes:
        first, last = pipeline.layers[name].split("-")
        spans.append((int(first), int(last) + 1))
    return spans


def forecast(site: Site, name: str, info: ModelInfo) -> PipelineForecast:
    """Split a pipeline (or take the inventory's own ranges) and predict what it does.

    With m = min(stages, sequences) micro-batches in flight, each of sequences / m rows, the ring completes one
    micro-batch every max(slowest stage, sum of stages / m).

    Raises:
        FleetError: explicit ranges do not end with the model's last layer, sequences are longer than its context,
            or this version's stages do not know the policy.
    """
    pipeline = site.pipelines[name]
    if pipeline.policy != "exact":
        raise FleetError(
            f"pipeline {name}: policy {pipeline.policy} is not in this version of the stage runtime, which has exact",
            hint=f"write `policy: exact` under pipelines.{name}",
        )
    longest = info.config.max_position_embeddings
    if pipeline.max_tokens_per_sequence > longest:
        raise FleetError(
            f"pipeline {name}: max_tokens_per_sequence {pipeline.max_tokens_per_sequence}, "
            f"model {pipeline.model} knows {longest} positions",
            hint=f"set pipelines.{name}.max_tokens_per_sequence to {longest} or less",
        )
    table = _table(site, pipeline, info)
    boxes = [box_cost(site, box) for box in pipeline.boxes]
    spans = _explicit(pipeline) or split(table, boxes)
    if spans[-1][1] != table.layers:
        raise FleetError(
            f"pipeline {name}: its layer ranges end at {spans[-1][1] - 1}, "
            f"model {pipeline.model} has layers 0-{table.layers - 1}",
            hint=f"correct pipelines.{name}.layers, or write `layers: auto`",
        )
    costs = [table.stage(box, *span) for box, span in zip(boxes, spans, strict=True)]
    _, slowest, total = measure(table, boxes, spans)
    working = sum(1 for start, end in spans if start < end)
    in_flight = min(working, pipeline.max_sequences)
    rows = pipeline.max_sequences / in_flight
    return PipelineForecast(
        stages=tuple(
            StageForecast(box.name, span, cost, None if box.memory_bytes is None else int(box.usable_bytes))
            for box, span, cost in zip(boxes, spans, costs, strict=True)
        ),
        tokens_per_second_single=1 / total,
        tokens_per_second_full=rows / (max(slowest, total / in_flight) * (1 + ROW_FRACTION * (rows - 1))),
        bottleneck=max(zip(costs, boxes, strict=True), key=lambda pair: pair[0].seconds)[1].name,
    )


def plan_site(site: Site, models: Mapping[str, ModelInfo]) -> Plan:
    """The site's first plan.

    Args:
        site: the inventory.
        models: inventory name → model of the bundle.

    Raises:
        FleetError: a pipeline does not fit, with the missing MiB of each box.
    """
    pipelines = {}
    for name, pipeline in site.pipelines.items():
        if pipeline.engine.kind == "external":
            continue
        info = models[pipeline.model]
        predicted = forecast(site, name, info)
        lacking = [stage for stage in predicted.stages if stage.cost.missing_bytes]
        if lacking:
            raise FleetError(does_not_fit(name, lacking), hint="add a box, free memory, or lower max_sequences")
        pipelines[name] = PipelinePlan(
            model=pipeline.model,
            model_digest=info.digest,
            layers=info.config.num_hidden_layers,
            policy=pipeline.policy,
            max_sequences=pipeline.max_sequences,
            max_tokens_per_sequence=pipeline.max_tokens_per_sequence,
            stages=_stages(predicted, info.config.tie_word_embeddings, info.config.num_hidden_layers),
        )
    return Plan(epoch=FIRST_EPOCH, pipelines=pipelines)


def does_not_fit(pipeline: str, lacking: list[StageForecast]) -> str:
    """One line that names what each box lacks."""
    parts = [f"{stage.box} lacks {-(-stage.cost.missing_bytes // MIB)} MiB" for stage in lacking]
    return f"pipeline {pipeline} does not fit: {', '.join(parts)} (the best split; 25 % of memory stays in reserve)"


def _stages(predicted: PipelineForecast, tied: bool, layers: int) -> tuple[StagePlan, ...]:
    return tuple(
        StagePlan(
            box=stage.box,
            start=stage.span[0],
            end=stage.span[1],
            embedding=stage.span[0] == 0,
            head=stage.span[0] == 0 if tied else stage.span[1] == layers,
        )
        for stage in predicted.stages
        if stage.span[0] < stage.span[1]
    )
