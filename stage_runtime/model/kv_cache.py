"""The KV cache of one sequence on one stage."""

from __future__ import annotations

import torch

from stage_runtime.checkpoint.manifest import LlamaConfig


class KvCache:
    """Keys and values of every own layer, FP32, grown in blocks of tokens.

    Args:
        config: the model.
        layers: number of own layers.
        block_tokens: capacity grows by multiples of this.

    Attributes:
        length: tokens held.
    """

    def __init__(self, config: LlamaConfig, layers: int, block_tokens: int) -> None:
        self.length = 0
        self._block_tokens = block_tokens
        # [layer, key or value, KV head, token, head_dim]
        self._data = torch.empty(layers, 2, config.num_key_value_heads, 0, config.head_dim)

    @property
    def size_bytes(self) -> int:
        """Bytes held, with the part of the last block that is not used yet."""
        return self._data.nbytes

    def reserve(self, tokens: int) -> None:
        """Make room for `tokens` more than `length`."""
        needed = self.length + tokens
        if needed <= self._data.shape[3]:
            return
        blocks = -(-needed // self._block_tokens)
        layers, two, heads, _, head_dim = self._data.shape
        grown = torch.empty(layers, two, heads, blocks * self._block_tokens, head_dim)
        grown[:, :, :, : self.length] = self._data[:, :, :, : self.length]
        self._data = grown

    def append(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Write a step's keys and values behind `length` (which `advance` moves once all layers have written).

        Args:
            layer: index among the own layers.
            keys, values: [tokens, KV heads, head_dim].

        Returns:
            All keys and all values so far, each [KV heads, length + tokens, head_dim], views.
        """
        end = self.length + keys.shape[0]
        self._data[layer, 0, :, self.length : end] = keys.transpose(0, 1)
        self._data[layer, 1, :, self.length : end] = values.transpose(0, 1)
        return self._data[layer, 0, :, :end], self._data[layer, 1, :, :end]

    def advance(self, tokens: int) -> None:
        """The step is complete on all layers."""
        self.length += tokens

    def truncate(self, length: int) -> None:
        """Forget the tokens from `length` on. Memory stays: what was cut is computed again at once.

        Raises:
            ValueError: fewer tokens are held.
        """
        if not 0 <= length <= self.length:
            raise ValueError(f"a cache of {self.length} tokens can't be cut to {length}")
        self.length = length
