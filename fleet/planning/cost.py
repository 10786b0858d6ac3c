"""What a stage costs on a box: seconds per decode step and bytes of memory. Pure arithmetic, no I/O."""

from __future__ import annotations

from dataclasses import dataclass

MIB = 1 << 20

# Share of a box's memory that no plan uses (seeds, row F8: 20–30 % reserve in every sizing).
RESERVE_FRACTION = 0.25

# Resident memory of a stage process before any weights: interpreter, torch, TLS, HTTP. Measured on x86-64 with
# torch 2.13 CPU: `import torch` alone 218 MB; a stage with an empty layer range stays below this.
PROCESS_BASE_BYTES = 320 * MIB

# Decode is bound by memory bandwidth: every weight is read once a step. Measured on a 2-core x86-64 host, one thread,
# one row through all FP16-packed linears of a 135M model (212 MB): 36 ms. Only ratios between boxes matter for a split;
# measured seconds replace it (BoxCost).
NOMINAL_BYTES_PER_SECOND_PER_THREAD = 5.9e9

# What one more row in a micro-batch adds to a step: the same linears take 36 ms with 1 row, 271 ms with 64.
ROW_FRACTION = 0.1

# FP32 hidden states on the wire (policy `exact`).
WIRE_BYTES_PER_VALUE = 4


@dataclass(frozen=True)
class ModelCost:
    """A model as the planner sees it.

    Attributes:
        layer_bytes: weights of each decoder layer as held in memory.
        embedding_bytes: the token embedding; mapped, read one row a token, so it costs memory but no time.
        head_bytes: final norm and LM head as held; read whole for every token.
        tied: the head is a packed copy of the embedding and sits with it on the first stage.
        kv_bytes_per_token: key and value of one token in one layer, FP32.
        hidden_size: values of one hidden state.
    """

    layer_bytes: tuple[int, ...]
    embedding_bytes: int
    head_bytes: int
    tied: bool
    kv_bytes_per_token: int
    hidden_size: int


@dataclass(frozen=True)
class BoxCost:
    """A box as the planner sees it.

    Attributes:
        name: of the box.
        bytes_per_second: weights it streams per second in decode, all its threads together.
        memory_bytes: memory it has in all; None: not known, not judged.
        keep_free_bytes: never planned for.
        link_bytes_per_second: to the next stage.
    """

    name: str
    bytes_per_second: float
    memory_bytes: int | None
    keep_free_bytes: int
    link_bytes_per_second: float

    @property
    def usable_bytes(self) -> float:
        """Memory that a plan may use; infinite when the box's memory is not known."""
        if self.memory_bytes is None:
            return float("inf")
        return max(0.0, self.memory_bytes * (1 - RESERVE_FRACTION) - self.keep_free_bytes)


@dataclass(frozen=True)
class Load:
    """What is asked of a pipeline: `max_sequences` of up to `max_tokens_per_sequence` tokens at once."""

    max_sequences: int
    max_tokens_per_sequence: int


@dataclass(frozen=True)
class StageCost:
    """Cost of one stage on its box.

    Attributes:
        seconds: of one decode step, link to the next stage included.
        needed_bytes: process, weights and KV cache at full load.
        missing_bytes: what the box lacks for that; 0 when it fits.
    """

    seconds: float
    needed_bytes: int
    missing_bytes: int


class CostTable:
    """Costs of every contiguous range on every box, from prefix sums: O(1) a look-up."""

    def __init__(self, model: ModelCost, load: Load) -> None:
        self.model = model
        self.load = load
        self.layers = len(model.layer_bytes)
        self._prefix = [0]
        for size in model.layer_bytes:
            self._prefix.append(self._prefix[-1] + size)

    def stage(self, box: BoxCost, start: int, end: int) -> StageCost:
        """Cost of decoder layers [start, end) on a box, with embedding and head where the plan puts them.

        The embedding lies on the stage that starts at layer 0; the head beside it when tied, else on the stage that
        ends with the last layer. An empty range costs nothing.
        """
        if start == end:
            return StageCost(0.0, 0, 0)
        first, last = start == 0, end == self.layers
        head = self.model.head_bytes if (first if self.model.tied else last) else 0
        weights = self._prefix[end] - self._prefix[start]
        tokens = self.load.max_sequences * self.load.max_tokens_per_sequence
        kv_cache = (end - start) * tokens * self.model.kv_bytes_per_token
        needed = PROCESS_BASE_BYTES + weights + head + (self.model.embedding_bytes if first else 0) + kv_cache
        wire = self.model.hidden_size * WIRE_BYTES_PER_VALUE / box.link_bytes_per_second
        seconds = (weights + head) / box.bytes_per_second + wire
        missing = max(0.0, needed - box.usable_bytes)
        return StageCost(seconds, needed, int(-(-missing // 1)))
