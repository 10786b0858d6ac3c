"""`fleet docs …`: reference pages generated from the code, so that they cannot be out of date."""

from __future__ import annotations

import click

from fleet.cli.options import output_option
from fleet.cli.output import print_json


@click.group(
    epilog="""
\b
Examples:
  fleet docs inventory
  fleet docs inventory > inventory-reference.md
  fleet docs inventory -o json
"""
)
def docs() -> None:
    """Print reference pages generated from the code, as Markdown or JSON."""


@docs.command(
    epilog="""
\b
Examples:
  fleet docs inventory
  fleet docs inventory | less
  fleet docs inventory -o json
"""
)
@output_option
def inventory(output: str) -> None:
    """Print every key of an inventory: type, default and meaning."""
    from dataclasses import asdict

    from fleet.inventory.reference import reference_page
    from fleet.inventory.schema import keys

    if output == "json":
        print_json("inventory-reference", [asdict(key) for key in keys()])
    else:
        click.echo(reference_page(), nl=False)
