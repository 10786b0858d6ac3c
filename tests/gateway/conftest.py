"""Fixtures of the gateway's tests."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import Tokenizer

from tests.gateway.site import Pki, make_pki, write_model


@pytest.fixture(scope="session")
def pki(tmp_path_factory: pytest.TempPathFactory) -> Pki:
    """Certificates of one site, for all tests."""
    return make_pki(tmp_path_factory.mktemp("pki"))


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A gateway's files: a model directory in it."""
    write_model(tmp_path / "model")
    return tmp_path


@pytest.fixture
def tokenizer(directory: Path) -> Tokenizer:
    """The tokenizer of the model in `directory`."""
    return Tokenizer.from_file(str(directory / "model" / "tokenizer.json"))
