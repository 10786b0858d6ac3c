"""A small random Llama as a model directory of the bundle, and `transformers` on the same weights as the reference."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
VOCABULARY = 320
LAYERS = 6


@dataclass(frozen=True)
class TinyModel:
    """A model directory with its digest, and the reference model."""

    directory: Path
    digest: str
    reference: LlamaForCausalLM
    layers: int
    tied: bool

    def greedy(self, prompt: list[int], count: int) -> list[int]:
        """Tokens of a plain single run."""
        ids = list(prompt)
        with torch.inference_mode():
            for _ in range(count):
                ids.append(int(self.reference(torch.tensor([ids])).logits[0, -1].argmax()))
        return ids[len(prompt) :]

    def logits(self, ids: list[int]) -> torch.Tensor:
        """[len(ids), vocab] of a plain run."""
        with torch.inference_mode():
            result: torch.Tensor = self.reference(torch.tensor([ids])).logits[0]
        return result


def make_model(
    directory: Path,
    *,
    tied: bool,
    dtype: torch.dtype = torch.float16,
    rope_scaling: dict[str, Any] | None = None,
    adapt: Callable[[LlamaForCausalLM], object] = lambda model: None,
) -> TinyModel:
    """Write the model; the reference computes in FP32 on exactly the values in the files.

    Args:
        adapt: changes the random weights before they are written.
    """
    torch.manual_seed(7)
    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=160,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        vocab_size=VOCABULARY,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_theta": 10000.0, **(rope_scaling or {"rope_type": "default"})},
        max_position_embeddings=512,
        tie_word_embeddings=tied,
        initializer_range=0.3,
        attn_implementation="eager",
    )
    reference = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        adapt(reference)
        for parameter in reference.parameters():
            parameter.copy_(parameter.to(dtype).float())
    tensors = {name: value.to(dtype).contiguous().clone() for name, value in reference.state_dict().items()}
    if tied:
        tensors.pop("lm_head.weight", None)
    raw_config = {
        "hidden_size": 64,
        "intermediate_size": 160,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": VOCABULARY,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "rope_scaling": rope_scaling,
        "max_position_embeddings": 512,
        "tie_word_embeddings": tied,
    }
    digest = _write(directory, raw_config, tensors)
    return TinyModel(directory, digest, reference, LAYERS, tied)


def _write(directory: Path, config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> str:
    directory.mkdir(parents=True)
    groups: dict[str, tuple[str, int | None]] = {"embedding.safetensors": ("embedding", None)}
    groups |= {f"layer-{i:03}.safetensors": ("layer", i) for i in range(LAYERS)}
    groups["final.safetensors"] = ("final", None)
    files = []
    for name, (kind, layer) in groups.items():
        own = {key: value for key, value in tensors.items() if _belongs(key, kind, layer)}
        save_file(own, directory / name)
        data = (directory / name).read_bytes()
        digest = hashlib.sha256(data).hexdigest()
        files.append({"name": name, "kind": kind, "layer": layer, "sha256": digest, "bytes": len(data)})
    manifest = {
        "schema": 1,
        "name": "tiny",
        "architecture": "llama",
        "config": config,
        "bos_token_id": 1,
        "eos_token_ids": [2],
        "source": {"name": "random", "sha256": "0" * 64},
        "files": files,
    }
    data = json.dumps(manifest).encode()
    (directory / "model.json").write_bytes(data)
    return hashlib.sha256(data).hexdigest()


def _belongs(name: str, kind: str, layer: int | None) -> bool:
    if kind == "layer":
        return name.startswith(f"model.layers.{layer}.")
    return name.startswith("model.embed_tokens") if kind == "embedding" else name.startswith(("model.norm", "lm_head"))
