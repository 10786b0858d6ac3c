"""`fleet guard`: what the guards of the boxes see and do."""

from __future__ import annotations

from pathlib import Path

import click

from fleet.cli.options import inventory_argument, output_option

EPILOG = """
\b
Examples:
  fleet guard status inventory/local.yaml
  fleet guard status --box pi-1 --all --settings
  fleet guard status -o json
"""


@click.group(epilog=EPILOG)
def guard() -> None:
    """Watch the guards of the boxes: heat, memory, clock, programs, surroundings."""


@guard.command(epilog=EPILOG)
@inventory_argument
@click.option("--box", "boxes", multiple=True, metavar="BOX", help="Only this box; may be given several times.")
@click.option("--all", "every_part", is_flag=True, help="Show every part, also those that are well or absent.")
@click.option("--settings", is_flag=True, help="Show the settings in force too.")
@output_option
def status(*, inventory: Path, boxes: tuple[str, ...], every_part: bool, settings: bool, output: str) -> int:
    """Show what guards found, what they did, and how often they may still act.

    Exit code 0: nothing is unhealthy, 1: something is, 3: only unreachable boxes stand in the way.
    """
    import asyncio

    from fleet.cli.output import print_json, print_table, progress
    from fleet.errors import ExitCode, FleetError
    from fleet.inventory.loader import load_site
    from fleet.inventory.problems import nearest
    from fleet.observe import guards
    from fleet.observe.site_access import client_context, load_endpoints

    site_file = load_site(inventory, resolve_secrets=False)
    known = load_endpoints(site_file).guards
    if not known:
        message = f"{inventory}: the site was provisioned by a version without guards"
        raise FleetError(message, hint=f"fleet provision {inventory}")
    for box in boxes:
        if box not in known:
            message = f"{inventory}: no guards run on {box}; {nearest(box, list(known))}"
            raise FleetError(message, hint=f"fleet guard status {inventory}", exit_code=ExitCode.USAGE)
    wanted = {box: endpoint for box, endpoint in known.items() if not boxes or box in boxes}
    found = asyncio.run(guards.ask_guards(wanted, client_context(site_file, with_certificate=True)))
    code = guards.exit_code(found)
    if output == "json":
        data = {each.box: each.answer.document or {"error": each.answer.error} for each in found}
        print_json("guards", {"boxes": data, "exit_code": int(code)})
        return int(code)
    name = site_file.site.site
    print_table(f"guards of {name}", guards.GUARD_COLUMNS, guards.guard_rows(found, every_part=every_part))
    click.echo("")
    print_table("actions still paid for", guards.BUDGET_COLUMNS, guards.budget_rows(found))
    if events := guards.event_rows(found):
        click.echo("")
        print_table("what happened last", guards.EVENT_COLUMNS, events)
    if settings:
        click.echo("")
        print_table("settings (the inventory's section guards)", guards.SETTING_COLUMNS, guards.setting_rows(found))
    for line in guards.problems(found):
        progress(line)
    if code is not ExitCode.OK:
        progress(f"  next: fleet guard status --all {inventory}")
    return int(code)
