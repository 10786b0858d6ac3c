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


@click.command(epilog=EPILOG)
@click.argument("box")
@inventory_option
@click.option("--wait/--no-wait", default=True, show_default=True, help="Wait until it is carried out.")
@output_option
def drain(box: str, inventory: Path, wait: bool, output: str) -> None:
    """Move the layers of BOX to the other boxes, by a planned switch: no answer is lost or repeated.

    The box stays drained, also over restarts, until `fleet undrain BOX`. Draining twice is draining once.
    Exit code 1 if the others can't hold its layers, or the coordinator can't write the order down: nothing changes.
    Also 1 if it takes too long to wait for: then the order stands. 3: the coordinator is not reached.
    """
    from fleet.cli.site_verbs import give_order

    give_order(
        "drain",
        box,
        inventory,
        wait=wait,
        output=output,
        allowed=lambda timing: timing.prepare_seconds + timing.switch_drain_seconds,
    )
