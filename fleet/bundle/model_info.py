"""Typed read of a bundle's model.json; standard library only, because planning and provisioning use it."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fleet.errors import FleetError

MODEL_SCHEMA = 1
MODEL_FILE = "model.json"
EMBEDDING_FILE = "embedding.safetensors"
FINAL_FILE = "final.safetensors"
LARGEST_SHARD_HEADER_BYTES = 1 << 20
"""A layer's shard has about ten tensors of 100 bytes each in its header."""
LARGEST_MODEL_JSON_BYTES = 4 << 20
"""200 bytes a file; more than a few hundred kB is not a model.json."""


def layer_file(layer: int) -> str:
    """File name of a decoder layer's shard."""
    return f"layer-{layer:03d}.safetensors"


@dataclass(frozen=True)
class ModelConfig:
    """Sizes of a Llama model, named as transformers' LlamaConfig names them; rope_scaling None is plain RoPE."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: dict[str, Any] | None
    max_position_embeddings: int
    tie_word_embeddings: bool

    def __post_init__(self) -> None:
        if self.num_attention_heads % self.num_key_value_heads or self.head_dim % 2:
            raise ValueError("attention heads must be a multiple of key-value heads, head_dim even")


@dataclass(frozen=True)
class ModelFile:
    """A file beside model.json. `kind`: embedding, layer, final, tokenizer or chat_template; `layer` for layers."""

    name: str
    kind: str
    layer: int | None
    sha256: str
    size_bytes: int


@dataclass(frozen=True)
class ModelInfo:
    """A model of the bundle.

    Attributes:
        directory: where it lies. digest: SHA-256 of model.json, hex.
        name: the source's name. source_sha256: digest of the source.
        weight_dtype: how safetensors names the stored type of the layers' matrices ("F16", "BF16", "F32"); None: the
            first layer's shard is not there or not readable.
        files: every file but model.json itself.
    """

    directory: Path
    digest: str
    name: str
    config: ModelConfig
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    source_sha256: str
    weight_dtype: str | None
    files: tuple[ModelFile, ...]


def read_model_json(directory: Path) -> ModelInfo:
    """Read `<directory>/model.json`.

    Raises:
        FleetError: missing, damaged, of another schema, or naming files outside the directory.
    """
    path = directory / MODEL_FILE
    hint = "run `fleet bundle` again"
    try:
        if path.stat().st_size > LARGEST_MODEL_JSON_BYTES:
            raise FleetError(f"{path} has {path.stat().st_size} bytes, expected a model.json", hint=hint)
        encoded = path.read_bytes()
    except OSError as error:
        raise FleetError(f"{path} cannot be read: {error.strerror}", hint=hint) from error
    try:
        data = json.loads(encoded)
        if data["schema"] != MODEL_SCHEMA:
            raise FleetError(f"{path} has schema {data['schema']!r}, this fleet reads {MODEL_SCHEMA}", hint=hint)
        info = ModelInfo(
            directory=directory,
            digest=hashlib.sha256(encoded).hexdigest(),
            name=data["name"],
            config=ModelConfig(**data["config"]),
            bos_token_id=data["bos_token_id"],
            eos_token_ids=tuple(data["eos_token_ids"]),
            source_sha256=data["source"]["sha256"],
            weight_dtype=_matrix_dtype(directory / layer_file(0)),
            files=tuple(
                ModelFile(file["name"], file["kind"], file["layer"], file["sha256"], int(file["bytes"]))
                for file in data["files"]
            ),
        )
    except (ValueError, KeyError, TypeError) as error:
        raise FleetError(f"{path} is damaged: {type(error).__name__}: {error}", hint=hint) from error
    layers = sorted(file.layer for file in info.files if file.kind == "layer" and file.layer is not None)
    if layers != list(range(info.config.num_hidden_layers)):
        raise FleetError(f"{path} lists {len(layers)} layers, expected {info.config.num_hidden_layers}", hint=hint)
    if any(Path(file.name).name != file.name for file in info.files):
        raise FleetError(f"{path} names a file outside its directory", hint=hint)
    return info


def _matrix_dtype(shard: Path) -> str | None:
    """Stored type of a layer's matrices, from the safetensors header (8 bytes little-endian length, then JSON)."""
    try:
        with shard.open("rb") as file:
            header_bytes = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(header_bytes)) if header_bytes <= LARGEST_SHARD_HEADER_BYTES else {}
        return next((str(entry["dtype"]) for entry in header.values() if len(entry.get("shape", ())) == 2), None)
    except (OSError, ValueError, AttributeError, KeyError, TypeError):
        return None  # whoever needs the shard itself checks its digest and says what is wrong
