"""All weights that a stage process holds, by piece, shared by the engines of every epoch.

A planned switch runs two epochs at once, and layers for a takeover wait beside those that serve: a piece that both
need is in memory once.
"""

from __future__ import annotations

import threading
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

    @property
    def held(self) -> frozenset[Piece]:
        """What is in memory."""
        with self._lock:
            pieces = [Piece("layer", index) for index in self._layers]
            if self._head is not None:
                pieces.append(Piece("head"))
            if self._embedding is not None:
                pieces.append(Piece("embedding"))
        return frozenset(pieces)

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

    def needed_bytes(self, pieces: Iterable[Piece]) -> int:
        """Memory that loading the missing pieces takes, one after another: all as held, and the largest conversion.

        By the planner's formulas (`fleet/planning/weights.py`).
        """
        costs = [self._cost(piece) for piece in self.missing(pieces)]
        return sum(cost.held for cost in costs) + max((cost.converting for cost in costs), default=0)

    def load(self, piece: Piece) -> None:
        """Verify a piece and make it ready; nothing happens when it is held. Blocks; called from one thread.

        Raises:
            FleetError: its shard is missing, damaged or of another shape.
        """
        if piece in self.held:
            return
        if piece.kind == "layer":
            layer = load_layer(self._directory, self._manifest, piece.index, self.kernel)
            with self._lock:
                self._layers[piece.index] = layer
        elif piece.kind == "head":
            head, rows = load_head(self._directory, self._manifest, self.kernel)
            with self._lock:
                self._head, self._head_rows = head, rows
        else:
            with self._lock:
                verified = self._head_rows
            embedding = verified or open_embedding(self._directory, self._manifest)
            with self._lock:
                self._embedding = embedding

    def weights(self, stage: StagePlan) -> StageWeights:
        """What a stage holds.

        Raises:
            KeyError: a piece is not in memory; it names the first.
        """
        if missing := self.missing(pieces_of(stage)):
            raise KeyError(str(missing[0]))
        with self._lock:
            return StageWeights(
                [self._layers[index] for index in range(stage.start, stage.end)],
                self._embedding if stage.embedding else None,
                self._head if stage.head else None,
            )

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

    def _cost(self, piece: Piece) -> WeightBytes:
        if piece.kind == "layer":
            return layer_weights(self.config, self.kernel)
        if piece.kind == "head":
            return head_weights(self.config, self.kernel)
        return WeightBytes(0, 0, 0)  # rows are read from the file
