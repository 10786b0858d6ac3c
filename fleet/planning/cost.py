"""What a stage costs on a box: seconds per decode step and bytes of memory. Pure arithmetic, no I/O."""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass, replace
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

# Times are added and compared as whole picoseconds: sums are exact, so equal plans are equal on every machine.
PICOSECONDS = 10**12

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
        bytes_per_second: weights it streams per second in decode, all its threads together (nominal).
        memory_bytes: memory it has in all; None: not known, not judged.
        keep_free_bytes: never planned for.
        link_bytes_per_second: to the next stage.
        layer_seconds: measured, one decode step of one decoder layer with one row; replaces `bytes_per_second`.
        head_seconds: measured, the same of the head; without it the head is reckoned from its bytes.
    """

    name: str
    bytes_per_second: float
    memory_bytes: int | None
    keep_free_bytes: int
    link_bytes_per_second: float
    layer_seconds: float | None = None
    head_seconds: float | None = None

    @property
    def usable_bytes(self) -> float:
        """Memory that a plan may use; infinite when the box's memory is not known."""
        if self.memory_bytes is None:
            return math.inf
        return max(0.0, self.memory_bytes * (1 - RESERVE_FRACTION) - self.keep_free_bytes)

    def missing_bytes(self, needed_bytes: int) -> int:
        """Memory to add so that a stage of `needed_bytes` fits, reserve included; 0 when it fits or is not judged."""
        if self.memory_bytes is None:
            return 0
        return max(0, math.ceil((needed_bytes + self.keep_free_bytes) / (1 - RESERVE_FRACTION)) - self.memory_bytes)

    def measured(self, memory_bytes: int, layer_seconds: float | None, head_seconds: float | None) -> BoxCost:
        """The same box with what its stage has measured; it replaces what the inventory says.

        Args:
            memory_bytes: of the box or its cgroup; 0 keeps the inventory's.
            layer_seconds, head_seconds: None (and 0, which no clock measures) keeps what was known.
        """
        return replace(
            self,
            memory_bytes=memory_bytes or self.memory_bytes,
            layer_seconds=layer_seconds or self.layer_seconds,
            head_seconds=head_seconds or self.head_seconds,
        )


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
        missing_bytes: memory that must be added to the box for that; 0 when it fits.
    """

    seconds: float
    needed_bytes: int
    missing_bytes: int


class CostTable:
    """Costs of every contiguous range on every box, from prefix sums: O(1) a look-up."""

    def __init__(self, model: ModelCost, load: Load) -> None:
        self.model = model
        self.layers = len(model.layers)
        self.held = [0, *accumulate(layer.held for layer in model.layers)]
        self.converting = max((layer.converting for layer in model.layers), default=0)
        self.kv_bytes_per_layer = load.max_sequences * load.max_tokens_per_sequence * model.kv_bytes_per_token
        self._tables: dict[BoxCost, BoxTable] = {}

    def on(self, box: BoxCost) -> BoxTable:
        """Costs on one box; boxes that differ in nothing but their name share them."""
        kind = replace(box, name="")
        if kind not in self._tables:
            self._tables[kind] = BoxTable(self, kind)
        return self._tables[kind]

    def stage(self, box: BoxCost, start: int, end: int, standby_bytes: int = 0) -> StageCost:
        """Cost of decoder layers [start, end) on a box, with the head where the plan puts it.

        Figures never shrink as a range grows. An empty range without standby costs nothing.

        Args:
            box: where. start, end: the range.
            standby_bytes: weights that the box keeps ready beside its own.
        """
        on_box = self.on(box)
        needed = self.needed_bytes(start, end, standby_bytes)
        return StageCost(on_box.picoseconds(start, end) / PICOSECONDS, needed, box.missing_bytes(needed))

    def has_head(self, start: int, end: int) -> bool:
        """Whether the stage of a range that is not empty holds the head: the first if tied, else the last."""
        return start == 0 if self.model.tied else end == self.layers

    def needed_bytes(self, start: int, end: int, standby_bytes: int = 0) -> int:
        """Most memory that the stage of a range takes: its process, weights as held, caches, standby weights.

        Caches come after loading, so the larger of caches and conversion counts, and kernels are tried before the
        weights are there. Standby weights are converted while caches may be full, so that comes on top.
        """
        if start == end and not standby_bytes:
            return 0
        held, converting = self.held[end] - self.held[start] + standby_bytes, self.converting
        if start < end and self.has_head(start, end):
            held, converting = held + self.model.head.held, max(converting, self.model.head.converting)
        caches = (end - start) * self.kv_bytes_per_layer
        beside = caches + max(converting, self.model.head.converting) if standby_bytes else max(caches, converting)
        return PROCESS_BASE_BYTES + max(held + beside, self.model.trial_bytes)


class BoxTable:
    """Times and memory of every range on one kind of box. Ends and starts are layer numbers.

    Seconds of a layer: measured ones are those of the model's average layer, spread by bytes read; else bytes read over
    the box's nominal bandwidth.
    """

    def __init__(self, table: CostTable, box: BoxCost) -> None:
        self._table, self._box, model = table, box, table.model
        rate = box.bytes_per_second
        mean_read = sum(layer.read for layer in model.layers) / max(1, table.layers)
        if box.layer_seconds is not None and mean_read:
            rate = mean_read / box.layer_seconds
        head_seconds = model.head.read / rate if box.head_seconds is None else box.head_seconds
        layers = (round(layer.read / rate * PICOSECONDS) for layer in model.layers)
        self.work = [0, *accumulate(layers)]
        self.head = round(head_seconds * PICOSECONDS)
        self.wire = round(model.hidden_size * WIRE_BYTES_PER_VALUE / box.link_bytes_per_second * PICOSECONDS)
        self._fits_until: dict[int, int] = {}

    def picoseconds(self, start: int, end: int) -> int:
        """One decode step of a range, head and link to the next stage included; 0 of an empty one."""
        if start == end:
            return 0
        head = self.head if self._table.has_head(start, end) else 0
        return self.work[end] - self.work[start] + head + self.wire

    def fits_until(self, start: int) -> int:
        """The furthest end of a range that the box's memory holds; `start` itself if not even one layer."""
        if start not in self._fits_until:
            low, high = start, self._table.layers  # low fits; needs never shrink as a range grows
            while low < high:
                middle = (low + high + 1) // 2
                if self._box.missing_bytes(self._table.needed_bytes(start, middle)):
                    high = middle - 1
                else:
                    low = middle
            self._fits_until[start] = low
        return self._fits_until[start]

    def reach(self, start: int, limit: int | None) -> int:
        """The furthest end of a range that memory holds and that takes at most `limit` picoseconds (None: any time)."""
        end = self.fits_until(start)
        if limit is None or end == start:
            return end
        left = limit - self.wire - (self.head if start == 0 and self._table.model.tied else 0)
        end = min(end, max(start, bisect_right(self.work, self.work[start] + left) - 1)) if left >= 0 else start
        if start < end == self._table.layers and self.picoseconds(start, end) > limit:
            end -= 1  # the untied head comes with the last layer
        return end
