"""Options shared by verbs."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

DEFAULT_INVENTORY = Path("inventory/site.yaml")

# directories and missing files are left to the loader: its error says what to do, with the exit code of the contract
inventory_option = click.option(
    "-i",
    "--inventory",
    type=click.Path(path_type=Path),
    default=DEFAULT_INVENTORY,
    show_default=True,
    envvar="FLEET_INVENTORY",
    help="The site's inventory file.",
)
WANTS_JSON = "fleet.wants_json"  # key of click's Context.meta: errors go to stdout as JSON too


def _remember_output(context: click.Context, _: click.Parameter, value: str) -> str:
    context.meta[WANTS_JSON] = value == "json"
    return value


output_option = click.option(
    "-o",
    "--output",
    type=click.Choice(["table", "json"]),
    default="table",
    show_default=True,
    is_eager=True,
    callback=_remember_output,
    help='Output format; with json, an error goes to stdout as `"kind": "error"`.',
)
limit_option = click.option(
    "--limit",
    default="",
    help="Only these boxes: names, globs, role:stage, label:key=value, !exclude, @failed; comma-separated.",
)


def inventory_argument(verb: Callable[..., Any]) -> Callable[..., Any]:
    """The inventory of a verb that takes no other argument: `fleet plan FILE` and `fleet plan -i FILE` are the same.

    Raises:
        click.UsageError: (of the verb) two different files are named.
    """

    @functools.wraps(verb)
    def with_inventory(*, inventory: Path | None, named: Path | None, **others: Any) -> Any:
        if inventory is not None and named is not None and inventory != named:
            raise click.UsageError(f"two inventories: {inventory} and {named}; name one")
        return verb(inventory=inventory or named or DEFAULT_INVENTORY, **others)

    path = click.Path(path_type=Path)
    argument = click.argument("inventory", type=path, default=None, required=False)
    option = click.option(
        "-i",
        "--inventory",
        "named",
        type=path,
        envvar="FLEET_INVENTORY",
        help=f"The same as INVENTORY.  [default: {DEFAULT_INVENTORY}]",
    )
    return argument(option(with_inventory))
