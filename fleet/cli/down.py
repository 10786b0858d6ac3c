"""`fleet down`: stop everything of a local site."""

from __future__ import annotations

from pathlib import Path

import click

from fleet.cli.options import inventory_argument, output_option
from fleet.cli.output import print_json, progress

EPILOG = """
\b
Examples:
  fleet down inventory/local.yaml
  fleet down inventory/local.yaml -o json
  fleet down inventory/local.yaml && rm -rf build/demo
"""


@click.command(epilog=EPILOG)
@inventory_argument
@output_option
def down(inventory: Path, output: str) -> int:
    """Stop every process of the local site INVENTORY. What is on disk stays; `fleet provision` starts it again.

    Boxes over ssh are never stopped by this: they serve until their power is cut, and after it.
    """
    from fleet.inventory.loader import load_site
    from fleet.provision.rollout_down import down_line, require_local, stop_site
    from fleet.provision.state_directory import site_lock
    from fleet.provision.table import failure_lines
    from fleet.ssh.results import exit_code

    site_file = load_site(inventory, resolve_secrets=False)
    require_local(site_file)
    with site_lock(site_file.state_directory):
        stopped, results = stop_site(site_file, progress)
    if output == "json":
        print_json(
            "down", {"site": site_file.site.site, "stopped": {box: list(names) for box, names in stopped.items()}}
        )
    else:
        for box, names in stopped.items():
            click.echo(down_line(box, names))
    for line in failure_lines(results, verbose=True):
        progress(line)
    return int(exit_code(results))
