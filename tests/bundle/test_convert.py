"""The model converter: real SmolLM2, and tiny models whose weights are known."""

from __future__ import annotations

import hashlib
import json
import shutil
import struct
from pathlib import Path

import gguf
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaForCausalLM

from fleet.bundle import convert
from fleet.bundle.convert import convert_model
from fleet.bundle.model_info import read_model_json
from fleet.errors import FleetError
from tests.bundle.tiny import save_gguf, save_huggingface, tiny_model
from tests.models import smollm2_directory, smollm2_gguf

Quantisation = gguf.GGMLQuantizationType


def quiet(_line: str) -> None:
    """Takes progress and drops it."""


def tensors_of(directory: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for path in sorted(directory.glob("*.safetensors")):
        found |= load_file(path)
    return found


def assert_whole(directory: Path) -> None:
    """Every file has the size and digest that model.json says, and nothing else lies there."""
    info = read_model_json(directory)
    assert info.digest[:16] == directory.name
    assert {file.name for file in info.files} | {"model.json"} == {path.name for path in directory.iterdir()}
    for file in info.files:
        data = (directory / file.name).read_bytes()
        assert (hashlib.sha256(data).hexdigest(), len(data)) == (file.sha256, file.size_bytes)


def test_smollm2_has_the_published_shape_and_ends_answers_by_both_tokens() -> None:
    directory = smollm2_directory()
    assert_whole(directory)
    info = read_model_json(directory)
    assert info.config.num_hidden_layers == 30
    assert (info.config.hidden_size, info.config.intermediate_size, info.config.vocab_size) == (576, 1536, 49152)
    assert (info.config.num_attention_heads, info.config.num_key_value_heads, info.config.head_dim) == (9, 3, 64)
    assert (info.config.rms_norm_eps, info.config.rope_theta) == (1e-5, 1e5)
    assert info.config.tie_word_embeddings
    assert (info.bos_token_id, info.eos_token_ids) == (1, (2, 0))
    assert info.source_sha256 == hashlib.sha256(smollm2_gguf().read_bytes()).hexdigest()
    parameters = sum(tensor.numel() for tensor in tensors_of(directory).values())
    assert parameters == 134_515_008
    assert "<|im_start|>" in (directory / "chat_template.jinja").read_text()


def test_smollm2_weights_are_those_that_transformers_reads() -> None:
    """transformers dequantises and un-permutes on its own."""
    source = smollm2_gguf()
    reference = LlamaForCausalLM.from_pretrained(source.parent, gguf_file=source.name, dtype=torch.float32)
    expected = reference.state_dict()
    found = tensors_of(smollm2_directory())
    assert set(expected) - set(found) == {"lm_head.weight"}
    assert all(torch.equal(tensor, expected[name].half()) for name, tensor in found.items())


def test_same_input_gives_the_same_digest(tmp_path: Path) -> None:
    source = save_gguf(tiny_model(tied=True), tmp_path / "tiny.gguf", Quantisation.Q8_0)
    first = convert_model(source, tmp_path / "a", quiet)
    second = convert_model(source, tmp_path / "b", quiet)
    again = convert_model(source, tmp_path / "a", quiet)
    assert first.digest == second.digest == again.digest
    assert (first.reused, second.reused, again.reused) == (False, False, True)
    for path in first.directory.iterdir():
        assert path.read_bytes() == (second.directory / path.name).read_bytes()


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("shard_size", ["10GB", "60KB"])
def test_huggingface_weights_keep_their_bytes(tmp_path: Path, tied: bool, dtype: torch.dtype, shard_size: str) -> None:
    model = tiny_model(tied=tied, dtype=dtype)
    source = save_huggingface(model, tmp_path / "source", shard_size)
    converted = convert_model(source, tmp_path / "models", quiet)
    assert_whole(converted.directory)
    found = tensors_of(converted.directory)
    expected = model.state_dict()
    if tied:
        expected.pop("lm_head.weight")
    assert set(found) == set(expected)
    assert all(found[name].dtype == dtype and torch.equal(found[name], expected[name]) for name in expected)
    info = read_model_json(converted.directory)
    assert (info.bos_token_id, info.eos_token_ids) == (257, (258,))
    assert info.weight_dtype == {torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32"}[dtype]
    (converted.directory / "layer-000.safetensors").write_bytes(b"\xff" * 16)
    assert read_model_json(converted.directory).weight_dtype is None
    assert (converted.directory / "chat_template.jinja").read_text() == "{{ messages[0].content }}"


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(
    ("kind", "largest_error"),
    [(Quantisation.F32, 1e-4), (Quantisation.F16, 1e-4), (Quantisation.Q8_0, 1e-3), (Quantisation.Q5_1, 1e-2)],
)
def test_gguf_is_dequantised_and_unpermuted(
    tmp_path: Path, tied: bool, kind: Quantisation, largest_error: float
) -> None:
    model = tiny_model(tied=tied)
    converted = convert_model(save_gguf(model, tmp_path / "tiny.gguf", kind), tmp_path / "models", quiet)
    assert_whole(converted.directory)
    found, expected = tensors_of(converted.directory), model.state_dict()
    assert ("lm_head.weight" in found) is not tied
    for name, tensor in found.items():
        assert tensor.dtype == torch.float16
        assert (tensor.float() - expected[name]).abs().max() < largest_error


def test_rope_scaling_of_llama3_is_kept(tmp_path: Path) -> None:
    scaling = {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }  # fmt: skip
    model = tiny_model(tied=True, rope_parameters={"rope_theta": 500000.0, **scaling})
    converted = convert_model(save_huggingface(model, tmp_path / "source"), tmp_path / "models", quiet)
    config = read_model_json(converted.directory).config
    assert (config.rope_theta, config.rope_scaling) == (500000.0, scaling)


def test_an_interrupted_conversion_keeps_finished_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(convert, "PROGRESS_SECONDS", 0.0)
    source = save_huggingface(tiny_model(tied=True), tmp_path / "source")
    whole = convert_model(source, tmp_path / "whole", quiet)

    def stop_at_second_layer(line: str) -> None:
        if "layer-001" in line:
            raise KeyboardInterrupt

    models = tmp_path / "models"
    with pytest.raises(KeyboardInterrupt):
        convert_model(source, models, stop_at_second_layer)
    (workspace,) = models.glob(".converting-*")
    damaged = workspace / "layer-000.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"\x00")
    kept = workspace / "embedding.safetensors"
    inode = kept.stat().st_ino
    resumed = convert_model(source, models, quiet)
    assert resumed.digest == whole.digest
    assert_whole(resumed.directory)
    assert (resumed.directory / "embedding.safetensors").stat().st_ino == inode


@pytest.mark.parametrize("damage", ["lost", "one bit"])
def test_a_damaged_finished_conversion_is_made_again(tmp_path: Path, damage: str) -> None:
    source = save_huggingface(tiny_model(tied=True), tmp_path / "source")
    first = convert_model(source, tmp_path / "models", quiet)
    shard = first.directory / "layer-002.safetensors"
    if damage == "lost":
        shard.unlink()
    else:
        data = bytearray(shard.read_bytes())
        data[-1] ^= 1
        shard.write_bytes(data)
    second = convert_model(source, tmp_path / "models", quiet)
    assert not second.reused
    assert second.digest == first.digest
    assert_whole(second.directory)


@pytest.mark.parametrize("kept_bytes", [3, 100, 5_000, 90_000, -1])
def test_a_truncated_gguf_is_refused_by_name(tmp_path: Path, kept_bytes: int) -> None:
    source = save_gguf(tiny_model(tied=True), tmp_path / "tiny.gguf")
    source.write_bytes(source.read_bytes()[:kept_bytes])
    with pytest.raises(FleetError, match=r"tiny\.gguf is not a whole GGUF file"):
        convert_model(source, tmp_path / "models", quiet)


def test_a_truncated_smollm2_is_refused(tmp_path: Path) -> None:
    source = tmp_path / "half.gguf"
    with smollm2_gguf().open("rb") as whole:
        source.write_bytes(whole.read(50_000_000))
    with pytest.raises(FleetError, match=r"half\.gguf is not a whole GGUF file \(50000000 bytes\)"):
        convert_model(source, tmp_path / "models", quiet)


def test_a_truncated_safetensors_is_refused_by_name(tmp_path: Path) -> None:
    source = save_huggingface(tiny_model(tied=True), tmp_path / "source")
    weights = source / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-5])
    with pytest.raises(FleetError, match=r"model\.safetensors is not a whole safetensors file"):
        convert_model(source, tmp_path / "models", quiet)


def test_missing_tensors_are_named(tmp_path: Path) -> None:
    source = save_huggingface(tiny_model(tied=True), tmp_path / "source")
    tensors = load_file(source / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, source / "model.safetensors")
    with pytest.raises(FleetError, match=r"1 of 29 tensors are missing: model\.layers\.1\.mlp\.up_proj\.weight"):
        convert_model(source, tmp_path / "models", quiet)


def test_a_missing_gguf_tensor_is_named(tmp_path: Path) -> None:
    source = save_gguf(tiny_model(tied=True), tmp_path / "tiny.gguf", omit="token_embd.weight")
    with pytest.raises(FleetError, match=r"model\.embed_tokens\.weight"):
        convert_model(source, tmp_path / "models", quiet)


def test_a_wrong_shape_is_named(tmp_path: Path) -> None:
    source = save_huggingface(tiny_model(tied=True), tmp_path / "source")
    tensors = load_file(source / "model.safetensors")
    tensors["model.norm.weight"] = torch.ones(63)
    save_file(tensors, source / "model.safetensors")
    with pytest.raises(FleetError, match=r"model\.norm\.weight has shape \(63,\), its configuration says \(64,\)"):
        convert_model(source, tmp_path / "models", quiet)


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("model_type", "mixtral", "model_type 'mixtral' is not supported; expected llama"),
        ("attention_bias", True, "attention_bias is True"),
        ("hidden_act", "gelu", "hidden_act is 'gelu'"),
        ("quantization_config", {"quant_method": "gptq"}, r"quantised \(gptq\)"),
        ("num_attention_heads", 0, "num_attention_heads is 0"),
        ("num_key_value_heads", 3, "cannot share"),
        ("rope_parameters", {"rope_type": "yarn", "factor": 4.0}, "rotary scaling 'yarn' is not supported"),
    ],
)
def test_unsupported_configurations_say_what_they_are(tmp_path: Path, key: str, value: object, words: str) -> None:
    source = save_huggingface(tiny_model(tied=True), tmp_path / "source")
    path = source / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), key: value}))
    with pytest.raises(FleetError, match=words) as caught:
        convert_model(source, tmp_path / "models", quiet)
    assert "config.json" in caught.value.message


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors"])
def test_missing_files_are_named(tmp_path: Path, name: str) -> None:
    source = save_huggingface(tiny_model(tied=True), tmp_path / "source")
    (source / name).unlink()
    with pytest.raises(FleetError, match=name.replace(".", r"\.")):
        convert_model(source, tmp_path / "models", quiet)


def test_other_architectures_and_pre_tokenisers_are_refused(tmp_path: Path) -> None:
    model = tiny_model(tied=True)
    other = save_gguf(model, tmp_path / "other.gguf", architecture="qwen2")
    with pytest.raises(FleetError, match="architecture 'qwen2' is not supported"):
        convert_model(other, tmp_path / "models", quiet)
    unknown = save_gguf(model, tmp_path / "unknown.gguf", pre="tekken")
    with pytest.raises(FleetError, match=r"tokenizer\.ggml\.pre is 'tekken'"):
        convert_model(unknown, tmp_path / "models", quiet)
    shutil.copy(smollm2_directory() / "tokenizer.json", tmp_path / "tokenizer.json")
    assert convert_model(unknown, tmp_path / "models", quiet).directory.is_dir()


def test_values_outside_fp16_are_refused(tmp_path: Path) -> None:
    model = tiny_model(tied=True)
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight[0, 0] = 1e6
    source = save_gguf(model, tmp_path / "large.gguf")
    with pytest.raises(FleetError, match=r"blk\.1\.ffn_down\.weight holds values outside FP16"):
        convert_model(source, tmp_path / "models", quiet)


def test_nothing_there_says_what_was_looked_for(tmp_path: Path) -> None:
    with pytest.raises(FleetError, match="does not exist"):
        convert_model(tmp_path / "nothing", tmp_path / "models", quiet)


@pytest.mark.parametrize(
    "damage",
    [b"", b"{", b"[]", b'{"schema": 2}', struct.pack("<Q", 7)],
)
def test_a_damaged_model_json_is_refused(tmp_path: Path, damage: bytes) -> None:
    (tmp_path / "model.json").write_bytes(damage)
    with pytest.raises(FleetError, match=r"model\.json"):
        read_model_json(tmp_path)
