"""Weights by piece: loaded once, shared, dropped; counted as the planner counts them."""

from __future__ import annotations

import shutil
import threading
import weakref
from pathlib import Path

import pytest

from fleet.errors import FleetError
from fleet.planning.plan import StagePlan
from fleet.planning.weights import KernelName, head_weights, layer_weights
from stage_runtime.checkpoint.manifest import read_manifest
from stage_runtime.link.messages import GenerateRequest, SamplingParameters
from stage_runtime.model.store import Piece, WeightStore, pieces_of
from tests.stage_runtime.engines import LocalRing, full_store
from tests.stage_runtime.tiny import LAYERS, TinyModel

FIRST = StagePlan("box1", 0, 2, embedding=True, head=True)
MIDDLE = StagePlan("box2", 2, 4, embedding=False, head=False)
SPARE = StagePlan("box4", 0, 0, embedding=False, head=False)
HEAD, EMBEDDING = Piece("head"), Piece("embedding")


def empty(model: TinyModel, kernel: KernelName = "packed") -> WeightStore:
    return WeightStore(model.directory, read_manifest(model.directory, model.digest), kernel)


def test_pieces_come_in_the_order_to_load_them() -> None:
    assert pieces_of(FIRST) == (Piece("layer", 0), Piece("layer", 1), HEAD, EMBEDDING)
    assert pieces_of(MIDDLE) == (Piece("layer", 2), Piece("layer", 3))
    assert pieces_of(SPARE) == ()


@pytest.mark.parametrize("kernel", ["packed", "dense"])
@pytest.mark.parametrize("tied", [True, False])
def test_what_a_load_needs_is_what_is_held_then(tied: bool, kernel: KernelName, request: pytest.FixtureRequest) -> None:
    store = empty(request.getfixturevalue("tied_model" if tied else "untied_model"), kernel)
    pieces = pieces_of(FIRST)
    needed = store.needed_bytes(pieces)
    layer, head = layer_weights(store.config, kernel), head_weights(store.config, kernel)
    assert needed == 2 * layer.held + head.held + max(layer.converting, head.converting)
    store.load(pieces[0])
    assert store.missing(pieces) == pieces[1:]
    assert store.needed_bytes(pieces) == needed - layer.held
    for piece in pieces:
        store.load(piece)
    assert store.missing(pieces) == ()
    assert store.needed_bytes(pieces) == 0
    assert store.held == set(pieces)
    assert store.weight_bytes == needed - max(layer.converting, head.converting)


def test_epochs_share_pieces(tied_model: TinyModel) -> None:
    store = full_store(tied_model.directory, tied_model.digest)
    one, other = store.weights(FIRST), store.weights(StagePlan("box1", 0, 4, embedding=True, head=True))
    assert one.layers[1] is other.layers[1]
    assert one.head is other.head
    assert one.embedding is other.embedding
    held = store.weights(MIDDLE).layers[0]
    store.load(Piece("layer", 2))
    assert store.weights(MIDDLE).layers[0] is held, "what is held is not loaded again"


def test_a_stage_whose_pieces_are_not_there_names_the_first(tied_model: TinyModel) -> None:
    store = empty(tied_model)
    with pytest.raises(KeyError, match="layer 2"):
        store.weights(MIDDLE)
    for index in range(2):
        store.load(Piece("layer", index))
    with pytest.raises(KeyError, match="head"):
        store.weights(FIRST)
    assert store.weights(SPARE).layers == []


def test_what_is_not_kept_is_dropped_once_nobody_uses_it(tied_model: TinyModel) -> None:
    store = full_store(tied_model.directory, tied_model.digest)
    weights = store.weights(FIRST)
    assert weights.embedding is not None
    layer, rows = weakref.ref(weights.layers[0]), weakref.ref(weights.embedding)
    descriptor = weights.embedding.descriptor
    store.keep(pieces_of(MIDDLE))
    assert store.held == set(pieces_of(MIDDLE))
    assert store.weight_bytes == 2 * layer_weights(store.config, "packed").held
    assert weights.embedding.read([0]).shape == (1, store.config.hidden_size), "its engine still runs"
    del weights
    assert (layer(), rows()) == (None, None)
    assert not Path(f"/proc/self/fd/{descriptor}").exists()


def test_a_tied_head_has_verified_the_embedding(tied_model: TinyModel, tmp_path: Path) -> None:
    directory = Path(shutil.copytree(tied_model.directory, tmp_path / "model"))
    store = WeightStore(directory, read_manifest(directory, tied_model.digest), "packed")
    store.load(HEAD)
    (directory / "embedding.safetensors").unlink()
    store.load(EMBEDDING)  # from the file that the head has open
    store.keep([EMBEDDING])
    assert store.weights(StagePlan("b", 0, 0, embedding=True, head=False)).embedding is not None
    store.keep([])
    with pytest.raises(FleetError, match=r"embedding\.safetensors"):
        store.load(EMBEDDING)


def test_a_damaged_shard_leaves_the_store_as_it_was(tied_model: TinyModel, tmp_path: Path) -> None:
    directory = Path(shutil.copytree(tied_model.directory, tmp_path / "model"))
    store = WeightStore(directory, read_manifest(directory, tied_model.digest), "packed")
    store.load(Piece("layer", 0))
    shard = directory / "layer-001.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1])
    with pytest.raises(FleetError, match=r"layer-001\.safetensors"):
        store.load(Piece("layer", 1))
    assert store.held == {Piece("layer", 0)}


@pytest.mark.parametrize("tied", [True, False])
def test_what_came_quickly_is_packed_in_place_while_engines_use_it(tied: bool, request: pytest.FixtureRequest) -> None:
    model: TinyModel = request.getfixturevalue("tied_model" if tied else "untied_model")
    packed = full_store(model.directory, model.digest)
    store = empty(model)
    pieces = pieces_of(StagePlan("all", 0, LAYERS, embedding=True, head=True))
    needed = store.needed_bytes(pieces, quickly=True)
    for piece in pieces:
        store.load(piece, quickly=True)
    assert store.provisional == pieces[:-1], "rows of the embedding have one form"
    layer, head = layer_weights(store.config, "dense"), head_weights(store.config, "dense")
    assert store.weight_bytes == LAYERS * layer.held + head.held
    assert max(store.weight_bytes, packed.weight_bytes) <= needed
    rings = [LocalRing(store, (0, 2, LAYERS)), LocalRing(store, (0, 3, LAYERS)), LocalRing(packed, (0, LAYERS))]
    question = GenerateRequest(1, "r", (5, 6, 7), 20, (), SamplingParameters())
    for ring in rings:
        ring.scheduler.submit(question, "gateway")
        ring.run(4)
    for piece in store.provisional:
        store.repack(piece)
        for ring in rings:
            ring.run(1)
    assert store.provisional == ()
    assert store.weight_bytes == packed.weight_bytes
    for ring in reversed(rings):
        ring.run()
        assert ring.tokens == rings[-1].tokens
        assert len(ring.tokens[1]) == 20
        assert ring.weight_bytes == packed.weight_bytes, "its engines use the packed form"


def test_a_provisional_piece_can_be_dropped(tied_model: TinyModel) -> None:
    store = empty(tied_model)
    for piece in pieces_of(FIRST):
        store.load(piece, quickly=True)
    store.keep([Piece("layer", 1)])
    assert store.provisional == (Piece("layer", 1),)
    store.repack(Piece("layer", 0))
    assert store.held == {Piece("layer", 1)}


def test_a_shard_that_is_damaged_by_now_leaves_the_dense_form(tied_model: TinyModel, tmp_path: Path) -> None:
    directory = Path(shutil.copytree(tied_model.directory, tmp_path / "model"))
    store = WeightStore(directory, read_manifest(directory, tied_model.digest), "packed")
    piece = Piece("layer", 0)
    store.load(piece, quickly=True)
    (directory / "layer-000.safetensors").unlink()
    with pytest.raises(FleetError, match=r"layer-000\.safetensors"):
        store.repack(piece)
    assert store.held == {piece}
    assert store.provisional == (piece,)


def test_nothing_is_provisional_where_the_kernel_is_dense(tied_model: TinyModel) -> None:
    store = empty(tied_model, "dense")
    pieces = pieces_of(FIRST)
    assert store.needed_bytes(pieces, quickly=True) == store.needed_bytes(pieces)
    for piece in pieces:
        store.load(piece, quickly=True)
    assert store.provisional == ()


def test_readers_see_whole_stages_while_another_thread_loads_and_drops(tied_model: TinyModel) -> None:
    store = empty(tied_model, "dense")
    stage = StagePlan("b", 0, LAYERS, embedding=True, head=True)
    problems: list[BaseException] = []

    def churn() -> None:
        try:
            for _ in range(3):
                for piece in pieces_of(stage):
                    store.load(piece)
                store.keep([Piece("layer", 0)])
        except BaseException as error:  # told by the test
            problems.append(error)

    thread = threading.Thread(target=churn)
    thread.start()
    while thread.is_alive():
        assert store.weight_bytes >= 0
        try:
            weights = store.weights(stage)
        except KeyError as error:
            assert str(error.args[0]).startswith(("layer", "head", "embedding"))
        else:
            assert len(weights.layers) == LAYERS
            assert weights.head is not None
    thread.join()
    assert problems == []
