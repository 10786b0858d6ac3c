"""The planner's bytes are those that a real stage holds: counted by formula here, reported by a loaded stage there."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from fleet.bundle.model_info import ModelInfo, read_model_json
from fleet.inventory.loader import load_site
from fleet.planning.cost import PROCESS_BASE_BYTES, BoxCost, CostTable, Load
from fleet.planning.plan import StagePlan
from fleet.planning.site import kernel_of, model_cost
from fleet.planning.weights import KernelName, packed_bytes
from stage_runtime.checkpoint.manifest import read_manifest
from stage_runtime.model.kv_cache import KvCache
from tests.models import smollm2_directory
from tests.stage_runtime.engines import load_stage

LOAD = Load(max_sequences=4, max_tokens_per_sequence=256)
BOX = BoxCost("box", bytes_per_second=1e9, memory_bytes=None, keep_free_bytes=0, link_bytes_per_second=1e9)


@pytest.fixture(scope="module")
def info() -> ModelInfo:
    return read_model_json(smollm2_directory())


@pytest.mark.parametrize("kernel", ["packed", "dense"])
@pytest.mark.parametrize("span", [(0, 3), (3, 8)], ids=["with head", "layers only"])
def test_planned_weights_are_those_that_a_stage_holds(
    info: ModelInfo, kernel: KernelName, span: tuple[int, int]
) -> None:
    stage = StagePlan("box", *span, embedding=span[0] == 0, head=span[0] == 0)
    held = load_stage(info.directory, info.digest, stage, kernel).weight_bytes
    cost = model_cost(info, kernel)
    planned = sum(layer.held for layer in cost.layers[span[0] : span[1]]) + (cost.head.held if stage.head else 0)
    assert planned == held


def test_planned_caches_are_those_that_a_stage_holds(info: ModelInfo) -> None:
    cache = KvCache(read_manifest(info.directory, info.digest).config, layers=7, block_tokens=32)
    cache.reserve(256)
    assert cache.size_bytes == 7 * 256 * model_cost(info, "packed").kv_bytes_per_token


@pytest.mark.parametrize("kernel", ["packed", "dense"])
def test_need_covers_serving_loading_and_the_trial_of_kernels(info: ModelInfo, kernel: KernelName) -> None:
    model = model_cost(info, kernel)
    layer = model.layers[0]
    for load in (LOAD, Load(1, 1)):
        table = CostTable(model, load)
        tokens = load.max_sequences * load.max_tokens_per_sequence
        for end in (1, 2, 30):
            beside = table.stage(BOX, 0, end).needed_bytes - PROCESS_BASE_BYTES
            held = end * layer.held + model.head.held
            assert beside == max(
                held + max(end * tokens * model.kv_bytes_per_token, model.head.converting), model.trial_bytes
            )
    assert model.trial_bytes > layer.held or kernel == "dense"


def test_packing_pads_to_whole_blocks_but_reads_no_padding(info: ModelInfo) -> None:
    assert packed_bytes(16, 512) == 2 * 16 * 512
    assert packed_bytes(17, 513) == 2 * 32 * 1024
    head = model_cost(info, "packed").head
    assert head.held / head.read == pytest.approx(1024 / 576, rel=1e-3)


def test_only_fp16_on_x86_64_is_planned_as_packed(info: ModelInfo) -> None:
    site = load_site(Path(__file__).parents[2] / "inventory" / "lab.yaml").site
    assert info.weight_dtype == "F16"

    def kernel(architecture: str, dtype: str | None) -> KernelName:
        profiles = {
            name: profile.model_copy(update={"architecture": architecture})
            for name, profile in site.device_profiles.items()
        }
        changed = site.model_copy(update={"device_profiles": profiles})
        return kernel_of(changed, changed.pipelines["main"], replace(info, weight_dtype=dtype))

    assert kernel("x86_64", "F16") == "packed"
    assert [kernel("aarch64", "F16"), kernel("x86_64", "BF16"), kernel("x86_64", None)] == ["dense"] * 3
