"""What a stage costs on a box: seconds per decode step and bytes of memory. Pure arithmetic, no I/O."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import accumulate

from fleet.planning.weights import WeightBytes

MIB = 1 << 20

# Share of a box's memory that no plan uses (seeds, row F8: 20–30 % reserve in every sizing).
RESERVE_FRACTION = 0.25

# What a stage process takes beside weights, their conversion and KV caches: interpreter, torch, TLS, HTTP. Measured on
# x86-64 with torch 2.13 CPU, a stage without layers: resident 248 MiB at rest (156 of them anonymous, 92 mapped
# libraries), peak 275. The peak counts: PSS (177 to 184) leaves out what several stages of the measuring machine share
# of torch's libraries, and a box has one stage. What a box must survive is loading: a stage with 417 MiB of weights
# peaks at 739, which is 248, the weights, 18 of conversion, and 54 of a mapped shard; only that last part is not
# planned for, because the system drops such pages when memory is short.
PROCESS_BASE_BYTES = 280 * MIB

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

    The token embedding costs nothing: its rows are read from the file, and only the page cache keeps them.

    Attributes:
        layers: weights of each decoder layer.
        head: final norm and LM head.
        tied: the head is made from the embedding and sits on the first stage.
        trial_bytes: held while a stage tries its kernels on one layer, before it loads the others.
        kv_bytes_per_token: key and value of one token in one layer, FP32.
        hidden_size: values of one hidden state.
    """

    layers: tuple[WeightBytes, ...]
    head: WeightBytes
    tied: bool
    trial_bytes: int
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
        needed_bytes: most that the process takes at any time: with all KV caches, or while it loads.
        missing_bytes: what the box lacks for that; 0 when it fits.
    """

    seconds: float
    needed_bytes: int
    missing_bytes: int


class CostTable:
    """Costs of every contiguous range on every box, from prefix sums: O(1) a look-up."""

    def __init__(self, model: ModelCost, load: Load) -> None:
        self.model = model
        self.layers = len(model.layers)
        self._held = [0, *accumulate(layer.held for layer in model.layers)]
        self._read = [0, *accumulate(layer.read for layer in model.layers)]
        self._converting = max((layer.converting for layer in model.layers), default=0)
        self._kv_bytes_per_layer = load.max_sequences * load.max_tokens_per_sequence * model.kv_bytes_per_token

    def stage(self, box: BoxCost, start: int, end: int) -> StageCost:
        """Cost of decoder layers [start, end) on a box, with the head where the plan puts it.

        The head lies on the stage that starts at layer 0 when tied, else on the stage that ends with the last layer.
        Caches come after loading, so the larger of the two counts, and kernels are tried before the weights are there.
        Both figures never shrink as a range grows. An empty range costs nothing.
        """
        if start == end:
            return StageCost(0.0, 0, 0)
        held, read = self._held[end] - self._held[start], self._read[end] - self._read[start]
        converting = self._converting
        if start == 0 if self.model.tied else end == self.layers:
            held, read = held + self.model.head.held, read + self.model.head.read
            converting = max(converting, self.model.head.converting)
        caches = (end - start) * self._kv_bytes_per_layer
        needed = PROCESS_BASE_BYTES + max(held + max(caches, converting), self.model.trial_bytes)
        wire = self.model.hidden_size * WIRE_BYTES_PER_VALUE / box.link_bytes_per_second
        missing = max(0.0, needed - box.usable_bytes)
        return StageCost(read / box.bytes_per_second + wire, needed, math.ceil(missing))
