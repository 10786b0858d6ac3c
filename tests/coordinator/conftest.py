"""Fixtures of the coordinator's tests."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.coordinator.site import SITE, World, world
from tests.stage_runtime.pki import SiteCa


@pytest.fixture(scope="session")
def ca(tmp_path_factory: pytest.TempPathFactory) -> SiteCa:
    """The certificates of one site, for all tests."""
    return SiteCa(tmp_path_factory.mktemp("coordinator-pki"), SITE)


@pytest.fixture
async def site(tmp_path: Path, ca: SiteCa) -> AsyncIterator[World]:
    """A coordinator, three scripted stages and a gateway, serving."""
    async with world(tmp_path, ca) as made:
        await made.connect()
        await made.serving()
        yield made
