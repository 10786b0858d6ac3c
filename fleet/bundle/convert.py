"""A model from Hugging Face safetensors or GGUF into the bundle's model directory: one shard a decoder layer.

Written aside in `.converting-<key>/`, synced once and renamed into place. An interrupted conversion keeps its finished
shards (their digests stand in `progress.json`) and goes on with the next one. Equal input gives an equal digest.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fleet.bundle.files import (
    Report,
    canonical_json,
    fsync_directory,
    fsync_tree,
    replace_file,
    require_free_space,
    saying_when_quiet,
    sha256_file,
    size_text,
    write_atomically,
)
from fleet.bundle.gguf_source import read_gguf
from fleet.bundle.huggingface_source import read_huggingface
from fleet.bundle.model_info import EMBEDDING_FILE, FINAL_FILE, MODEL_FILE, MODEL_SCHEMA, layer_file, read_model_json
from fleet.bundle.safetensors_file import write_safetensors
from fleet.bundle.source_model import (
    DTYPE_BYTES,
    SourceModel,
    SourceTensor,
    check_tensors,
    embedding_shapes,
    final_shapes,
    layer_shapes,
)
from fleet.errors import FleetError

CONVERTER_VERSION = 2
"""Part of the key of finished conversions: raise it whenever equal input would give other bytes."""

PROGRESS_SECONDS = 5.0
"""Between two lines about how far a conversion is."""


@dataclass(frozen=True)
class ConvertedModel:
    """What `convert_model` made or found.

    Attributes:
        digest: SHA-256 of model.json, hex; it names every other file by digest.
        directory: where the files lie; its name is the digest's first 16 hex digits.
        reused: a finished conversion of the same source was there already.
    """

    digest: str
    directory: Path
    reused: bool


@dataclass(frozen=True)
class _Shard:
    name: str
    kind: str
    layer: int | None
    write: Callable[[Path], tuple[str, int]]


def convert_model(
    source: Path, models_directory: Path, report: Report, sha256: Callable[[Path], str] = sha256_file
) -> ConvertedModel:
    """Convert a model, or find it already converted.

    Args:
        source: a Hugging Face directory with safetensors, or a GGUF file.
        models_directory: `models/` of the bundle.
        report: takes lines of progress.
        sha256: gives a file's digest (a cache may stand behind it).

    Raises:
        FleetError: the source is missing, damaged or not supported; or the disk is too small.
    """
    if not source.exists():
        raise FleetError(
            f"{source} does not exist", hint="source.path is relative to the inventory file; give a directory or .gguf"
        )
    with saying_when_quiet(report, f"reading {source.name}"):
        model = read_huggingface(source, sha256) if source.is_dir() else read_gguf(source, sha256)
    key = hashlib.sha256(canonical_json([CONVERTER_VERSION, model.name, model.sha256])).hexdigest()[:16]
    finished = models_directory / f".finished-{key}"
    found = _finished(finished, models_directory, sha256)
    if found is not None:
        return found
    check_tensors(model, str(source))

    workspace = models_directory / f".converting-{key}"
    workspace.mkdir(parents=True, exist_ok=True)
    require_free_space(models_directory, _bytes(model.tensors), f"converting {source.name}")
    entries = _write_shards(model, workspace, report)
    digest = _write_model_json(model, entries, workspace)
    directory = models_directory / digest[:16]
    (workspace / "progress.json").unlink()
    with saying_when_quiet(report, "writing to disk"):
        fsync_tree(workspace)
    if directory.exists():  # a run that stopped between the rename and the record left it
        shutil.rmtree(directory)
    workspace.rename(directory)
    fsync_directory(models_directory)
    write_atomically(finished, digest.encode())
    return ConvertedModel(digest, directory, reused=False)


def _finished(record: Path, models_directory: Path, sha256: Callable[[Path], str]) -> ConvertedModel | None:
    """The result of an earlier conversion, if its files are still those that model.json names."""
    if not record.exists():
        return None
    digest = record.read_text(encoding="ascii")
    directory = models_directory / digest[:16]
    with contextlib.suppress(FleetError, OSError):
        info = read_model_json(directory)
        whole = all(sha256(directory / file.name) == file.sha256 for file in info.files)
        if info.digest == digest and whole:
            return ConvertedModel(digest, directory, reused=True)
    if directory.exists():
        shutil.rmtree(directory)
    return None


def _bytes(tensors: Mapping[str, SourceTensor]) -> int:
    return sum(math.prod(tensor.shape) * DTYPE_BYTES[tensor.dtype] for tensor in tensors.values())


def _shards(model: SourceModel) -> list[_Shard]:
    def tensors(names: Mapping[str, object]) -> Callable[[Path], tuple[str, int]]:
        chosen = {name: model.tensors[name] for name in names}
        return lambda path: write_safetensors(path, chosen)

    def text(data: bytes) -> Callable[[Path], tuple[str, int]]:
        def write(path: Path) -> tuple[str, int]:
            replace_file(path, data)
            return hashlib.sha256(data).hexdigest(), len(data)

        return write

    shards = [_Shard(EMBEDDING_FILE, "embedding", None, tensors(embedding_shapes(model.config)))]
    for layer in range(model.config["num_hidden_layers"]):
        shards.append(_Shard(layer_file(layer), "layer", layer, tensors(layer_shapes(model.config, layer))))
    shards.append(_Shard(FINAL_FILE, "final", None, tensors(final_shapes(model.config))))
    shards.append(_Shard("tokenizer.json", "tokenizer", None, text(model.tokenizer_json)))
    if model.chat_template is not None:
        shards.append(_Shard("chat_template.jinja", "chat_template", None, text(model.chat_template.encode())))
    return shards


def _write_shards(model: SourceModel, workspace: Path, report: Report) -> list[dict[str, Any]]:
    """Write what is missing; keep what an interrupted run finished with the right digest."""
    journal = workspace / "progress.json"
    done: dict[str, list[Any]] = {}
    if journal.exists():
        with contextlib.suppress(ValueError):  # a damaged journal only costs the work again
            done = json.loads(journal.read_bytes())
    shards = _shards(model)
    report(f"  writing {model.name}: {size_text(_bytes(model.tensors))} in {len(shards)} files")
    told = time.monotonic()
    entries: list[dict[str, Any]] = []
    for shard in shards:
        path = workspace / shard.name
        known = done.get(shard.name)
        if known is None or not path.exists() or sha256_file(path) != known[0]:
            with saying_when_quiet(report, f"writing {shard.name}"):
                done[shard.name] = list(shard.write(path))
            replace_file(journal, canonical_json(done))
        sha256, size_bytes = done[shard.name]
        entries.append(
            {"name": shard.name, "kind": shard.kind, "layer": shard.layer, "sha256": sha256, "bytes": size_bytes}
        )
        if time.monotonic() - told >= PROGRESS_SECONDS:
            told = time.monotonic()
            report(f"  … {len(entries)} of {len(shards)} files ({shard.name})")
    return entries


def _write_model_json(model: SourceModel, entries: list[dict[str, Any]], workspace: Path) -> str:
    data = {
        "schema": MODEL_SCHEMA,
        "name": model.name,
        "architecture": "llama",
        "config": dict(model.config),
        "bos_token_id": model.bos_token_id,
        "eos_token_ids": list(model.eos_token_ids),
        "source": {"name": model.name, "sha256": model.sha256},
        "files": entries,
    }
    encoded = (json.dumps(data, sort_keys=True, indent=1) + "\n").encode()
    replace_file(workspace / MODEL_FILE, encoded)
    return hashlib.sha256(encoded).hexdigest()
