"""What the converter needs from a model's source, whatever its format; and which tensors a Llama model must have."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from fleet.errors import FleetError

DTYPE_BYTES = {"F32": 4, "F16": 2, "BF16": 2}
"""The dtypes of safetensors that a bundle may hold, and their sizes."""

END_OF_GENERATION_TOKENS = frozenset(
    {"<|im_end|>", "<|endoftext|>", "<|end_of_text|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "</s>", "<|eot|>"}
)
"""Control tokens that end an answer by their name. Sources often list only one of them (SmolLM2's generation
configuration lacks <|im_end|>); llama.cpp knows them by name too."""


@dataclass(frozen=True)
class SourceTensor:
    """A tensor of the source, in the layout of `transformers`.

    Attributes:
        dtype: safetensors' name: F32, F16 or BF16.
        shape: rows first, e.g. (vocab_size, hidden_size).
        read: its little-endian bytes, row-major; called once, so that one tensor is in memory at a time.
    """

    dtype: str
    shape: tuple[int, ...]
    read: Callable[[], memoryview]


@dataclass(frozen=True)
class SourceModel:
    """A model before conversion.

    Attributes:
        name: file name without suffix, or the directory's name.
        sha256: digest of all source bytes that the conversion depends on, hex.
        config: the `config` object of model.json (docs/architecture.md).
        bos_token_id: first token of a prompt, None if the model has none.
        eos_token_ids: tokens that end an answer; first the one that chat templates call eos_token, then ascending.
        tokenizer_json: bytes of tokenizer.json of Hugging Face's `tokenizers`.
        chat_template: jinja source, None if the model has none.
        tensors: Hugging Face's name → tensor.
    """

    name: str
    sha256: str
    config: Mapping[str, Any]
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    tokenizer_json: bytes
    chat_template: str | None
    tensors: Mapping[str, SourceTensor]


def layer_shapes(config: Mapping[str, Any], layer: int) -> dict[str, tuple[int, ...]]:
    """Names and shapes of one decoder layer's tensors (transformers' LlamaDecoderLayer)."""
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    queries = config["num_attention_heads"] * config["head_dim"]
    keys = config["num_key_value_heads"] * config["head_dim"]
    prefix = f"model.layers.{layer}."
    return {
        prefix + "input_layernorm.weight": (hidden,),
        prefix + "self_attn.q_proj.weight": (queries, hidden),
        prefix + "self_attn.k_proj.weight": (keys, hidden),
        prefix + "self_attn.v_proj.weight": (keys, hidden),
        prefix + "self_attn.o_proj.weight": (hidden, queries),
        prefix + "post_attention_layernorm.weight": (hidden,),
        prefix + "mlp.gate_proj.weight": (inner, hidden),
        prefix + "mlp.up_proj.weight": (inner, hidden),
        prefix + "mlp.down_proj.weight": (hidden, inner),
    }


def embedding_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Name and shape of the token embedding."""
    return {"model.embed_tokens.weight": (config["vocab_size"], config["hidden_size"])}


def final_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the final norm and, unless it is tied to the embedding, the LM head."""
    shapes: dict[str, tuple[int, ...]] = {"model.norm.weight": (config["hidden_size"],)}
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (config["vocab_size"], config["hidden_size"])
    return shapes


def check_config(config: Mapping[str, Any], where: str) -> None:
    """Refuse sizes that cannot belong to a Llama model.

    Raises:
        FleetError: a size is not a positive integer, or heads do not divide.
    """
    sizes = (
        "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
        "head_dim", "vocab_size", "max_position_embeddings",
    )  # fmt: skip
    for key in sizes:
        if not isinstance(config[key], int) or config[key] < 1:
            raise FleetError(f"{where}: {key} is {config[key]!r}, expected a positive integer")
    if config["num_attention_heads"] % config["num_key_value_heads"]:
        raise FleetError(
            f"{where}: {config['num_attention_heads']} attention heads cannot share "
            f"{config['num_key_value_heads']} key/value heads evenly"
        )
    if config["head_dim"] % 2:
        raise FleetError(f"{where}: head_dim {config['head_dim']} is odd, rotary embeddings need an even one")


def check_tensors(source: SourceModel, where: str) -> None:
    """Every tensor that the configuration asks for is there with the right shape, and no weight is left over.

    Raises:
        FleetError: names the missing, misshapen or unexpected tensors.
    """
    expected = embedding_shapes(source.config) | final_shapes(source.config)
    for layer in range(source.config["num_hidden_layers"]):
        expected |= layer_shapes(source.config, layer)
    missing = [name for name in expected if name not in source.tensors]
    if missing:
        raise FleetError(
            f"{where}: {len(missing)} of {len(expected)} tensors are missing: {_some(missing)}",
            hint="copy the model again; it looks incomplete",
        )
    for name, shape in expected.items():
        found = source.tensors[name]
        if found.shape != shape:
            raise FleetError(f"{where}: tensor {name} has shape {found.shape}, its configuration says {shape}")
        if found.dtype not in DTYPE_BYTES:
            raise FleetError(
                f"{where}: tensor {name} is {found.dtype}; supported are {', '.join(DTYPE_BYTES)}",
                hint="use a version of the model that is not quantised, or a GGUF file",
            )
    unexpected = sorted(name for name in source.tensors if name not in expected)
    if unexpected:
        raise FleetError(
            f"{where}: tensors that a Llama model does not have: {_some(unexpected)}",
            hint="only plain Llama models are supported (no biases, adapters or extra heads)",
        )


def _some(names: list[str], most: int = 5) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def ordered_eos(primary: int | None, others: Iterable[int]) -> tuple[int, ...]:
    """All ids that end an answer, each once: the primary one first, the others ascending."""
    first = () if primary is None else (primary,)
    return (*first, *sorted(set(others) - set(first)))
