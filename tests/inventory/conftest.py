"""A small valid site to spoil, and what the loader says about text."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from fleet.errors import ExitCode, FleetError
from fleet.inventory.loader import load_site
from fleet.inventory.sitefile import SiteFile

VALID = """\
site: lab
device_profiles:
  pc:
    architecture: x86_64
    python: "3.11"
    torch: {version: "2.13.0"}
boxes:
  box1: {address: 10.0.0.1, profile: pc}
  box2: {address: 10.0.0.2, profile: pc}
  control: {address: 10.0.0.9, profile: pc, roles: [coordinator, gateway]}
models:
  tiny:
    source: {path: models/tiny}
    licence: apache-2.0
pipelines:
  main:
    model: tiny
    boxes: [box1, box2]
"""


def with_labels(text: str) -> str:
    return VALID.replace(
        "box1: {address: 10.0.0.1, profile: pc}", f"box1: {{address: 10.0.0.1, profile: pc, labels: {{{text}}}}}"
    )


def with_box1(text: str) -> str:
    return VALID.replace("box1: {address: 10.0.0.1, profile: pc}", f"box1: {{address: 10.0.0.1, profile: pc, {text}}}")


@pytest.fixture
def load(tmp_path: Path) -> Callable[..., SiteFile]:
    """Write text or bytes to a file and load it."""

    def write_and_load(content: str | bytes, *, resolve_secrets: bool = True) -> SiteFile:
        file = tmp_path / "site.yaml"
        file.write_bytes(content if isinstance(content, bytes) else content.encode())
        return load_site(file, resolve_secrets=resolve_secrets)

    return write_and_load


@pytest.fixture
def complaints(load: Callable[..., SiteFile], tmp_path: Path) -> Callable[..., list[str]]:
    """Load text that must be refused; its errors, each as `line: message`."""

    def refused(content: str | bytes, *, resolve_secrets: bool = True) -> list[str]:
        with pytest.raises(FleetError) as caught:
            load(content, resolve_secrets=resolve_secrets)
        assert caught.value.exit_code == ExitCode.INVALID_INVENTORY
        assert caught.value.hint
        file = str(tmp_path / "site.yaml")
        lines = caught.value.message.split("\n")
        lines = [line for line in lines if not line.endswith(f" errors in {file}")]
        return [line.removeprefix(file).removeprefix(":").strip() for line in lines]

    return refused
