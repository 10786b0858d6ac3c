"""Fixtures of the stage runtime's tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.stage_runtime.site import StageSite
from tests.stage_runtime.tiny import TinyModel, make_model


@pytest.fixture(scope="session")
def tied_model(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    """Tied embeddings: head on the first stage."""
    return make_model(tmp_path_factory.mktemp("models") / "tied", tied=True)


@pytest.fixture(scope="session")
def untied_model(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    """Untied: head on the last stage."""
    return make_model(tmp_path_factory.mktemp("models") / "untied", tied=False)


def _site(directory: Path, model: TinyModel, **options: int) -> StageSite:
    site = StageSite(directory, model.directory, model.digest, layers=model.layers, tied=model.tied, **options)
    for box in site.all_boxes:
        site.start(box)
    return site


@pytest.fixture(scope="session")
def tied_site(tmp_path_factory: pytest.TempPathFactory, tied_model: TinyModel) -> Iterator[StageSite]:
    """Three stages of the tied model; tests leave it as they found it."""
    site = _site(tmp_path_factory.mktemp("tied"), tied_model)
    yield site
    site.stop()


@pytest.fixture(scope="session")
def untied_site(tmp_path_factory: pytest.TempPathFactory, untied_model: TinyModel) -> Iterator[StageSite]:
    """Three stages of the untied model; tests leave it as they found it."""
    site = _site(tmp_path_factory.mktemp("untied"), untied_model)
    yield site
    site.stop()
