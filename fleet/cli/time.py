"""`fleet time`: the clocks of the boxes, for sites without any time server."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from fleet.cli.options import inventory_argument, inventory_option, output_option

if TYPE_CHECKING:
    from fleet.ssh.results import HostResult
    from fleet.timing.boxes import Clock

EPILOG = """
\b
Examples:
  fleet time status inventory/site.yaml
  fleet time push pi-1 pi-2 --dry-run
  fleet time push pi-1 --yes -o json
"""
COLUMNS = ("box", "offset", "then", "kept by", "hardware clock", "verdict")
LOG_COLUMNS = ("when", "box", "before s", "±", "after s", "±", "hardware clock")
LOCK_NAME = "time.lock"
VERDICTS = {"set": "off", "right": "right, as far as can be measured", "kept": "off, and kept by something else"}


@click.group(epilog=EPILOG)
def time() -> None:
    """Compare the clocks of boxes with this machine's, and set them where there is no time server."""


@time.command(epilog=EPILOG)
@inventory_argument
@output_option
def status(*, inventory: Path, output: str) -> int:
    """Compare the clocks of all boxes with this machine's; positive: the box is ahead.

    Exit code 0: all were compared (right or not), 3: only unreachable boxes stand in the way, else 1.
    """
    from fleet.cli.output import progress
    from fleet.inventory.loader import load_site
    from fleet.ssh.results import exit_code
    from fleet.ssh.site import SshSite
    from fleet.timing.boxes import look, remote_boxes

    site_file = load_site(inventory, resolve_secrets=False)
    boxes = remote_boxes(site_file, ())
    if not boxes:
        progress(f"{inventory}: all boxes are directories of this machine: they have its clock")
    clocks, results = look(site_file, SshSite.of(site_file, report=progress), boxes)
    return _show(clocks, results, exit_code(results), output, changed=None)


@time.command(epilog=EPILOG)
@click.argument("boxes", nargs=-1, required=True, metavar="BOX...")
@inventory_option
@click.option("--dry-run", is_flag=True, help="Only show what would be set.")
@click.option("--yes", is_flag=True, help="Do not ask.")
@output_option
def push(*, boxes: tuple[str, ...], inventory: Path, dry_run: bool, yes: bool, output: str) -> int:
    """Set the clocks of boxes by this machine's, for a site without any time server.

    A clock that is off by less than the measurement leaves open is left alone, and so is one that chronyd or
    systemd-timesyncd keeps to a source. The hardware clock follows. `fleet time log` shows what was done.

    Exit code 0: every clock is right now; 2: nobody to say yes (add --yes); 3: only unreachable boxes stand in the way;
    4: another push runs; else 1.
    """
    import time as clocks_of_this_machine

    from fleet.cli.output import progress
    from fleet.inventory.loader import load_site
    from fleet.provision.state_directory import site_lock
    from fleet.ssh.results import exit_code
    from fleet.ssh.site import SshSite
    from fleet.timing.boxes import check_own_clock, look, refusals, remote_boxes
    from fleet.timing.boxes import push as set_clocks
    from fleet.timing.estimate import Verdict

    site_file = load_site(inventory, resolve_secrets=False)
    wanted = remote_boxes(site_file, boxes)
    check_own_clock(clocks_of_this_machine.time())
    ssh = SshSite.of(site_file, report=progress)
    with site_lock(site_file.state_directory, LOCK_NAME):
        clocks, results = look(site_file, ssh, wanted)
        off = [box for box, clock in clocks.items() if clock.verdict is Verdict.SET]
        if off and not dry_run:
            _confirm({box: clocks[box] for box in off}, yes=yes)
            now, done = set_clocks(site_file, ssh, off)
            clocks |= now
            results = (*(result for result in results if result.box not in off), *done)
    failed = {result.box: result for result in refusals(clocks)}
    results = tuple(failed.get(result.box, result) for result in results)
    changed = len(off) if dry_run else sum(result.changes for result in results)
    return _show(clocks, results, exit_code(results), output, changed=changed, dry_run=dry_run)


@time.command(epilog=EPILOG)
@inventory_argument
@output_option
def log(*, inventory: Path, output: str) -> int:
    """Show which clocks were set from here, oldest first."""
    from datetime import datetime, timezone

    from fleet.cli.output import print_json, print_table
    from fleet.inventory.loader import load_site
    from fleet.timing.record import read

    site_file = load_site(inventory, resolve_secrets=False)
    entries = read(site_file.state_directory)
    if output == "json":
        print_json("time-log", {"pushes": entries})
        return 0
    rows = [
        (
            datetime.fromtimestamp(entry["unix_seconds"], timezone.utc).strftime("%Y-%m-%d %H:%M:%S"),
            entry["box"],
            f"{entry['before_seconds']:+.6f}",
            f"{entry['before_uncertainty_seconds']:.6f}",
            f"{entry['after_seconds']:+.6f}",
            f"{entry['after_uncertainty_seconds']:.6f}",
            entry["hardware_clock"],
        )
        for entry in entries
    ]
    print_table(f"clocks set at {site_file.site.site} (UTC)", LOG_COLUMNS, rows)
    return 0


def _confirm(clocks: Mapping[str, Clock], *, yes: bool) -> None:
    """Say what will be set, and ask."""
    from fleet.errors import ExitCode, FleetError

    if yes:
        return
    for box, clock in clocks.items():
        click.echo(f"{box}: {clock.before} off this machine's clock; it will be set", err=True)
    if not sys.stdin.isatty():
        raise FleetError("nobody is here to say yes", hint="add --yes, or --dry-run", exit_code=ExitCode.USAGE)
    click.confirm("Go on?", abort=True, err=True)


def _show(
    clocks: Mapping[str, Clock],
    results: Sequence[HostResult],
    code: int,
    output: str,
    *,
    changed: int | None,
    dry_run: bool = False,
) -> int:
    """Print what was found.

    Args:
        changed: how many clocks were set, or would be; None: that was not asked.
    """
    from fleet.cli.output import print_json, print_table, progress
    from fleet.timing.boxes import as_data

    failed = [result for result in results if result.message]
    if output == "json":
        data = {box: as_data(clock) for box, clock in clocks.items()}
        errors = {result.box: result.message for result in failed}
        print_json(
            "time",
            {"boxes": data, "errors": errors, "changed": changed, "dry_run": dry_run, "exit_code": int(code)},
        )
        return int(code)
    rows = []
    for result in sorted(results, key=lambda one: one.box):
        clock = clocks.get(result.box)
        if clock is None:
            rows.append((result.box, "", "", "", "", result.status.value))
            continue
        then = "" if clock.after is None else str(clock.after)
        verdict = "set" if clock.after is not None else VERDICTS[clock.verdict.value]
        rows.append((result.box, str(clock.before), then, clock.keeper, clock.hardware_clock, verdict))
    print_table("clocks of the boxes against this machine's", COLUMNS, rows)
    for result in failed:
        progress(result.message)
        if result.hint:
            progress(f"  next: {result.hint}")
    if changed is not None:
        progress(f"{changed} {'would be changed' if dry_run else 'changed'}")
    return int(code)
