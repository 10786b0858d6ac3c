"""What the verbs that talk to the coordinator share."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fleet.inventory.model import Timing
    from fleet.inventory.sitefile import SiteFile
    from fleet.observe.coordinator import Coordinator
    from fleet.observe.draining import Order, Outcome

MARGIN_SECONDS = 30.0  # longest wait beyond what the inventory's timing allows each part


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


def give_order(
    order: Order, box: str, inventory: Path, *, wait: bool, output: str, allowed: Callable[[Timing], float]
) -> None:
    """Give the coordinator an order about a box, see it through (with `wait`), and print what came of it.

    Args:
        allowed: seconds that the inventory's timing gives its parts, all together.

    Raises:
        FleetError: unknown box, refused, not reachable, or not done in time.
    """
    import asyncio
    from dataclasses import asdict

    import click

    from fleet.cli.output import print_json, progress
    from fleet.inventory.loader import load_site
    from fleet.observe.draining import carry_out, outcome_line

    site_file = load_site(inventory, resolve_secrets=False)
    known_box(site_file, box, inventory)
    longest = allowed(site_file.site.timing) + MARGIN_SECONDS

    async def run() -> Outcome:
        async with coordinator(site_file, inventory) as reached:
            return await carry_out(reached, box, order, wait=wait, seconds=longest, report=progress)

    outcome = asyncio.run(run())
    if output == "json":
        print_json(order, asdict(outcome))
    else:
        click.echo(outcome_line(outcome, order))
