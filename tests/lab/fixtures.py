"""Fixtures for tests on real boxes: `pytest_plugins = ["tests.lab.fixtures"]` in the top `conftest.py`.

Tests that use them carry `@pytest.mark.lab`. Without root they are skipped with the reason; with root a missing piece
is a failure when `CI=true`, so that a green run in CI means that the lab really ran.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.lab import packages
from tests.lab.errors import LabError
from tests.lab.lab import Lab, LabBox, check_tools

STAGE_BOXES = 3


@pytest.fixture(scope="session")
def lab_host() -> None:
    """This machine can run the lab: root and all tools. Skips, or fails in CI as root, when it cannot."""
    if os.geteuid() != 0:
        pytest.skip("the lab of real boxes needs root; run `sudo make test`")
    try:
        if os.environ.get("CI") == "true":
            packages.install_missing()
        check_tools()
    except LabError as error:
        if os.environ.get("CI") == "true":
            pytest.fail(error.for_terminal(), pytrace=False)
        pytest.skip(error.for_terminal())


@pytest.fixture(scope="session")
def empty_lab(lab_host: None) -> Iterator[Lab]:
    """A lab without boxes; what an earlier, crashed run has left is removed first, and everything at the end."""
    lab = Lab()
    lab.down()
    try:
        yield lab
    finally:
        lab.down()


@pytest.fixture(scope="session")
def lab(empty_lab: Lab) -> Lab:
    """box1 to box3 and `control`, booted, with nothing provisioned. One lab a test run: put back what you change."""
    for box in empty_lab.up(STAGE_BOXES):
        box.wait_until_booted()
    return empty_lab


@pytest.fixture(scope="module")
def fresh_lab(lab: Lab) -> Lab:
    """The lab with empty disks, for modules that provision: whatever earlier tests did to the boxes is gone."""
    lab.renew()
    return lab


@pytest.fixture
def box(lab: Lab) -> Iterator[LabBox]:
    """box1 for a fault: plugged in, without limits and on again afterwards."""
    one = lab.box("box1")
    one.on()
    yield one
    one.recover()
