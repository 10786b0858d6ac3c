"""A provisioned lab site, shared by the tests of this room; each test puts back what it changes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from fleet.inventory.loader import load_site
from fleet.inventory.sitefile import SiteFile
from tests.lab.lab import Lab
from tests.site.commands import REPOSITORY, fleet
from tests.site.healing import Healing
from tests.site.watch import Watch

LAB_INVENTORY = REPOSITORY / "inventory" / "lab.yaml"
STAGE_BOXES = ("box1", "box2", "box3")
ALL_BOXES = (*STAGE_BOXES, "control")


@pytest.fixture(scope="session")
def lab_inventory() -> Path:
    """The site that runs on lab boxes."""
    return LAB_INVENTORY


@pytest.fixture(scope="session")
def lab_site(lab_inventory: Path) -> SiteFile:
    """The same, loaded."""
    return load_site(lab_inventory, resolve_secrets=False)


@pytest.fixture(scope="session")
def provisioned(lab: Lab, lab_inventory: Path) -> Iterator[Lab]:
    """The lab's boxes after `fleet bundle` and the first `fleet provision`: the site answers."""
    fleet("bundle", lab_inventory)
    first = fleet("provision", lab_inventory, "-o", "json")
    results = {row["box"]: row["result"] for row in first.data["boxes"]}
    assert results == dict.fromkeys(ALL_BOXES, "changed"), first.stderr
    yield lab
    for box in lab.boxes:
        print(f"--- {box.name}: last lines of its service")
        if box.is_on:
            print(box.exec(["sh", "-c", "tail -n 5 /var/log/fleet/*.log"], check=False).stdout)


@pytest.fixture(scope="session")
def watch(provisioned: Lab, lab_site: SiteFile) -> Watch:
    """What the provisioned site says of itself."""
    return Watch(lab_site, provisioned)


@pytest.fixture(scope="session")
def healing(provisioned: Lab, lab_site: SiteFile) -> Iterator[Healing]:
    """The provisioned site for faults, with its undisturbed answers; few of all its answers may be near-ties."""
    site = Healing(lab_site, provisioned)
    yield site
    site.assert_few_near_ties()


@pytest.fixture
def heal(healing: Healing) -> Iterator[Healing]:
    """The same, whole before a test and after it."""
    healing.watch.wait_whole()
    yield healing
    healing.recover()
