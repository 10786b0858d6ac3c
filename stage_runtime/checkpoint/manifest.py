"""`model.json`: what a model directory holds and the digests of every file."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fleet.bundle.model_info import ModelConfig
from fleet.errors import ExitCode, FleetError

MODEL_SCHEMA = 1
MODEL_JSON_BYTES = 4 * 1024 * 1024
PROVISION_HINT = "run `fleet provision INVENTORY` to mend the box's copy"


LlamaConfig = ModelConfig  # shape and constants of a Llama-family decoder; the bundle writes what a stage reads


@dataclass(frozen=True)
class FileEntry:
    """One file of the model directory."""

    name: str
    kind: str
    layer: int | None
    sha256: str
    bytes: int


@dataclass(frozen=True)
class ModelManifest:
    """A parsed and digest-checked `model.json`."""

    name: str
    config: LlamaConfig
    files: tuple[FileEntry, ...]

    def layer_file(self, layer: int) -> FileEntry:
        """The shard of a decoder layer.

        Raises:
            FleetError: the manifest names none.
        """
        return self._single("layer", layer)

    def file(self, kind: str) -> FileEntry:
        """The file of a kind: "embedding" or "final".

        Raises:
            FleetError: the manifest names none.
        """
        return self._single(kind, None)

    def _single(self, kind: str, layer: int | None) -> FileEntry:
        for entry in self.files:
            if entry.kind == kind and entry.layer == layer:
                return entry
        what = kind if layer is None else f"{kind} {layer}"
        raise FleetError(f"model.json of {self.name} names no file for {what}", hint="run `fleet bundle` again")


def read_manifest(directory: Path, digest: str) -> ModelManifest:
    """Read and check `model.json`.

    Args:
        directory: the model directory.
        digest: expected SHA-256 of the file's bytes, hex.

    Raises:
        FleetError: missing, another digest, or not what this runtime can serve.
    """
    path = directory / "model.json"
    try:
        with path.open("rb") as file:
            data = file.read(MODEL_JSON_BYTES + 1)
    except OSError as error:
        raise FleetError(f"{path}: {error.strerror}", hint=PROVISION_HINT) from None
    found = hashlib.sha256(data).hexdigest()
    if found != digest:
        raise FleetError(f"{path}: SHA-256 is {found}, expected the model digest {digest}", hint=PROVISION_HINT)
    try:
        return _parse(json.loads(data))
    except (ValueError, KeyError, TypeError) as error:
        raise FleetError(f"{path}: {error!r}", hint="run `fleet bundle` with this version of fleet") from None


def _parse(raw: dict[str, Any]) -> ModelManifest:
    if raw["schema"] != MODEL_SCHEMA or raw["architecture"] != "llama":
        raise FleetError(
            f"model.json has schema {raw['schema']!r} and architecture {raw['architecture']!r}; "
            f"this runtime serves schema {MODEL_SCHEMA} and architecture 'llama'",
            exit_code=ExitCode.INVALID_INVENTORY,
        )
    files = tuple(FileEntry(**entry) for entry in raw["files"])
    for entry in files:
        if Path(entry.name).name != entry.name:
            raise ValueError(f"file name {entry.name!r} leaves the directory")
    return ModelManifest(raw["name"], LlamaConfig(**raw["config"]), files)
