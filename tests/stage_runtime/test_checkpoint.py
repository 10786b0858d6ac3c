"""Shards: damaged ones are refused by name and digest; only own ones are touched, and mapped once."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from fleet.errors import FleetError
from fleet.planning.plan import StagePlan
from stage_runtime.checkpoint.manifest import read_manifest
from stage_runtime.checkpoint.shards import open_rows
from stage_runtime.model.load import EMBEDDING
from tests.stage_runtime.engines import load_stage
from tests.stage_runtime.tiny import TinyModel, make_model

MIDDLE = StagePlan("box2", 2, 4, embedding=False, head=False)
FIRST = StagePlan("box1", 0, 2, embedding=True, head=True)
LAST = StagePlan("box3", 4, 6, embedding=False, head=True)


@pytest.fixture
def copy(tied_model: TinyModel, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tied_model.directory, tmp_path / "model"))


def flip_bit(path: Path, offset: int) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 4
    path.write_bytes(data)


def test_a_flipped_bit_is_refused_by_name_and_digests(tied_model: TinyModel, copy: Path) -> None:
    shard = copy / "layer-003.safetensors"
    good = hashlib.sha256(shard.read_bytes()).hexdigest()
    flip_bit(shard, -1)
    bad = hashlib.sha256(shard.read_bytes()).hexdigest()
    with pytest.raises(FleetError) as error:
        load_stage(copy, tied_model.digest, MIDDLE, "dense")
    assert all(part in error.value.message for part in ("layer-003.safetensors", good, bad))
    assert "fleet provision" in error.value.hint


def test_a_truncated_shard_is_refused_by_name_and_size(tied_model: TinyModel, copy: Path) -> None:
    shard = copy / "layer-002.safetensors"
    size = shard.stat().st_size
    shard.write_bytes(shard.read_bytes()[:-1])
    with pytest.raises(FleetError, match=rf"layer-002.safetensors: {size - 1} bytes, expected {size}"):
        load_stage(copy, tied_model.digest, MIDDLE, "dense")


@pytest.mark.parametrize(
    ("name", "stage"), [("embedding", FIRST), ("final", FIRST), ("final", LAST), ("embedding", LAST)]
)
def test_ends_are_verified_too(tied_model: TinyModel, copy: Path, name: str, stage: StagePlan) -> None:
    flip_bit(copy / f"{name}.safetensors", -3)
    with pytest.raises(FleetError, match=f"{name}.safetensors: SHA-256"):
        load_stage(copy, tied_model.digest, stage, "dense")


def test_a_missing_shard_is_named(tied_model: TinyModel, copy: Path) -> None:
    (copy / "layer-002.safetensors").unlink()
    with pytest.raises(FleetError, match=r"layer-002\.safetensors: No such file"):
        load_stage(copy, tied_model.digest, MIDDLE, "dense")


def test_another_manifest_is_refused_with_both_digests(tied_model: TinyModel, copy: Path) -> None:
    flip_bit(copy / "model.json", 20)
    with pytest.raises(FleetError, match=tied_model.digest):
        read_manifest(copy, tied_model.digest)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"schema": 2}, "schema 2"),
        ({"architecture": "mamba"}, "mamba"),
        ({"config": {}}, "missing"),
        ({"files": [{"name": "../x", "kind": "layer", "layer": 0, "sha256": "", "bytes": 1}]}, "leaves the directory"),
    ],
)
def test_manifests_that_fit_their_digest_but_not_this_runtime(
    copy: Path, change: dict[str, object], reason: str
) -> None:
    data = json.dumps(json.loads((copy / "model.json").read_text()) | change).encode()
    (copy / "model.json").write_bytes(data)
    with pytest.raises(FleetError, match=reason):
        read_manifest(copy, hashlib.sha256(data).hexdigest())


def test_a_middle_stage_needs_no_other_file(tied_model: TinyModel, copy: Path) -> None:
    for path in copy.iterdir():
        if path.name not in {"model.json", "layer-002.safetensors", "layer-003.safetensors"}:
            path.unlink()
    weights = load_stage(copy, tied_model.digest, MIDDLE).weights(MIDDLE)
    assert (len(weights.layers), weights.embedding, weights.head) == (2, None, None)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_rows_equal_the_whole_matrix(dtype: torch.dtype, tmp_path: Path) -> None:
    model = make_model(tmp_path / "model", tied=True, dtype=dtype)
    weight = model.reference.get_input_embeddings().weight
    rows = open_rows(model.directory / "embedding.safetensors", EMBEDDING, (weight.shape[0], weight.shape[1]))
    assert torch.equal(rows.read([0, 319, 7, 7]), weight[[0, 319, 7, 7]])


MAPPED = """
import sys
from pathlib import Path
from fleet.planning.plan import StagePlan
from stage_runtime.checkpoint.manifest import read_manifest
from stage_runtime.model.store import WeightStore, pieces_of
directory, digest, kernel = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
store = WeightStore(directory, read_manifest(directory, digest), kernel)
for piece in pieces_of(StagePlan("b", 2, 4, False, False)):
    store.load(piece)
print(*sorted({Path(line.split()[-1]).name for line in open("/proc/self/maps") if ".safetensors" in line}))
"""


@pytest.mark.parametrize(
    ("dtype", "kernel", "mapped"),
    [
        (torch.float32, "dense", "layer-002.safetensors layer-003.safetensors"),
        (torch.float16, "dense", ""),
        (torch.float16, "packed", ""),
    ],
)
def test_weights_are_held_once(dtype: torch.dtype, kernel: str, mapped: str, tmp_path: Path) -> None:
    """FP32 shards are used where they are mapped; converted and packed ones keep no mapping beside the copy."""
    model = make_model(tmp_path / "model", tied=True, dtype=dtype)
    command = [sys.executable, "-c", MAPPED, str(model.directory), model.digest, kernel]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip() == mapped
