"""Bytes of a model's weights as the stage's kernels hold and read them. Pure arithmetic, standard library only.

The stage counts its own weights with the same formulas (`stage_runtime/model/linear.py`); a test compares the planner's
sums with what a loaded stage reports.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from fleet.bundle.model_info import ModelConfig

KernelName = Literal["dense", "packed"]

FP32_BYTES = 4
FP16_BYTES = 2

# FBGEMM packs an FP16 matrix into blocks of 512 inputs by 16 outputs and allocates and zeroes whole blocks
# (PackedGemmMatrixB in fbgemm/FbgemmPackMatrixB.h: blockRowSize 512, blockColSize 8 × 2 column blocks). Padding takes
# memory but is not read: measured with torch 2.13, one thread, 49152 outputs, 576 inputs take 5.6 ms, 1024 take 9.9 ms.
PACKED_INPUT_BLOCK = 512
PACKED_OUTPUT_BLOCK = 16

# The packed kernel converts a large matrix in pieces of this many outputs, each of which is FP32 for a moment.
PACK_BLOCK_ROWS = 8192


@dataclass(frozen=True)
class WeightBytes:
    """Some weights.

    Attributes:
        held: bytes of memory that they take for as long as the stage runs.
        read: bytes that a step streams from memory.
        converting: bytes that come on top of `held` while they are made ready.
    """

    held: int
    read: int
    converting: int


def packed_bytes(outputs: int, inputs: int) -> int:
    """Bytes of an FP16 matrix [outputs, inputs] in FBGEMM's packed layout, padding included."""
    return FP16_BYTES * _round_up(outputs, PACKED_OUTPUT_BLOCK) * _round_up(inputs, PACKED_INPUT_BLOCK)


def layer_weights(config: ModelConfig, kernel: KernelName) -> WeightBytes:
    """One decoder layer: q, k, v, o, gate, up, down and two norms. Biases (Qwen2: q, k, v) are too small to count."""
    hidden, wide = config.hidden_size, config.intermediate_size
    queries, groups = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
    matrices = [
        *[(queries, hidden), (groups, hidden), (groups, hidden), (hidden, queries)],
        *[(wide, hidden), (wide, hidden), (hidden, wide)],
    ]
    return _weights(matrices, 2 * hidden, kernel)


def head_weights(config: ModelConfig, kernel: KernelName) -> WeightBytes:
    """Final norm and LM head; with tied embeddings too, because rows of the embedding are read from its file."""
    return _weights([(config.vocab_size, config.hidden_size)], config.hidden_size, kernel)


def _weights(matrices: list[tuple[int, int]], norm_values: int, kernel: KernelName) -> WeightBytes:
    norms = FP32_BYTES * norm_values
    values = sum(outputs * inputs for outputs, inputs in matrices)
    if kernel == "dense":
        size = FP32_BYTES * values + norms
        return WeightBytes(size, size, converting=0)
    return WeightBytes(
        held=sum(packed_bytes(outputs, inputs) for outputs, inputs in matrices) + norms,
        read=FP16_BYTES * values + norms,
        converting=max(FP32_BYTES * min(outputs, PACK_BLOCK_ROWS) * inputs for outputs, inputs in matrices),
    )


def _round_up(count: int, block: int) -> int:
    return -(-count // block) * block
