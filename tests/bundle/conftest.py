"""A pip that looks only where a test says."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from fleet.bundle.context import BuildContext
from fleet.bundle.files import DigestCache
from fleet.bundle.pip import Pip, office_pip

PipOf = Callable[[Path], Pip]
OFFICE_TOOLS = Path(__file__).resolve().parents[2] / "build" / "office-pip"


@pytest.fixture(scope="session")
def modern_pip() -> Pip:
    """The pip that `fleet bundle` would use here, with the environment's own configuration."""
    return office_pip(OFFICE_TOOLS, lambda _line: None)


@pytest.fixture
def pip_of(modern_pip: Pip) -> PipOf:
    """Makes a pip whose user configured a directory of wheels and no index."""

    def make(wheels: Path) -> Pip:
        kept = {key: value for key, value in os.environ.items() if not key.startswith("PIP_")}
        settings = {"PIP_CONFIG_FILE": os.devnull, "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(wheels)}
        return Pip(modern_pip.command, {**kept, **settings}, lambda _line: None)

    return make


@pytest.fixture
def context_of(tmp_path: Path, pip_of: PipOf) -> Callable[[Path], BuildContext]:
    """Makes the context of a run that takes wheels from a directory."""

    def make(wheels: Path) -> BuildContext:
        bundle = tmp_path / "bundle"
        (bundle / ".state").mkdir(parents=True, exist_ok=True)
        return BuildContext(bundle, pip_of(wheels), DigestCache(bundle / ".state" / "digests.json"))

    return make


@pytest.fixture(scope="session")
def python() -> str:
    """Major and minor version of the running Python."""
    return f"{sys.version_info.major}.{sys.version_info.minor}"
