"""Our own wheel, built from the checkout that fleet runs from: pure Python, equal sources give equal bytes."""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path

import fleet
from fleet.bundle.files import canonical_json, copy_atomically, sha256_file, write_atomically
from fleet.bundle.pip import Pip
from fleet.errors import FleetError

PACKAGES = ("fleet", "stage_runtime", "guards")
PROJECT_FILES = ("pyproject.toml", "README.md", "LICENSE")
SOURCE_DATE_EPOCH = "315532800"
"""1980-01-01, the first date that a zip file can hold: wheels carry no build time (reproducible-builds.org)."""
FILE_MODE, DIRECTORY_MODE = 0o644, 0o755
IGNORED = shutil.ignore_patterns("__pycache__", "*.pyc", "*.egg-info", ".*")


def source_checkout() -> Path:
    """The directory that holds pyproject.toml and the package that is running.

    Raises:
        FleetError: fleet runs from an installed wheel, which cannot build itself.
    """
    root = Path(fleet.__file__).resolve().parents[1]
    if not (root / "pyproject.toml").is_file():
        raise FleetError(
            f"fleet runs from {root}, which is not a source checkout, so its own wheel cannot be built",
            hint="clone the repository, `pip install -e .[operator]` there, and run `fleet bundle` from it",
        )
    return root


def build_own_wheel(output: Path, record: Path, pip: Pip) -> Path:
    """Build our wheel into `output`, or keep it if the sources have not changed since `record` was written.

    Args:
        output: the bundle's `fleet/` directory; other wheels in it are removed.
        record: remembers digests of sources and wheel.
        pip: pip of the office.

    Returns:
        Path of the wheel.
    """
    root = source_checkout()
    with tempfile.TemporaryDirectory(prefix="fleet-source-") as directory:
        copy = Path(directory) / "source"
        sources = _copy_sources(root, copy)
        if record.exists():
            known = json.loads(record.read_bytes())
            wheel = output / str(known["wheel"])
            if known["sources"] == sources and wheel.exists() and sha256_file(wheel) == known["sha256"]:
                return wheel
        built = Path(directory) / "wheel"
        reproducible = replace(pip, environment={**pip.environment, "SOURCE_DATE_EPOCH": SOURCE_DATE_EPOCH})
        arguments = ["wheel", "--quiet", "--no-deps", "--wheel-dir", str(built), str(copy)]
        reproducible.run(arguments, "building our own wheel")
        wheel = output / next(built.glob("*.whl")).name
        output.mkdir(parents=True, exist_ok=True)
        for old in output.glob("*.whl"):
            old.unlink()
        copy_atomically(built / wheel.name, wheel)
    write_atomically(record, canonical_json({"sources": sources, "wheel": wheel.name, "sha256": sha256_file(wheel)}))
    return wheel


def _copy_sources(root: Path, copy: Path) -> str:
    """Copy what the wheel is made of aside, so that no build leaves traces in the checkout; returns its digest."""
    copy.mkdir()
    for name in PROJECT_FILES:
        shutil.copyfile(root / name, copy / name)
    for name in PACKAGES:
        if (root / name).is_dir():
            shutil.copytree(root / name, copy / name, ignore=IGNORED)
    digest = hashlib.sha256()
    for path in sorted(copy.rglob("*")):
        path.chmod(DIRECTORY_MODE if path.is_dir() else FILE_MODE)  # the umask of a clone is no part of it
        if path.is_file():
            digest.update(f"{path.relative_to(copy).as_posix()}\0{sha256_file(path)}\n".encode())
    return digest.hexdigest()
