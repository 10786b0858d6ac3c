"""From shards to layers: which tensors a stage needs and in which kernel's form it holds them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from fleet.planning.weights import KernelName
from stage_runtime.checkpoint.manifest import LlamaConfig, ModelManifest
from stage_runtime.checkpoint.shards import RowReader, Shard, open_rows, open_shard, verify_file
from stage_runtime.model.linear import Linear, make_linear
from stage_runtime.model.llama import Head, Layer

EMBEDDING = "model.embed_tokens.weight"


@dataclass(eq=False)
class StageWeights:
    """What one stage holds. The store may put a layer or the head in another kernel's form in their place."""

    layers: list[Layer]
    embedding: RowReader | None
    head: Head | None

    @property
    def weight_bytes(self) -> int:
        """Bytes as held; rows of the embedding are read from the file and not held."""
        return sum(layer.weight_bytes for layer in self.layers) + (self.head.weight_bytes if self.head else 0)

    def replace(self, old: Layer | Head | None, new: Layer | Head) -> None:
        """Put one in the place of another, between any two uses: a step sees either, and both give the same."""
        if isinstance(new, Head):
            self.head = new if self.head is old else self.head
            return
        for position, layer in enumerate(self.layers):
            if layer is old:
                self.layers[position] = new


def read_layer(shard: Shard, index: int, config: LlamaConfig, kernel: KernelName) -> Layer:
    """One decoder layer from its shard.

    Raises:
        FleetError: a tensor is missing or has another shape.
    """
    hidden, wide, dim = config.hidden_size, config.intermediate_size, config.head_dim
    queries, groups = config.num_attention_heads * dim, config.num_key_value_heads * dim
    prefix = f"model.layers.{index}."

    def linear(name: str, rows: int, columns: int) -> Linear:
        bias = f"{prefix}{name}.bias"  # Qwen2 has them on q, k and v
        return make_linear(
            kernel,
            shard.tensor(f"{prefix}{name}.weight", (rows, columns)),
            shard.tensor(bias, (rows,)) if bias in shard else None,
        )

    def norm(name: str) -> torch.Tensor:
        return shard.tensor(f"{prefix}{name}.weight", (hidden,)).float().clone()

    return Layer(
        input_norm=norm("input_layernorm"),
        q=linear("self_attn.q_proj", queries, hidden),
        k=linear("self_attn.k_proj", groups, hidden),
        v=linear("self_attn.v_proj", groups, hidden),
        o=linear("self_attn.o_proj", hidden, queries),
        post_norm=norm("post_attention_layernorm"),
        gate=linear("mlp.gate_proj", wide, hidden),
        up=linear("mlp.up_proj", wide, hidden),
        down=linear("mlp.down_proj", hidden, wide),
    )


def load_layer(directory: Path, manifest: ModelManifest, index: int, kernel: KernelName) -> Layer:
    """Verify, map and prepare one decoder layer.

    Raises:
        FleetError: the shard is missing, damaged or of another shape.
    """
    with open_shard(directory, manifest.layer_file(index)) as shard:
        return read_layer(shard, index, manifest.config, kernel)


def stored_dtype(directory: Path, manifest: ModelManifest, index: int) -> torch.dtype:
    """How a layer's matrices are stored.

    Raises:
        FleetError: the shard is missing or damaged.
    """
    config = manifest.config
    with open_shard(directory, manifest.layer_file(index)) as shard:
        shape = (config.hidden_size, config.intermediate_size)
        return shard.tensor(f"model.layers.{index}.mlp.down_proj.weight", shape).dtype


def load_head(directory: Path, manifest: ModelManifest, kernel: KernelName) -> tuple[Head, RowReader | None]:
    """Final norm and LM head.

    Returns:
        The head; with tied embeddings, also the rows of the embedding's file, which has been verified for it.

    Raises:
        FleetError: a shard is missing, damaged or of another shape.
    """
    config = manifest.config
    shape = (config.vocab_size, config.hidden_size)
    with open_shard(directory, manifest.file("final")) as final:
        norm = final.tensor("model.norm.weight", (config.hidden_size,)).float().clone()
        if not config.tie_word_embeddings:
            return Head(config, norm, make_linear(kernel, final.tensor("lm_head.weight", shape))), None
    entry = manifest.file("embedding")
    with open_shard(directory, entry) as embedding:
        head = Head(config, norm, make_linear(kernel, embedding.tensor(EMBEDDING, shape)))
        return head, open_rows(directory / entry.name, EMBEDDING, shape)


def open_embedding(directory: Path, manifest: ModelManifest) -> RowReader:
    """Verify the token embedding and open it for reading by rows.

    Raises:
        FleetError: the shard is missing, damaged or of another shape.
    """
    path = verify_file(directory, manifest.file("embedding"))
    return open_rows(path, EMBEDDING, (manifest.config.vocab_size, manifest.config.hidden_size))
