"""Linear layers on CPU: two kernels with FP32 activations and FP32 accumulation."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch.nn import functional

from fleet.planning.weights import PACK_BLOCK_ROWS, KernelName, packed_bytes


class Linear(Protocol):
    """y = x Wᵀ + b."""

    @property
    def weight_bytes(self) -> int:
        """Bytes that the weights take as held."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[rows, in] FP32 → [rows, out] FP32."""


class DenseLinear:
    """FP32 weights; a stored FP32 matrix stays where it is mapped, any other is converted once."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._weight = weight.float()
        self._bias = None if bias is None else bias.float()

    @property
    def weight_bytes(self) -> int:
        return self._weight.nbytes + (0 if self._bias is None else self._bias.nbytes)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return functional.linear(x, self._weight, self._bias)


class PackedLinear:
    """FP16 weights in FBGEMM's packed layout, FP32 activations and accumulation: half the bytes to stream.

    A large matrix is packed in pieces, so that the FP32 copy that packing needs stays small (8192 rows of hidden size
    4096: 128 MiB; the whole head of a 128k vocabulary would be 2 GiB).
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        pack: Any = torch.ops.quantized.linear_prepack_fp16
        self._blocks = [
            pack(weight[start : start + PACK_BLOCK_ROWS].float(), _rows(bias, start))
            for start in range(0, weight.shape[0], PACK_BLOCK_ROWS)
        ]
        self._multiply: Any = torch.ops.quantized.linear_dynamic_fp16
        rows, columns = weight.shape
        self._bytes = packed_bytes(rows, columns) + (0 if bias is None else 4 * bias.numel())

    @property
    def weight_bytes(self) -> int:
        return self._bytes

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if len(self._blocks) == 1:
            result: torch.Tensor = self._multiply(x, self._blocks[0])
            return result
        return torch.cat([self._multiply(x, block) for block in self._blocks], dim=-1)


def _rows(bias: torch.Tensor | None, start: int) -> torch.Tensor | None:
    return None if bias is None else bias[start : start + PACK_BLOCK_ROWS].float()


def make_linear(kernel: KernelName, weight: torch.Tensor, bias: torch.Tensor | None = None) -> Linear:
    """A linear layer of weight [out, in] with the given kernel.

    Raises:
        RuntimeError: this CPU or this build of torch has no such kernel (packed needs FBGEMM: x86-64).
    """
    return PackedLinear(weight, bias) if kernel == "packed" else DenseLinear(weight, bias)


def packed_available() -> bool:
    """Whether the packed kernel runs here; tried on a small matrix, because builds differ."""
    if "fbgemm" not in torch.backends.quantized.supported_engines:
        return False
    try:
        PackedLinear(torch.zeros(8, 8), None)(torch.zeros(1, 8))
    except RuntimeError:
        return False
    return True
