"""From a site's inventory and its models to the plan, and why it looks so. Pure: models are read by the caller."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping

from fleet.bundle.model_info import ModelInfo
from fleet.errors import FleetError
from fleet.inventory.model import Box, Pipeline, Site
from fleet.planning.cost import MIB, NOMINAL_BYTES_PER_SECOND_PER_THREAD, BoxCost, ModelCost
from fleet.planning.forecast import PipelineForecast, forecast_ranges
from fleet.planning.plan import Plan
from fleet.planning.spec import PipelineSpec, Refusal
from fleet.planning.split import Range, split
from fleet.planning.weights import FP32_BYTES, KernelName, head_weights, layer_weights
from fleet.planning.whole import mebibytes, table_of, whole_plan

FIRST_EPOCH = 1
# FP16 weights stay FP16, packed, where torch has the kernel; elsewhere, and for other stored types, FP32 is held.
PACKED_ARCHITECTURE = "x86_64"
PACKED_DTYPE = "F16"
# Cores of a box that neither its profile nor its own entry gives: a Raspberry Pi 5 has four.
CORES_WHEN_UNKNOWN = 4
MAKE_ROOM = "add a box, free memory, or lower max_sequences"


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


def box_costs(site: Site, name: str) -> dict[str, BoxCost]:
    """Nominal costs of a pipeline's boxes, by name in ring order."""
    return {box: box_cost(site, box) for box in site.pipelines[name].boxes}


def spec_of(site: Site, name: str, info: ModelInfo) -> PipelineSpec:
    """A pipeline as planner and coordinator see it.

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
    return PipelineSpec(
        name=name,
        model=pipeline.model,
        model_digest=info.digest,
        policy=pipeline.policy,
        max_sequences=pipeline.max_sequences,
        max_tokens_per_sequence=pipeline.max_tokens_per_sequence,
        boxes=tuple(pipeline.boxes),
        explicit=_explicit(name, pipeline, info.config.num_hidden_layers),
        cost=model_cost(info, kernel_of(site, pipeline, info)),
    )


def _explicit(name: str, pipeline: Pipeline, layers: int) -> dict[str, Range] | None:
    """The inventory's own ranges, which the loader has found contiguous from layer 0."""
    if pipeline.layers == "auto":
        return None
    spans = {}
    for box in pipeline.boxes:
        first, last = pipeline.layers[box].split("-")
        spans[box] = (int(first), int(last) + 1)
    end = spans[pipeline.boxes[-1]][1]
    if end != layers:
        raise FleetError(
            f"pipeline {name}: its layer ranges end at {end - 1}, model {pipeline.model} has layers 0-{layers - 1}",
            hint=f"correct pipelines.{name}.layers, or write `layers: auto`",
        )
    return spans


def forecast(site: Site, name: str, info: ModelInfo) -> PipelineForecast:
    """Split a pipeline (or take the inventory's own ranges) and predict what it does, whether it fits or not.

    Raises:
        FleetError: see `spec_of`.
    """
    spec, boxes = spec_of(site, name, info), box_costs(site, name)
    living = [boxes[box] for box in spec.boxes]
    ranges = split(table_of(spec), living) if spec.explicit is None else [spec.explicit[box] for box in spec.boxes]
    return forecast_ranges(spec, living, ranges)


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
        spec, boxes = spec_of(site, name, models[pipeline.model]), box_costs(site, name)
        planned = whole_plan(spec, boxes, spec.boxes)
        if isinstance(planned, Refusal):
            raise FleetError(does_not_fit(name, planned.missing_bytes), hint=MAKE_ROOM)
        pipelines[name] = planned
    return Plan(epoch=FIRST_EPOCH, pipelines=pipelines)


def does_not_fit(pipeline: str, missing_bytes: Mapping[str, int]) -> str:
    """One line that names what each box lacks."""
    parts = [f"{box} lacks {mebibytes(size)} MiB" for box, size in missing_bytes.items()]
    return f"pipeline {pipeline} does not fit: {', '.join(parts)} (the best split; 25 % of memory stays in reserve)"
