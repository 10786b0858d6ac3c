"""`fleet init`: a commented inventory to start from."""

from __future__ import annotations

from pathlib import Path

import click

from fleet.errors import ExitCode, FleetError

INVENTORY_NAME = "site.yaml"
GITIGNORE = """\
# CA key, host keys and API keys of the site: back them up, never commit them
.fleet/
secrets/
"""


@click.command(
    epilog="""
\b
Examples:
  fleet init
  fleet init inventory
  fleet init ~/sites/plant-7 && $EDITOR ~/sites/plant-7/site.yaml
"""
)
@click.argument("directory", type=click.Path(file_okay=False, path_type=Path), default=Path("inventory"))
def init(directory: Path) -> None:
    """Write a commented site.yaml, and a .gitignore for the site's secrets, to DIRECTORY (default: inventory).

    Files that are there already are never overwritten.
    """
    from importlib.resources import files

    example = (files("fleet.inventory") / "examples" / INVENTORY_NAME).read_bytes()
    target = directory / INVENTORY_NAME
    try:
        directory.mkdir(parents=True, exist_ok=True)
        _write_new(target, example)
    except FileExistsError as error:
        raise FleetError(
            f"{error.filename or target} exists already and is not overwritten",
            hint=f"check it with: fleet inventory check {target}",
            exit_code=ExitCode.FAILED,
        ) from error
    except OSError as error:
        raise FleetError(
            f"cannot write {error.filename or target}: {error.strerror}", hint="name a directory you can write to"
        ) from error
    click.echo(f"wrote {target}")
    ignore = directory / ".gitignore"
    try:
        _write_new(ignore, GITIGNORE.encode())
        click.echo(f"wrote {ignore}")
    except FileExistsError:
        click.echo(f"kept {ignore}: make sure that it names .fleet/ and secrets/")
    click.echo(f"next: edit {target}, then run: fleet inventory check {target}")


def _write_new(path: Path, data: bytes) -> None:
    """Write a file that must not exist yet; a dangling link counts as existing."""
    with path.open("xb") as file:
        file.write(data)
