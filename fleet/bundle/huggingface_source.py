"""A Hugging Face directory with safetensors as a `SourceModel`: weights keep their dtype and bytes."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fleet.bundle.files import canonical_json
from fleet.bundle.safetensors_file import read_safetensors
from fleet.bundle.source_model import END_OF_GENERATION_TOKENS, SourceModel, SourceTensor, check_config, ordered_eos
from fleet.errors import FleetError

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
LARGEST_JSON_BYTES = 64 << 20
"""tokenizer.json of the largest vocabularies has 20 MB; more is not a configuration."""
ROPE_KEYS = {
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}
"""Rotary scalings that stages compute, and their parameters (transformers' modeling_rope_utils)."""


def read_huggingface(directory: Path, sha256: Callable[[Path], str]) -> SourceModel:
    """Read a directory's configuration and the headers of its weights.

    Args:
        directory: holds config.json, tokenizer.json and model*.safetensors.
        sha256: gives a file's digest.

    Raises:
        FleetError: a file is missing or damaged, or the model is not a plain Llama.
    """
    raw = _json(directory / "config.json")
    config = _config(raw, directory / "config.json")
    check_config(config, str(directory / "config.json"))
    tokenizer_file = directory / "tokenizer.json"
    tokenizer_json = _bytes(tokenizer_file)
    tokenizer_config = _json(directory / "tokenizer_config.json", optional=True)
    generation = _json(directory / "generation_config.json", optional=True)
    control_ids = _control_ids(tokenizer_json, tokenizer_file)
    tensors, used = _weights(directory)
    if config["tie_word_embeddings"]:
        tensors.pop("lm_head.weight", None)  # a copy of the embedding that some writers store as well
    optional = ("chat_template.jinja", "tokenizer_config.json", "generation_config.json")
    used += [directory / "config.json", tokenizer_file]
    used += [directory / name for name in optional if (directory / name).exists()]
    digests = {path.relative_to(directory).as_posix(): sha256(path) for path in used}
    return SourceModel(
        name=directory.name,
        sha256=hashlib.sha256(canonical_json(digests)).hexdigest(),
        config=config,
        bos_token_id=_bos_token_id(raw, tokenizer_config, control_ids),
        eos_token_ids=_eos_token_ids(raw, generation, tokenizer_config, control_ids),
        tokenizer_json=tokenizer_json,
        chat_template=_chat_template(directory, tokenizer_config),
        tensors=tensors,
    )


def _bytes(path: Path) -> bytes:
    if not path.is_file():
        raise FleetError(
            f"{path} does not exist", hint="a model directory holds config.json, tokenizer.json and model.safetensors"
        )
    if path.stat().st_size > LARGEST_JSON_BYTES:
        raise FleetError(f"{path} has {path.stat().st_size} bytes, expected a JSON file of a few MB")
    return path.read_bytes()


def _json(path: Path, *, optional: bool = False) -> dict[str, Any]:
    if optional and not path.exists():
        return {}
    try:
        data = json.loads(_bytes(path))
    except ValueError as error:
        raise FleetError(f"{path} is not valid JSON: {error}", hint="copy the model again") from error
    if not isinstance(data, dict):
        raise FleetError(f"{path} holds a {type(data).__name__}, expected a JSON object")
    return data


def _config(raw: dict[str, Any], path: Path) -> dict[str, Any]:
    if raw.get("model_type") != "llama":
        raise FleetError(f"{path}: model_type {raw.get('model_type')!r} is not supported; expected llama")
    for key, supported in {"attention_bias": False, "mlp_bias": False, "hidden_act": "silu"}.items():
        if raw.get(key, supported) != supported:
            raise FleetError(f"{path}: {key} is {raw[key]!r}; only {supported!r} is supported")
    if raw.get("quantization_config"):
        raise FleetError(
            f"{path}: the weights are quantised ({raw['quantization_config'].get('quant_method', 'unknown')})",
            hint="use the model in BF16, FP16 or FP32, or a GGUF file",
        )
    try:
        heads = raw["num_attention_heads"]
        theta, scaling = _rope(raw, path)
        return {
            "hidden_size": raw["hidden_size"],
            "intermediate_size": raw["intermediate_size"],
            "num_hidden_layers": raw["num_hidden_layers"],
            "num_attention_heads": heads,
            "num_key_value_heads": raw.get("num_key_value_heads") or heads,
            "head_dim": raw.get("head_dim") or raw["hidden_size"] // heads,
            "vocab_size": raw["vocab_size"],
            "rms_norm_eps": float(raw["rms_norm_eps"]),
            "rope_theta": theta,
            "rope_scaling": scaling,
            "max_position_embeddings": raw["max_position_embeddings"],
            "tie_word_embeddings": bool(raw.get("tie_word_embeddings", False)),
        }
    except KeyError as error:
        raise FleetError(f"{path}: {error.args[0]} is missing") from error


def _rope(raw: dict[str, Any], path: Path) -> tuple[float, dict[str, Any] | None]:
    """transformers 5 writes `rope_parameters`, earlier ones `rope_theta` and `rope_scaling` (there also `type`)."""
    parameters = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    theta = float(parameters.get("rope_theta") or raw.get("rope_theta") or 10000.0)
    kind = parameters.get("rope_type") or parameters.get("type") or "default"
    if kind == "default":
        return theta, None
    if kind not in ROPE_KEYS:
        raise FleetError(f"{path}: rotary scaling {kind!r} is not supported; known are default, linear, llama3")
    return theta, {"rope_type": kind, **{key: parameters[key] for key in ROPE_KEYS[kind]}}


def _weights(directory: Path) -> tuple[dict[str, SourceTensor], list[Path]]:
    if (directory / INDEX_FILE).exists():
        shards = sorted(set(_json(directory / INDEX_FILE).get("weight_map", {}).values()))
    else:
        shards = [SINGLE_FILE]
    tensors: dict[str, SourceTensor] = {}
    files: list[Path] = []
    for shard in shards:
        path = directory / str(shard)
        if path.parent != directory or not path.is_file():
            raise FleetError(
                f"{path} does not exist",
                hint="only models with safetensors weights are supported; copy the model again if a file is missing",
            )
        tensors |= read_safetensors(path)
        files.append(path)
    kept = {name: tensor for name, tensor in tensors.items() if not name.endswith("rotary_emb.inv_freq")}
    return kept, files


def _control_ids(tokenizer_json: bytes, path: Path) -> dict[str, int]:
    try:
        added = json.loads(tokenizer_json).get("added_tokens", [])
        return {token["content"]: int(token["id"]) for token in added}
    except (ValueError, AttributeError, KeyError, TypeError) as error:
        raise FleetError(f"{path} is not a tokenizer of Hugging Face's tokenizers: {error!r}") from error


def _token_id(token: object, control_ids: dict[str, int]) -> int | None:
    """tokenizer_config.json names a token by text, or by an object with `content`."""
    text = token.get("content") if isinstance(token, dict) else token
    return control_ids.get(text) if isinstance(text, str) else None


def _bos_token_id(raw: dict[str, Any], tokenizer_config: dict[str, Any], control_ids: dict[str, int]) -> int | None:
    named = _token_id(tokenizer_config.get("bos_token"), control_ids)
    return named if named is not None else raw.get("bos_token_id")


def _eos_token_ids(
    raw: dict[str, Any], generation: dict[str, Any], tokenizer_config: dict[str, Any], control_ids: dict[str, int]
) -> tuple[int, ...]:
    found: set[int] = {index for text, index in control_ids.items() if text in END_OF_GENERATION_TOKENS}
    for source in (raw, generation):
        value = source.get("eos_token_id")
        found |= set(value) if isinstance(value, list) else {value} if isinstance(value, int) else set()
    named = _token_id(tokenizer_config.get("eos_token"), control_ids)
    return ordered_eos(named, found)


def _chat_template(directory: Path, tokenizer_config: dict[str, Any]) -> str | None:
    file = directory / "chat_template.jinja"
    if file.exists():
        return file.read_text(encoding="utf-8")
    template = tokenizer_config.get("chat_template")
    if isinstance(template, list):  # several named templates: "default" is the one for chat
        named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
        template = named.get("default")
    return template if isinstance(template, str) else None
