"""A GGUF file of the Llama architecture as a `SourceModel`: weights dequantised to FP16, in transformers' layout."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf import GGUFReader, dequantize
from gguf.gguf_reader import ReaderTensor

from fleet.bundle.gguf_tokenizer import GgufVocabulary, build_tokenizer_json
from fleet.bundle.source_model import END_OF_GENERATION_TOKENS, SourceModel, SourceTensor, check_config, ordered_eos
from fleet.errors import FleetError

GGUF_MAGIC = b"GGUF"

TOP_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
LAYER_NAMES = {  # gguf.constants.TENSOR_NAMES → transformers.LlamaDecoderLayer
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
LAYER_PATTERN = re.compile(r"blk\.(\d+)\.([a-z_]+)\.weight")
LARGEST_FP16 = 65504.0


def read_gguf(path: Path, sha256: Callable[[Path], str]) -> SourceModel:
    """Read a GGUF file's metadata; weights are dequantised when asked for, one at a time.

    Args:
        path: the file.
        sha256: gives a file's digest.

    Raises:
        FleetError: truncated, another architecture, or something a Llama model of ours cannot express.
    """
    reader = _open(path)
    metadata = _Metadata(reader, path)
    _refuse_unsupported(metadata, reader, path)
    config = _config(metadata, reader)
    check_config(config, str(path))
    vocabulary = _vocabulary(metadata)
    beside = path.with_name("tokenizer.json")
    tokenizer_json = beside.read_bytes() if beside.exists() else build_tokenizer_json(vocabulary, str(path))
    template = metadata.get("tokenizer.chat_template", None)
    return SourceModel(
        name=path.stem,
        sha256=sha256(path),
        config=config,
        bos_token_id=vocabulary.bos_token_id,
        eos_token_ids=_eos_token_ids(metadata, vocabulary),
        tokenizer_json=tokenizer_json,
        chat_template=None if template is None else str(template),
        tensors={_hugging_face_name(tensor.name): _tensor(tensor, config, path) for tensor in reader.tensors},
    )


def _open(path: Path) -> GGUFReader:
    damaged = FleetError(
        f"{path} is not a whole GGUF file ({path.stat().st_size} bytes)",
        hint="copy or download the file again; compare its SHA-256 with the publisher's",
    )
    with path.open("rb") as file:
        if file.read(4) != GGUF_MAGIC:
            raise damaged
    try:
        reader = GGUFReader(path)
    except (ValueError, IndexError, KeyError, OverflowError, TypeError) as error:  # all from reading past the end
        raise damaged from error
    for tensor in reader.tensors:
        if tensor.data_offset + tensor.n_bytes > path.stat().st_size:
            raise damaged
    return reader


class _Metadata:
    """Key → value of the file's header; a missing key names the file."""

    def __init__(self, reader: GGUFReader, path: Path) -> None:
        self._reader = reader
        self._path = path

    def get(self, key: str, default: Any) -> Any:
        field = self._reader.get_field(key)
        return default if field is None else field.contents()

    def __getitem__(self, key: str) -> Any:
        field = self._reader.get_field(key)
        if field is None:
            raise FleetError(f"{self._path}: the GGUF metadata has no {key}", hint="convert the model to GGUF again")
        return field.contents()


def _refuse_unsupported(metadata: _Metadata, reader: GGUFReader, path: Path) -> None:
    architecture = metadata["general.architecture"]
    if architecture != "llama":
        raise FleetError(f"{path}: architecture {architecture!r} is not supported; expected llama")
    if metadata.get("llama.expert_count", 0):
        raise FleetError(f"{path}: mixtures of experts are not supported")
    scaling = metadata.get("llama.rope.scaling.type", "none")
    if scaling not in ("none", "linear") or any(tensor.name == "rope_freqs.weight" for tensor in reader.tensors):
        raise FleetError(
            f"{path}: this file's rotary scaling ({scaling}, or rope_freqs) cannot be read back exactly",
            hint="give the model's Hugging Face directory instead of the GGUF file",
        )


def _config(metadata: _Metadata, reader: GGUFReader) -> dict[str, Any]:
    heads = metadata["llama.attention.head_count"]
    hidden = metadata["llama.embedding_length"]
    names = {tensor.name for tensor in reader.tensors}
    embedding = next((tensor for tensor in reader.tensors if tensor.name == "token_embd.weight"), None)
    scaling = None
    if metadata.get("llama.rope.scaling.type", "none") == "linear":
        scaling = {"rope_type": "linear", "factor": _shortest(metadata["llama.rope.scaling.factor"])}
    return {
        "hidden_size": hidden,
        "intermediate_size": metadata["llama.feed_forward_length"],
        "num_hidden_layers": metadata["llama.block_count"],
        "num_attention_heads": heads,
        "num_key_value_heads": metadata.get("llama.attention.head_count_kv", heads),
        "head_dim": metadata.get("llama.attention.key_length", hidden // heads if heads else 0),
        # a damaged file without the embedding is refused, by the tensor's name, by check_tensors
        "vocab_size": int(embedding.shape[-1]) if embedding is not None else len(metadata["tokenizer.ggml.tokens"]),
        "rms_norm_eps": _shortest(metadata["llama.attention.layer_norm_rms_epsilon"]),
        "rope_theta": _shortest(metadata.get("llama.rope.freq_base", 10000.0)),
        "rope_scaling": scaling,
        "max_position_embeddings": metadata["llama.context_length"],
        "tie_word_embeddings": "output.weight" not in names,
    }


def _shortest(value: float) -> float:
    """GGUF keeps float32; the shortest decimal that gives the same float32 is what the author wrote (1e-05)."""
    return float(str(np.float32(value)))


def _vocabulary(metadata: _Metadata) -> GgufVocabulary:
    return GgufVocabulary(
        model=metadata["tokenizer.ggml.model"],
        pre=metadata.get("tokenizer.ggml.pre", "default"),
        tokens=metadata["tokenizer.ggml.tokens"],
        token_types=metadata.get("tokenizer.ggml.token_type", []),
        merges=metadata.get("tokenizer.ggml.merges", []),
        bos_token_id=metadata.get("tokenizer.ggml.bos_token_id", None),
        add_bos=bool(metadata.get("tokenizer.ggml.add_bos_token", False)),
    )


def _eos_token_ids(metadata: _Metadata, vocabulary: GgufVocabulary) -> tuple[int, ...]:
    by_key = (metadata.get(f"tokenizer.ggml.{kind}_token_id", None) for kind in ("eos", "eot", "eom"))
    by_name = (index for text, index in vocabulary.control_ids().items() if text in END_OF_GENERATION_TOKENS)
    primary = metadata.get("tokenizer.ggml.eos_token_id", None)
    others = [int(index) for index in (*by_key, *by_name) if index is not None]
    return ordered_eos(None if primary is None else int(primary), others)


def _hugging_face_name(name: str) -> str:
    """transformers' name of a GGUF tensor; unknown names stay, and check_tensors refuses them."""
    match = LAYER_PATTERN.fullmatch(name)
    if match and match[2] in LAYER_NAMES:
        return f"model.layers.{match[1]}.{LAYER_NAMES[match[2]]}.weight"
    return TOP_NAMES.get(name, name)


def _tensor(tensor: ReaderTensor, config: dict[str, Any], path: Path) -> SourceTensor:
    heads = 0
    if tensor.name.endswith("attn_q.weight"):
        heads = config["num_attention_heads"]
    elif tensor.name.endswith("attn_k.weight"):
        heads = config["num_key_value_heads"]
    shape = tuple(int(size) for size in reversed(tensor.shape))
    return SourceTensor("F16", shape, partial(_read, tensor, shape, heads, path))


def _read(tensor: ReaderTensor, shape: tuple[int, ...], permuted_heads: int, path: Path) -> memoryview:
    try:
        values = dequantize(tensor.data, tensor.tensor_type).reshape(shape)
    except NotImplementedError as error:
        raise FleetError(
            f"{path}: tensor {tensor.name} is quantised as {tensor.tensor_type.name}, which is not supported",
            hint="use a file quantised as F16, Q8_0, Q4_0, Q4_1, Q5_0, Q5_1 or a K-quant",
        ) from error
    if not bool(np.abs(values).max(initial=0.0) <= LARGEST_FP16):  # written so that NaN is refused as well
        raise FleetError(f"{path}: tensor {tensor.name} holds values outside FP16 (±{LARGEST_FP16:.0f}) or NaN")
    halves = values.astype("<f2")
    if permuted_heads:
        halves = _unpermute(halves, permuted_heads)
    return halves.reshape(-1).view(np.uint8).data


def _unpermute(weight: npt.NDArray[np.float16], heads: int) -> npt.NDArray[np.float16]:
    """Undo the row order that llama.cpp's converter gives q and k.

    transformers rotates the first half of a head's rows against the second; GGUF interleaves the two halves:
    rows (heads, head_dim/2, 2) → (heads, 2, head_dim/2).
    """
    rows, columns = weight.shape
    interleaved: npt.NDArray[np.float16] = weight.reshape(heads, rows // heads // 2, 2, columns)
    return np.ascontiguousarray(interleaved.swapaxes(1, 2)).reshape(rows, columns)
