"""Inputs of rendering that several files of tests start from."""

from __future__ import annotations

from pathlib import Path

import pytest

from fleet.provision.render import RenderInputs
from tests.provision.sites import make_inputs, write_bundle, write_site


@pytest.fixture
def inputs(tmp_path: Path) -> RenderInputs:
    site_file = write_site(tmp_path)
    return make_inputs(site_file, write_bundle(site_file))


@pytest.fixture
def local_inputs(tmp_path: Path) -> RenderInputs:
    site_file = write_site(tmp_path, connection="local")
    return make_inputs(site_file, write_bundle(site_file))
