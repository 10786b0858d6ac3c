"""Small wheels on disk with metadata to inspect: what an index or a vendor's directory would offer."""

from __future__ import annotations

import zipfile
from collections.abc import Sequence
from pathlib import Path


def write_wheel(
    directory: Path,
    name: str,
    version: str,
    requires: Sequence[str] = (),
    *,
    tag: str = "py3-none-any",
    extras: Sequence[str] = (),
) -> Path:
    """A wheel with one empty module, valid for pip."""
    directory.mkdir(parents=True, exist_ok=True)
    module = name.replace("-", "_")
    info = f"{module}-{version}.dist-info"
    path = directory / f"{module}-{version}-{tag}.whl"
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    metadata += "".join(f"Provides-Extra: {extra}\n" for extra in extras)
    metadata += "".join(f"Requires-Dist: {line}\n" for line in requires)
    pure = "true" if tag.endswith("-any") else "false"
    wheel = f"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: {pure}\nTag: {tag}\n"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(f"{module}.py", "")
        archive.writestr(f"{info}/METADATA", metadata)
        archive.writestr(f"{info}/WHEEL", wheel)
        archive.writestr(f"{info}/RECORD", f"{module}.py,,\n{info}/METADATA,,\n{info}/WHEEL,,\n{info}/RECORD,,\n")
    return path
