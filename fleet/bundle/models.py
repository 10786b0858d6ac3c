"""The models of a bundle, as planning needs them."""

from __future__ import annotations

from fleet.bundle.manifest import Manifest
from fleet.bundle.model_info import ModelInfo, read_model_json
from fleet.errors import FleetError


def read_models(manifest: Manifest) -> dict[str, ModelInfo]:
    """Read every model.json of a bundle: inventory name → model.

    Raises:
        FleetError: a model.json is missing, damaged, or not the one that the manifest names.
    """
    models = {}
    for name, bundled in manifest.models.items():
        info = read_model_json(manifest.model_directory(name))
        if info.digest != bundled.digest:
            raise FleetError(
                f"{info.directory}: model.json has digest {info.digest[:16]}, the manifest says {bundled.digest[:16]}",
                hint="run `fleet bundle` again; it makes only what is missing",
            )
        models[name] = info
    return models
