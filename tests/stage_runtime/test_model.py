"""The decoder against `transformers` on the same weights, whatever the chunks, batches and kernels."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig as HfConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from fleet.errors import FleetError
from fleet.planning.plan import StagePlan
from fleet.planning.weights import KernelName
from stage_runtime.checkpoint.manifest import LlamaConfig, read_manifest
from stage_runtime.engine import warm_up
from stage_runtime.model.kv_cache import KvCache
from stage_runtime.model.linear import make_linear, packed_available
from stage_runtime.model.llama import Decoder, Layer, Span, rotary_frequencies
from stage_runtime.model.load import StageWeights
from tests.stage_runtime.engines import load_stage
from tests.stage_runtime.tiny import LAYERS, LLAMA3_ROPE, VOCABULARY, TinyModel, make_model

IDS = [(i * 37 + 11) % VOCABULARY for i in range(50)]
KERNELS: list[KernelName] = ["dense", "packed"]


def load(model: TinyModel, kernel: KernelName) -> tuple[LlamaConfig, StageWeights]:
    stage = StagePlan("box", 0, LAYERS, embedding=True, head=True)
    store = load_stage(model.directory, model.digest, stage, kernel)
    return store.config, store.weights(stage)


def logits(config: LlamaConfig, weights: StageWeights, chunks: list[int]) -> torch.Tensor:
    """All logits of IDS, fed in chunks of these sizes."""
    assert weights.embedding is not None
    assert weights.head is not None
    decoder = Decoder(config, weights.layers)
    cache = KvCache(config, len(weights.layers), 16)
    start, outputs = 0, []
    with torch.inference_mode():
        for rows in chunks:
            hidden = decoder(weights.embedding.read(IDS[start : start + rows]), [Span(cache, rows)])
            outputs.append(weights.head.logits(hidden))
            start += rows
    return torch.cat(outputs)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("chunks", [[50], [1] * 50, [7, 1, 30, 12]], ids=["whole", "steps", "mixed"])
def test_logits_equal_transformers(
    kernel: KernelName, tied: bool, chunks: list[int], request: pytest.FixtureRequest
) -> None:
    model: TinyModel = request.getfixturevalue("tied_model" if tied else "untied_model")
    expected = model.logits(IDS)
    found = logits(*load(model, kernel), chunks)
    assert (found - expected).abs().max() < 2e-4 * expected.abs().max()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_other_stored_types_and_llama3_rope(dtype: torch.dtype, tmp_path: Path) -> None:
    model = make_model(tmp_path / "model", tied=False, dtype=dtype, rope_scaling=LLAMA3_ROPE)
    expected = model.logits(IDS)
    found = logits(*load(model, "dense"), [50])
    assert (found - expected).abs().max() < 2e-4 * expected.abs().max()


@pytest.mark.parametrize("scaling", [None, LLAMA3_ROPE, {**LLAMA3_ROPE, "original_max_position_embeddings": 8192}])
def test_rotary_frequencies_equal_transformers(scaling: dict[str, float] | None) -> None:
    parameters = {"rope_theta": 500000.0, **(scaling or {"rope_type": "default"})}
    hf = HfConfig(hidden_size=256, num_attention_heads=2, head_dim=128, rope_parameters=parameters)
    config = LlamaConfig(256, 1, 1, 2, 2, 128, 10, 1e-5, 500000.0, scaling, 131072, True)
    assert torch.allclose(rotary_frequencies(config), LlamaRotaryEmbedding(hf).inv_freq, rtol=1e-6, atol=0)


def test_an_unknown_rope_is_refused() -> None:
    config = LlamaConfig(64, 1, 1, 2, 2, 32, 10, 1e-5, 1e4, {"rope_type": "yarn"}, 512, True)
    with pytest.raises(ValueError, match="yarn"):
        rotary_frequencies(config)


def test_a_mixed_micro_batch_equals_each_sequence_alone(tied_model: TinyModel) -> None:
    config, weights = load(tied_model, "packed")
    decoder = Decoder(config, weights.layers)
    assert weights.embedding is not None
    histories, steps = [[3, 4, 5], [9] * 20, []], [[7], [8], [1, 2, 3, 4, 5]]

    def caches() -> list[KvCache]:
        made = [KvCache(config, LAYERS, 16) for _ in histories]
        for cache, history in zip(made, histories, strict=True):
            if history:
                decoder(weights.embedding.read(history), [Span(cache, len(history))])
        return made

    with torch.inference_mode():
        alone = torch.cat(
            [
                decoder(weights.embedding.read(step), [Span(cache, len(step))])
                for cache, step in zip(caches(), steps, strict=True)
            ]
        )
        spans = [Span(cache, len(step)) for cache, step in zip(caches(), steps, strict=True)]
        together = decoder(weights.embedding.read([token for step in steps for token in step]), spans)
    assert warm_up.relative_difference(alone, together) < 1e-5


def test_a_cache_grows_in_blocks_and_keeps_what_it_holds(tied_model: TinyModel) -> None:
    config = read_manifest(tied_model.directory, tied_model.digest).config
    cache = KvCache(config, 2, 16)
    assert cache.size_bytes == 0
    block_bytes = 2 * 2 * config.num_key_value_heads * 16 * config.head_dim * 4
    keys = torch.randn(40, config.num_key_value_heads, config.head_dim)
    for start, end, blocks in ((0, 1, 1), (1, 16, 1), (16, 17, 2), (17, 40, 3)):
        cache.reserve(end - start)
        for layer in (0, 1):
            held, values = cache.append(layer, keys[start:end] + layer, keys[start:end] * 2)
            assert torch.equal(held, keys[:end].transpose(0, 1) + layer)
            assert torch.equal(values, keys[:end].transpose(0, 1) * 2)
        cache.advance(end - start)
        assert (cache.length, cache.size_bytes) == (end, blocks * block_bytes)


@pytest.mark.parametrize("kernel", KERNELS)
def test_linears_of_all_shapes_agree_with_plain_torch(kernel: KernelName, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stage_runtime.model.linear.PACK_BLOCK_ROWS", 64)
    for out, columns in ((1, 8), (64, 576), (65, 16), (200, 520)):
        weight, bias = torch.randn(out, columns).half(), torch.randn(out)
        x = torch.randn(5, columns)
        found = make_linear(kernel, weight, bias)(x)
        assert torch.allclose(found, x @ weight.float().T + bias, atol=1e-3, rtol=1e-4)


def test_auto_takes_packed_only_where_it_is_exact(tied_model: TinyModel, tmp_path: Path) -> None:
    assert packed_available(), "this test expects x86-64 with FBGEMM"
    manifest = read_manifest(tied_model.directory, tied_model.digest)
    choice = warm_up.choose_kernel("auto", tied_model.directory, manifest, 3)
    assert choice.kernel == "packed"
    assert choice.largest_relative_difference < 1e-5
    brain = make_model(tmp_path / "bf16", tied=True, dtype=torch.bfloat16)
    manifest = read_manifest(brain.directory, brain.digest)
    assert warm_up.choose_kernel("auto", brain.directory, manifest, 0).kernel == "dense"
    with pytest.raises(FleetError, match=r"packed.*bfloat16"):
        warm_up.choose_kernel("packed", brain.directory, manifest, 0)


def test_a_kernel_that_disagrees_is_not_taken(tied_model: TinyModel, monkeypatch: pytest.MonkeyPatch) -> None:
    manifest = read_manifest(tied_model.directory, tied_model.digest)
    monkeypatch.setattr(warm_up, "LARGEST_RELATIVE_DIFFERENCE", 1e-12)
    assert warm_up.choose_kernel("auto", tied_model.directory, manifest, 0).kernel == "dense"
    with pytest.raises(FleetError, match="relative difference"):
        warm_up.choose_kernel("packed", tied_model.directory, manifest, 0)


def test_a_spare_tries_its_kernels_on_a_layer_of_the_models_shape(tied_model: TinyModel) -> None:
    manifest = read_manifest(tied_model.directory, tied_model.digest)
    layer: Layer = warm_up.synthetic_layer(manifest.config, "dense")
    assert layer.weight_bytes > 0
    assert warm_up.choose_kernel("auto", tied_model.directory, manifest, None).largest_relative_difference < 1e-4
