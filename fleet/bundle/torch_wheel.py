"""torch's wheel of one target in the bundle: fetched once, kept while the pin and the file are the same."""

from __future__ import annotations

import json
import urllib.parse
from pathlib import Path

from fleet.bundle.context import BuildContext
from fleet.bundle.files import DigestCache, canonical_json, write_atomically
from fleet.bundle.target import Target
from fleet.bundle.torch_source import TorchBuild, TorchPin, fetch_torch, find_torch


def obtain_torch(pin: TorchPin, target: Target, context: BuildContext) -> Path:
    """The wheel's path below `wheels/<target>`, fetched if it is not there yet.

    Raises:
        FleetError: there is no such build, it is a CUDA build, or it cannot be fetched.
    """
    cache = context.cache
    directory = context.bundle / "wheels" / target.name
    record = context.state / f"torch-{target.name}.json"
    key = [pin.version, pin.source, str(pin.location)]
    if pin.source == "index" and record.exists():  # files are looked at again: they may have been replaced
        known = json.loads(record.read_bytes())
        path = directory / str(known["file"])
        if known["pin"] == key and path.is_file() and cache.sha256(path) == known["sha256"]:
            return path
    build = find_torch(pin, target, context.pip)
    path = directory / build.file
    expected = _expected_sha256(build, cache)
    if expected is None or not path.is_file() or cache.sha256(path) != expected:
        path = fetch_torch(build, target, directory, context.pip)
    write_atomically(record, canonical_json({"pin": key, "file": path.name, "sha256": cache.sha256(path)}))
    return path


def _expected_sha256(build: TorchBuild, cache: DigestCache) -> str | None:
    parts = urllib.parse.urlsplit(build.url)
    if parts.scheme == "file":
        return cache.sha256(Path(urllib.parse.unquote(parts.path)))
    return build.sha256
