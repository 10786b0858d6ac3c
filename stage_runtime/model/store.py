"""All weights that a stage process holds, by piece, shared by the engines of every epoch.

A planned switch runs two epochs at once, and layers for a takeover wait beside those that serve: a piece that both
need is in memory once. When a takeover finds a piece missing, answers wait for it: then it comes in dense form first
and is packed while they go on. Measured for 10 layers, head and embedding of SmolLM2-135M, one thread of a 2-core
x86-64, verifying included: 0.22 s dense, 0.8 s packed (0.47 s and 1.98 s with the cores busy, medians of 9).
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from fleet.planning.plan import StagePlan
from fleet.planning.weights import KernelName, WeightBytes, head_weights, layer_weights
from stage_runtime.checkpoint.manifest import ModelManifest
from stage_runtime.checkpoint.shards import RowReader
from stage_runtime.model.llama import Head, Layer
from stage_runtime.model.load import StageWeights, load_head, load_layer, open_embedding


@dataclass(frozen=True)
class Piece:
    """What is loaded and dropped as one.

    Attributes:
        kind: decoder layer; final norm and LM head; token embedding.
        index: of the layer, else 0.
    """

    kind: Literal["layer", "head", "embedding"]
    index: int = 0

    def __str__(self) -> str:
        return f"layer {self.index}" if self.kind == "layer" else self.kind


def pieces_of(stage: StagePlan) -> tuple[Piece, ...]:
    """What a stage holds, in the order to load it: a tied head before the embedding, which it has verified then."""
    layers = tuple(Piece("layer", index) for index in range(stage.start, stage.end))
    return (*layers, *([Piece("head")] if stage.head else []), *([Piece("embedding")] if stage.embedding else []))


class WeightStore:
    """Pieces in memory. One thread loads, any thread reads; the lock is never held while something is loaded.

    Args:
        directory: the model directory.
        manifest: its `model.json`.
        kernel: in whose form weights are held.

    Attributes:
        config: the model.
        kernel: see above.
    """

    def __init__(self, directory: Path, manifest: ModelManifest, kernel: KernelName) -> None:
        self.config = manifest.config
        self.kernel = kernel
        self._directory = directory
        self._manifest = manifest
        self._lock = threading.Lock()
        self._layers: dict[int, Layer] = {}
        self._head: Head | None = None
        self._embedding: RowReader | None = None
        # Of the embedding's file as the tied head verified it; as long as the head is held, the embedding is ready.
        self._head_rows: RowReader | None = None
        self._provisional: set[Piece] = set()
        self._in_use: weakref.WeakSet[StageWeights] = weakref.WeakSet()

    @property
    def held(self) -> frozenset[Piece]:
        """What is in memory."""
        with self._lock:
            return self._held()

    @property
    def weight_bytes(self) -> int:
        """Bytes of everything held; the embedding is read from its file and counts nothing."""
        with self._lock:
            layers, head = list(self._layers.values()), self._head
        return sum(layer.weight_bytes for layer in layers) + (head.weight_bytes if head else 0)

    def missing(self, pieces: Iterable[Piece]) -> tuple[Piece, ...]:
        """Those of the pieces that are not in memory, in the same order."""
        held = self.held
        return tuple(piece for piece in pieces if piece not in held)

    @property
    def provisional(self) -> tuple[Piece, ...]:
        """Pieces that were loaded quickly and wait for `repack`, layers in order first."""
        with self._lock:
            pieces = list(self._provisional)
        return tuple(sorted(pieces, key=lambda piece: (piece.kind != "layer", piece.index)))

    def needed_bytes(self, pieces: Iterable[Piece], *, quickly: bool = False) -> int:
        """Most memory that loading the missing pieces takes, one after another, and repacking them if `quickly`.

        By the planner's formulas (`fleet/planning/weights.py`).
        """
        missing = self.missing(pieces)
        costs = [self._cost(piece, self.kernel) for piece in missing]
        if not quickly or self.kernel == "dense":
            return sum(cost.held for cost in costs) + max((cost.converting for cost in costs), default=0)
        dense = [self._cost(piece, "dense") for piece in missing]
        held = sum(max(pair[0].held, pair[1].held) for pair in zip(costs, dense, strict=True))
        return held + max((cost.held + cost.converting for cost in costs), default=0)

    def load(self, piece: Piece, *, quickly: bool = False) -> None:
        """Verify a piece and make it ready; nothing happens when it is held. Blocks; called from one thread.

        Args:
            quickly: in dense form, ready in a quarter of the time; it computes the same, more slowly with many rows;
                `repack` puts the packed form in its place later. Without effect where the kernel is dense anyway.

        Raises:
            FleetError: its shard is missing, damaged or of another shape.
        """
        if piece in self.held:
            return
        if piece.kind == "embedding":
            with self._lock:
                verified = self._head_rows
            embedding = verified or open_embedding(self._directory, self._manifest)
            with self._lock:
                self._embedding = embedding
            return
        kernel: KernelName = "dense" if quickly else self.kernel
        made, rows = self._make(piece, kernel)
        with self._lock:
            self._put(piece, made)
            self._head_rows = rows or self._head_rows
            if kernel != self.kernel:
                self._provisional.add(piece)

    def repack(self, piece: Piece) -> None:
        """Put the packed form of a provisional piece in its place, for every engine. Blocks, from the loading thread.

        Raises:
            FleetError: its shard is missing or damaged by now; the dense form stays.
        """
        if piece not in self.provisional:
            return
        made, _ = self._make(piece, self.kernel)
        with self._lock:
            if piece not in self._provisional:  # dropped meanwhile
                return
            old = self._layers[piece.index] if piece.kind == "layer" else self._head
            self._put(piece, made)
            self._provisional.discard(piece)
            for weights in self._in_use:
                weights.replace(old, made)

    def weights(self, stage: StagePlan) -> StageWeights:
        """What a stage holds.

        Raises:
            KeyError: a piece is not in memory; it names the first.
        """
        with self._lock:
            held = self._held()  # under the same lock: `keep` on another thread may drop a piece at any time
            for piece in pieces_of(stage):
                if piece not in held:
                    raise KeyError(str(piece))
            weights = StageWeights(
                [self._layers[index] for index in range(stage.start, stage.end)],
                self._embedding if stage.embedding else None,
                self._head if stage.head else None,
            )
            self._in_use.add(weights)
        return weights

    def keep(self, pieces: Collection[Piece]) -> None:
        """Drop everything else. Memory goes once no engine uses it any more.

        A piece that is being loaded meanwhile comes in all the same: call again after the load.
        """
        with self._lock:
            self._layers = {index: layer for index, layer in self._layers.items() if Piece("layer", index) in pieces}
            if Piece("head") not in pieces:
                self._head = self._head_rows = None
            if Piece("embedding") not in pieces:
                self._embedding = None
            self._provisional.intersection_update(pieces)

    def _held(self) -> frozenset[Piece]:
        """With the lock held."""
        pieces = [Piece("layer", index) for index in self._layers]
        if self._head is not None:
            pieces.append(Piece("head"))
        if self._embedding is not None:
            pieces.append(Piece("embedding"))
        return frozenset(pieces)

    def _make(self, piece: Piece, kernel: KernelName) -> tuple[Layer | Head, RowReader | None]:
        if piece.kind == "layer":
            return load_layer(self._directory, self._manifest, piece.index, kernel), None
        return load_head(self._directory, self._manifest, kernel)

    def _put(self, piece: Piece, made: Layer | Head) -> None:
        if isinstance(made, Layer):
            self._layers[piece.index] = made
        else:
            self._head = made

    def _cost(self, piece: Piece, kernel: KernelName) -> WeightBytes:
        if piece.kind == "layer":
            return layer_weights(self.config, kernel)
        if piece.kind == "head":
            return head_weights(self.config, kernel)
        return WeightBytes(0, 0, 0)  # rows are read from the file
