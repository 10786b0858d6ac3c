"""`fleet events`: what happened at a site, why, and how long each phase took."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from fleet.cli.options import inventory_option, output_option

if TYPE_CHECKING:
    from fleet.observe.coordinator import Coordinator, Event

EPILOG = """
\b
Examples:
  fleet events -i inventory/local.yaml
  fleet events --box box2 --limit 5
  fleet events --follow -o json
"""
FOLLOW_SECONDS = 1.0


@click.command(epilog=EPILOG)
@inventory_option
@click.option("--limit", type=click.IntRange(1, 10_000), default=30, show_default=True, help="Show the last so many.")
@click.option("--box", default="", help="Only events about this box.")
@click.option("--after", type=click.IntRange(0), default=0, help="Only events with a higher id.")
@click.option("--follow", "-f", is_flag=True, help="Go on printing what happens, until Ctrl-C.")
@output_option
def events(*, inventory: Path, limit: int, box: str, after: int, follow: bool, output: str) -> None:
    """Show what happened, newest last: deaths, plans, switches, and the milliseconds of each phase.

    Times are by the coordinator's clock. With --follow and -o json every event is a line of its own.
    """
    import asyncio
    from dataclasses import asdict

    from fleet.cli.output import print_json, print_table
    from fleet.cli.site_verbs import coordinator
    from fleet.errors import ExitCode, FleetError
    from fleet.inventory.loader import load_site
    from fleet.inventory.problems import nearest
    from fleet.observe.event_rows import EVENT_COLUMNS, event_rows

    site_file = load_site(inventory, resolve_secrets=False)
    boxes = list(site_file.site.boxes)

    async def run() -> list[Event]:
        async with coordinator(site_file, inventory) as reached:
            found = await reached.last_events(limit, after=after, box=box)
            if box and not found and box not in boxes:  # one that has left the inventory may have events
                message = f"{inventory}: no box {box}, and no event about one; {nearest(box, boxes)}"
                raise FleetError(message, hint=f"fleet status -i {inventory}", exit_code=ExitCode.USAGE)
            if follow:
                await _follow(reached, found, after, box, json_lines=output == "json")
            return found

    found = asyncio.run(run())
    if output == "json":
        print_json("events", [asdict(event) for event in found])
    else:
        print_table(f"events of {site_file.site.site}", EVENT_COLUMNS, event_rows(found))


async def _follow(reached: Coordinator, found: list[Event], after: int, box: str, *, json_lines: bool) -> None:
    """Print what is there and then what comes; ends with the process. A coordinator that restarts is waited for."""
    import asyncio

    from fleet.cli.output import progress
    from fleet.errors import ExitCode, FleetError
    from fleet.observe.coordinator import EVENTS_A_PAGE

    last, away = max([after, *(event.id for event in found)]), False
    for event in found:
        _print(event, json_lines=json_lines)
    while True:
        try:
            news = await reached.events(last)
            away = False
        except FleetError as error:
            if error.exit_code is not ExitCode.UNREACHABLE:
                raise
            if not away:
                progress(f"{error.message}; waiting for it")
            news, away = [], True
        for event in news:
            if not box or event.box == box:
                _print(event, json_lines=json_lines)
        last = max([last, *(event.id for event in news)])
        if len(news) < EVENTS_A_PAGE:
            await asyncio.sleep(FOLLOW_SECONDS)


def _print(event: Event, *, json_lines: bool) -> None:
    import json
    import sys
    from dataclasses import asdict

    from fleet.cli.output import OUTPUT_SCHEMA
    from fleet.observe.event_rows import event_line

    line = event_line(event)
    if json_lines:
        line = json.dumps({"schema": OUTPUT_SCHEMA, "kind": "event", "data": asdict(event)})
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()
