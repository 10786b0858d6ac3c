"""`fleet drain`: take a box out of its pipeline without losing an answer."""

from __future__ import annotations

from pathlib import Path

import click

from fleet.cli.options import inventory_option, output_option

EPILOG = """
\b
Examples:
  fleet drain box2 -i inventory/local.yaml
  fleet drain pi-1 --no-wait
  fleet drain pi-1 -o json && ssh pi-1 sudo poweroff
"""
MARGIN_SECONDS = 30.0  # longest wait beyond what the inventory's timing allows each part


@click.command(epilog=EPILOG)
@click.argument("box")
@inventory_option
@click.option("--wait/--no-wait", default=True, show_default=True, help="Wait until it is carried out.")
@output_option
def drain(box: str, inventory: Path, wait: bool, output: str) -> None:
    """Move the layers of BOX to the other boxes, by a planned switch: no answer is lost or repeated.

    The box stays drained, also over restarts, until `fleet undrain BOX`. Draining twice is draining once.
    Exit code 1 if the others can't hold its layers; then nothing changes.
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
    longest = timing.prepare_seconds + timing.switch_drain_seconds + MARGIN_SECONDS

    async def run() -> Outcome:
        async with coordinator(site_file, inventory) as reached:
            return await carry_out(reached, box, "drain", wait=wait, seconds=longest, report=progress)

    outcome = asyncio.run(run())
    if output == "json":
        print_json("drain", asdict(outcome))
    else:
        click.echo(outcome_line(outcome, "drain"))
