"""`fleet status`: who holds which layers, and whether the site serves."""

from __future__ import annotations

from pathlib import Path

import click

from fleet.cli.options import inventory_argument, output_option

EPILOG = """
\b
Examples:
  fleet status -i inventory/local.yaml
  fleet status -i inventory/lab.yaml -o json
  fleet status; watch -n 2 fleet status
"""


@click.command(epilog=EPILOG)
@inventory_argument
@output_option
def status(inventory: Path, output: str) -> int:
    """Show who holds which layers, health, memory, tokens/s, and what the coordinator plans.

    Exit code 0: all serve, 1: something failed, 3: only unreachable boxes stand in the way.
    """
    import asyncio
    from dataclasses import asdict

    from fleet.cli.output import print_json, print_table, progress
    from fleet.inventory.loader import load_site
    from fleet.observe.health import ask_site
    from fleet.observe.site_access import client_access, client_context, load_endpoints
    from fleet.observe.site_view import MEMBER_COLUMNS, PLAN_COLUMNS
    from fleet.observe.status import PIPELINE_COLUMNS, STAGE_COLUMNS, site_status

    # no API key is needed, the operator's certificate opens everything
    site_file = load_site(inventory, resolve_secrets=False)
    endpoints = load_endpoints(site_file)
    answers = asyncio.run(ask_site(endpoints, client_context(site_file, with_certificate=True)))
    result = site_status(answers)
    access = client_access(site_file, endpoints)
    if output == "json":
        clients = None if access is None else asdict(access)
        print_json("status", {**asdict(result), "clients": clients, "exit_code": int(result.exit_code)})
        return int(result.exit_code)
    print_table(f"stages of {site_file.site.site}", STAGE_COLUMNS, [row.cells() for row in result.stages])
    click.echo("")
    print_table("pipelines", PIPELINE_COLUMNS, [row.cells() for row in result.pipelines])
    click.echo("")
    coordinator = result.coordinator
    if coordinator.plans or coordinator.members:
        print_table("plans of the coordinator", PLAN_COLUMNS, [row.cells() for row in coordinator.plans])
        click.echo("")
        print_table("boxes as the coordinator sees them", MEMBER_COLUMNS, [row.cells() for row in coordinator.members])
        click.echo("")
    if access is not None:
        click.echo(str(access))
    for line in result.notes:
        progress(line)
    progress("\n".join(result.failures) or "every stage, the gateway and the coordinator serve")
    if result.exit_code != 0:
        progress(
            f"  next: fleet provision {inventory} --check; if it finds nothing to change: fleet events -i {inventory}"
        )
    return int(result.exit_code)
