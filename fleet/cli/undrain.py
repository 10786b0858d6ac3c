"""`fleet undrain`: let a drained box take part again."""

from __future__ import annotations

from pathlib import Path

import click

from fleet.cli.options import inventory_option, output_option

EPILOG = """
\b
Examples:
  fleet undrain box2 -i inventory/local.yaml
  fleet undrain pi-1 --no-wait
  fleet undrain pi-1 -o json
"""
MARGIN_SECONDS = 30.0  # longest wait beyond what the inventory's timing allows each part


@click.command(epilog=EPILOG)
@click.argument("box")
@inventory_option
@click.option("--wait/--no-wait", default=True, show_default=True, help="Wait until it is carried out.")
@output_option
def undrain(box: str, inventory: Path, wait: bool, output: str) -> None:
    """Let BOX take part again: it loads its layers first, then a planned switch gives them to it.

    Undraining a box that is not drained changes nothing. Exit code 1 if the box is dead.
    """
    import asyncio
    from dataclasses import asdict

    from fleet.cli.output import print_json, progress
    from fleet.cli.site_verbs import coordinator, known_box
    from fleet.inventory.loader import load_site
    from fleet.observe.draining import Outcome, carry_out, outcome_line

    site_file = load_site(inventory, resolve_secrets=False)
    known_box(site_file, box, inventory)
    timing = site_file.site.timing
    longest = (
        timing.settle_seconds
        + timing.hold_down_max_seconds
        + timing.prepare_seconds
        + timing.switch_drain_seconds
        + MARGIN_SECONDS
    )

    async def run() -> Outcome:
        async with coordinator(site_file, inventory) as reached:
            return await carry_out(reached, box, "undrain", wait=wait, seconds=longest, report=progress)

    outcome = asyncio.run(run())
    if output == "json":
        print_json("undrain", asdict(outcome))
    else:
        click.echo(outcome_line(outcome, "undrain"))
