"""Fixtures of the stage runtime's tests: one model and one site of each placement of the head, shared by all tests."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from tests.stage_runtime.site import StageSite
from tests.stage_runtime.tiny import TinyModel, make_model

# References are computed on the event loop that also serves links, beside stages that compute: spinning threads of
# OpenMP would make seconds of it.
torch.set_num_threads(1)


@dataclass(frozen=True)
class Served:
    """Running stages and the model they serve. Tests leave them as they found them."""

    site: StageSite
    model: TinyModel


@pytest.fixture(scope="session")
def tied_model(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    """Tied embeddings: head on the first stage."""
    return make_model(tmp_path_factory.mktemp("models") / "tied", tied=True)


@pytest.fixture(scope="session")
def untied_model(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    """Untied: head on the last stage."""
    return make_model(tmp_path_factory.mktemp("models") / "untied", tied=False)


def serve(directory: Path, model: TinyModel, **options: int) -> Iterator[Served]:
    """Start the stages, and stop them in the end."""
    site = StageSite(directory, model.directory, model.digest, layers=model.layers, tied=model.tied, **options)
    for box in site.all_boxes:
        site.start(box)
    yield Served(site, model)
    site.stop()


@pytest.fixture(scope="session")
def tied(tmp_path_factory: pytest.TempPathFactory, tied_model: TinyModel) -> Iterator[Served]:
    """Three stages and a spare of the tied model."""
    yield from serve(tmp_path_factory.mktemp("tied"), tied_model, spares=1)


@pytest.fixture(scope="session")
def untied(tmp_path_factory: pytest.TempPathFactory, untied_model: TinyModel) -> Iterator[Served]:
    """Three stages of the untied model."""
    yield from serve(tmp_path_factory.mktemp("untied"), untied_model)


@pytest.fixture(scope="session")
def single(tmp_path_factory: pytest.TempPathFactory, tied_model: TinyModel) -> Iterator[Served]:
    """One stage that holds the whole tied model."""
    yield from serve(tmp_path_factory.mktemp("single"), tied_model, stages=1)


@pytest.fixture(params=["tied", "untied", "single"])
def served(request: pytest.FixtureRequest) -> Served:
    """Each placement in turn."""
    result: Served = request.getfixturevalue(request.param)
    return result
