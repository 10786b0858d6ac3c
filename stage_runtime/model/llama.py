"""The Llama family: RMSNorm, rotary positions, grouped-query attention, SwiGLU.

A stage runs some of the layers over the rows of a micro-batch: R rows, the new tokens of several sequences one after
another. Linear layers see all rows at once; attention runs sequence by sequence on its KV cache.
H hidden size, N attention heads, G KV heads, D head_dim, T tokens of a sequence so far.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch.nn import functional

from stage_runtime.checkpoint.manifest import LlamaConfig
from stage_runtime.model.kv_cache import KvCache
from stage_runtime.model.linear import Linear


@dataclass(frozen=True)
class Layer:
    """Weights of one decoder layer."""

    input_norm: torch.Tensor  # [H]
    q: Linear  # [H] → [N·D]
    k: Linear  # [H] → [G·D]
    v: Linear  # [H] → [G·D]
    o: Linear  # [N·D] → [H]
    post_norm: torch.Tensor  # [H]
    gate: Linear  # [H] → [intermediate]
    up: Linear  # [H] → [intermediate]
    down: Linear  # [intermediate] → [H]

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights as held."""
        linears = (self.q, self.k, self.v, self.o, self.gate, self.up, self.down)
        return sum(linear.weight_bytes for linear in linears) + self.input_norm.nbytes + self.post_norm.nbytes


@dataclass(frozen=True)
class Span:
    """The rows of one sequence in a micro-batch: `rows` new tokens behind `cache.length`."""

    cache: KvCache
    rows: int


@dataclass(frozen=True)
class _Batch:
    """What attention needs to know of a micro-batch, the same on every layer."""

    spans: list[Span]
    masks: list[torch.Tensor | None]
    cos: torch.Tensor  # [R, 1, D]
    sin: torch.Tensor  # [R, 1, D]


def rotary_frequencies(config: LlamaConfig) -> torch.Tensor:
    """Inverse frequencies [D/2] of rotary position embedding, with Llama 3's scaling where configured.

    Formulas: RoFormer (arXiv 2104.09864) and the "llama3" rope type of `transformers`.

    Raises:
        ValueError: another kind of scaling.
    """
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
    frequencies = 1.0 / config.rope_theta**exponents
    scaling = config.rope_scaling
    kind = "default" if scaling is None else scaling.get("rope_type", scaling.get("type", "default"))
    if scaling is None or kind == "default":
        return frequencies
    if kind != "llama3":
        raise ValueError(f"rope_scaling of type {kind!r} is not supported (default and llama3 are)")
    factor, low, high = (float(scaling[key]) for key in ("factor", "low_freq_factor", "high_freq_factor"))
    trained = float(scaling["original_max_position_embeddings"])
    wavelengths = 2 * math.pi / frequencies
    # long waves are stretched by `factor`, short ones kept, those between blended
    blend = ((trained / wavelengths - low) / (high - low)).clamp(0, 1)
    return (1 - blend) * frequencies / factor + blend * frequencies


def rotary_tables(frequencies: torch.Tensor, positions: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosine and sine [R, 1, D] for the rows' positions."""
    angles = torch.tensor(positions, dtype=torch.float32)[:, None] * frequencies  # [R, D/2]
    angles = torch.cat((angles, angles), dim=-1)[:, None, :]
    return angles.cos(), angles.sin()


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Turn each pair (i, i + D/2) of x [R, heads, D] by its row's angle."""
    half = x.shape[-1] // 2
    turned = torch.cat((-x[..., half:], x[..., :half]), dim=-1)
    return x * cos + turned * sin


def attend(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """Grouped-query attention of one sequence.

    Args:
        q: [rows, N, D]. keys, values: [G, T, D], with the new tokens.
        mask: [N/G · rows, T] True where a row may look, or None for a single row, which sees everything.

    Returns:
        [rows, N · D].
    """
    rows, heads, dim = q.shape
    groups = keys.shape[0]
    # the N/G query heads that share a KV head become more rows of it, so keys are never repeated
    grouped = q.view(rows, groups, heads // groups, dim).permute(1, 2, 0, 3).reshape(1, groups, -1, dim)
    out = functional.scaled_dot_product_attention(grouped, keys[None], values[None], attn_mask=mask)
    return out.view(groups, heads // groups, rows, dim).permute(2, 0, 1, 3).reshape(rows, heads * dim)


def causal_mask(config: LlamaConfig, span: Span) -> torch.Tensor | None:
    """Mask for `attend`: row i of the span sees the cache and new tokens 0…i."""
    if span.rows == 1:
        return None
    total = span.cache.length + span.rows
    mask = torch.arange(total) <= torch.arange(span.cache.length, total)[:, None]  # [rows, T]
    return mask.repeat(config.num_attention_heads // config.num_key_value_heads, 1)


class Decoder:
    """A contiguous range of decoder layers.

    Args:
        config: the model.
        layers: the own layers in order. The list stays the caller's, who may put another form of a layer in its place.
    """

    def __init__(self, config: LlamaConfig, layers: list[Layer]) -> None:
        self.config = config
        self.layers = layers
        self._frequencies = rotary_frequencies(config)

    def __call__(self, hidden: torch.Tensor, spans: list[Span]) -> torch.Tensor:
        """Run the layers over a micro-batch and append to the spans' caches.

        Args:
            hidden: [R, H] FP32. spans: their rows add up to R.

        Returns:
            [R, H] FP32.
        """
        positions = [p for s in spans for p in range(s.cache.length, s.cache.length + s.rows)]
        masks = [causal_mask(self.config, span) for span in spans]
        batch = _Batch(spans, masks, *rotary_tables(self._frequencies, positions))
        for span in spans:
            span.cache.reserve(span.rows)
        for index, layer in enumerate(self.layers):
            hidden = hidden + self._attention(index, layer, hidden, batch)
            x = self._norm(hidden, layer.post_norm)
            hidden = hidden + layer.down(functional.silu(layer.gate(x)) * layer.up(x))
        for span in spans:
            span.cache.advance(span.rows)
        return hidden

    def _attention(self, index: int, layer: Layer, hidden: torch.Tensor, batch: _Batch) -> torch.Tensor:
        rows, dim = hidden.shape[0], self.config.head_dim
        x = self._norm(hidden, layer.input_norm)
        q = rotate(layer.q(x).view(rows, -1, dim), batch.cos, batch.sin)  # [R, N, D]
        k = rotate(layer.k(x).view(rows, -1, dim), batch.cos, batch.sin)  # [R, G, D]
        v = layer.v(x).view(rows, -1, dim)  # [R, G, D]
        outputs = []
        start = 0
        for span, mask in zip(batch.spans, batch.masks, strict=True):
            end = start + span.rows
            keys, values = span.cache.append(index, k[start:end], v[start:end])
            outputs.append(attend(q[start:end], keys, values, mask))
            start = end
        return layer.o(torch.cat(outputs) if len(outputs) > 1 else outputs[0])

    def _norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return functional.rms_norm(x, (x.shape[-1],), weight, self.config.rms_norm_eps)


class Head:
    """Final norm and LM head.

    Args:
        config: the model.
        norm: [H]. linear: [H] → [vocab].
    """

    def __init__(self, config: LlamaConfig, norm: torch.Tensor, linear: Linear) -> None:
        self._config = config
        self._norm = norm
        self._linear = linear

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights as held."""
        return self._linear.weight_bytes + self._norm.nbytes

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[R, H] → [R, vocab], FP32."""
        x = functional.rms_norm(hidden, (hidden.shape[-1],), self._norm, self._config.rms_norm_eps)
        return self._linear(x)
