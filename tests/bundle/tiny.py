"""Tiny random Llama models for converter tests: as Hugging Face directories by `transformers`, as GGUF by `gguf`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf.quants import quantize
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM

HIDDEN, INNER, LAYERS, HEADS, KEY_HEADS, VOCABULARY = 64, 96, 3, 4, 2, 259


def byte_vocabulary() -> list[str]:
    """The 256 byte tokens of byte-level BPE, one merge, and two control tokens."""
    return [*sorted(pre_tokenizers.ByteLevel.alphabet()), "ab", "<|im_start|>", "<|im_end|>"]


def tiny_model(*, tied: bool, dtype: torch.dtype = torch.float32, **config: Any) -> LlamaForCausalLM:
    """A random Llama of three layers."""
    torch.manual_seed(7)
    settings = {
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KEY_HEADS,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 128,
        "tie_word_embeddings": tied,
        "eos_token_id": 258,
        "bos_token_id": 257,
    }
    return LlamaForCausalLM(LlamaConfig(**{**settings, **config})).to(dtype).eval()


def save_huggingface(model: LlamaForCausalLM, directory: Path, shard_size: str = "10GB") -> Path:
    """A directory as the hub has it: config, weights, tokenizer."""
    model.save_pretrained(directory, max_shard_size=shard_size)
    vocabulary = {token: index for index, token in enumerate(byte_vocabulary())}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[("a", "b")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "chat_template": "{{ messages[0].content }}"}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    return directory


def _permute(weight: np.ndarray[Any, Any], heads: int) -> np.ndarray[Any, Any]:
    """Row order that GGUF gives q and k: the halves of each head interleaved."""
    rows, columns = weight.shape
    return weight.reshape(heads, 2, rows // heads // 2, columns).swapaxes(1, 2).reshape(rows, columns)


def save_gguf(
    model: LlamaForCausalLM,
    path: Path,
    kind: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
    *,
    architecture: str = "llama",
    pre: str = "smollm",
    omit: str = "",
) -> Path:
    """The same model as a GGUF file; matrices in `kind`, norms in F32."""
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KEY_HEADS)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(10000.0)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(byte_vocabulary())
    writer.add_token_types([1] * 257 + [3, 3])
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(257)
    writer.add_eos_token_id(258)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, LAYERS)
    tied = model.config.tie_word_embeddings
    for name, tensor in model.state_dict().items():
        if tied and name == "lm_head.weight":
            continue
        values = tensor.float().numpy()
        if name.endswith("q_proj.weight"):
            values = _permute(values, HEADS)
        if name.endswith("k_proj.weight"):
            values = _permute(values, KEY_HEADS)
        gguf_name = names.get_name(name, try_suffixes=(".weight",))
        assert gguf_name is not None
        if gguf_name == omit:
            continue
        if values.ndim == 1 or kind == gguf.GGMLQuantizationType.F32:
            writer.add_tensor(gguf_name, np.ascontiguousarray(values, dtype=np.float32))
        else:
            writer.add_tensor(gguf_name, quantize(np.ascontiguousarray(values), kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
