"""What the verbs that talk to the coordinator share."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fleet.inventory.sitefile import SiteFile
    from fleet.observe.coordinator import Coordinator


def coordinator(site_file: SiteFile, inventory: Path) -> AbstractAsyncContextManager[Coordinator]:
    """The site's coordinator, with the operator's certificate.

    Raises:
        FleetError: the site was not provisioned from here, or has no coordinator.
    """
    from fleet.errors import FleetError
    from fleet.observe.coordinator import coordinator_of
    from fleet.observe.site_access import client_context, load_endpoints

    endpoint = load_endpoints(site_file).coordinator
    if endpoint is None:
        raise FleetError(
            f"{inventory}: the site has only external engines and no coordinator", hint=f"fleet status -i {inventory}"
        )
    context = client_context(site_file, with_certificate=True)
    return coordinator_of(endpoint, context, f"fleet status -i {inventory}")


def known_box(site_file: SiteFile, box: str, inventory: Path) -> None:
    """Refuse a name that is no stage box of a pipeline of ours.

    Raises:
        FleetError: names the nearest box.
    """
    from fleet.errors import ExitCode, FleetError
    from fleet.inventory.problems import nearest

    pipelines = site_file.site.pipelines.values()
    boxes = [name for line in pipelines if line.engine.kind == "stage-runtime" for name in line.boxes]
    if box not in boxes:
        raise FleetError(
            f"{inventory}: no pipeline has a box {box}; {nearest(box, boxes)}",
            hint=f"fleet status -i {inventory}",
            exit_code=ExitCode.USAGE,
        )
