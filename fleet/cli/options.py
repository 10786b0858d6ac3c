"""Options shared by verbs."""

from __future__ import annotations

from pathlib import Path

import click

# directories and missing files are left to the loader: its error says what to do, with the exit code of the contract
inventory_argument = click.argument(
    "inventory",
    type=click.Path(path_type=Path),
    default=Path("inventory/site.yaml"),
    required=False,
    envvar="FLEET_INVENTORY",
)
inventory_option = click.option(
    "-i",
    "--inventory",
    type=click.Path(path_type=Path),
    default=Path("inventory/site.yaml"),
    show_default=True,
    envvar="FLEET_INVENTORY",
    help="The site's inventory file.",
)
output_option = click.option(
    "-o", "--output", type=click.Choice(["table", "json"]), default="table", show_default=True, help="Output format."
)
limit_option = click.option(
    "--limit",
    default="",
    help="Only these boxes: names, globs, role:stage, label:key=value, !exclude, @failed; comma-separated.",
)
