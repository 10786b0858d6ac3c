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


@click.command(epilog=EPILOG)
@click.argument("box")
@inventory_option
@click.option("--wait/--no-wait", default=True, show_default=True, help="Wait until it is carried out.")
@output_option
def undrain(box: str, inventory: Path, wait: bool, output: str) -> None:
    """Let BOX take part again: it loads its layers first, then a planned switch gives them to it.

    Undraining a box that is not drained changes nothing. Exit code 1 if the box is dead,
    hung or was never seen: the order stands, and it takes part once it is back. A held-down box is waited for, which
    may take its whole hold-down; --no-wait does not.
    """
    from fleet.cli.site_verbs import give_order

    give_order(
        "undrain",
        box,
        inventory,
        wait=wait,
        output=output,
        allowed=lambda timing: (
            timing.settle_seconds + timing.hold_down_max_seconds + timing.prepare_seconds + timing.switch_drain_seconds
        ),
    )
