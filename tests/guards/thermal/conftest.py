"""Boxes, and readers of their sensors."""

from __future__ import annotations

from pathlib import Path

import pytest

from guards.deadline import DeadlineReader
from tests.guards.thermal.trees import Tree


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Tree:
    """An empty box."""
    return Tree(tmp_path, monkeypatch)


@pytest.fixture
def reader() -> DeadlineReader:
    """With a deadline that makes hanging sensors cheap."""
    return DeadlineReader(deadline_seconds=0.3, quarantine_seconds=300.0)
