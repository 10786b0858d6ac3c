"""`fleet provision`: every box of a site to its desired state."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING

import click

from fleet.cli.options import inventory_argument, limit_option, output_option
from fleet.cli.output import print_json, print_table, progress

if TYPE_CHECKING:
    from fleet.provision.table import RunReport

EPILOG = """
\b
Examples:
  fleet provision inventory/site.yaml
  fleet provision inventory/site.yaml --check --diff
  fleet provision inventory/site.yaml --limit 'pi-*,!pi-07' --forks 4

\b
Exit codes:
  0 ok · 1 a box failed, the site is not ready, or --fail-on-changes met one
  2 wrong usage · 3 only unreachable boxes · 4 another run holds the lock
  5 rolled back · 78 invalid inventory · 130 interrupted
"""


@click.command(epilog=EPILOG)
@inventory_argument
@click.option("--check", is_flag=True, help="Only compare; change nothing on any box, nor here.")
@click.option("--diff", is_flag=True, help="Show the text of changed files; secrets never show.")
@click.option("--fail-on-changes", is_flag=True, help="Exit 1 if anything had to change; for --check in scripts.")
@limit_option
@click.option("--forks", type=click.IntRange(1, 256), help="Boxes worked on at once; the inventory's rollout.forks.")
@click.option("--at-once", is_flag=True, help="Restart all boxes at once even while the site serves; answers wait.")
@click.option(
    "--accept-host-key", "accept_host_keys", multiple=True, metavar="BOX", help="Accept this box's changed ssh key."
)
@output_option
@click.option("-v", "--verbose", is_flag=True, help="List every step and change, and all logs of what failed.")
def provision(
    *,
    inventory: Path,
    check: bool,
    diff: bool,
    fail_on_changes: bool,
    limit: str,
    forks: int | None,
    at_once: bool,
    accept_host_keys: tuple[str, ...],
    output: str,
    verbose: bool,
) -> int:
    """Bring every box of INVENTORY to its desired state.

    Asks every box what it has, changes only what differs, and activates it behind a health gate: a release that does
    not become healthy is taken back, after its logs were collected. While the site serves, boxes restart one after the
    other. A second run changes nothing.
    """
    from fleet.bundle.models import read_models
    from fleet.inventory.loader import load_site
    from fleet.inventory.patterns import select
    from fleet.planning.site import plan_site, spec_of
    from fleet.provision.pki import load_authority
    from fleet.provision.render_bundle import BundleView
    from fleet.provision.render_etc import external_pipelines
    from fleet.provision.rollout import RolloutOptions, prepare, roll_out
    from fleet.provision.rollout_state import last_failures
    from fleet.provision.state_directory import site_lock
    from fleet.provision.table import json_report, run_exit_code

    site_file = load_site(inventory)
    boxes = select(site_file.site, limit, last_failures(site_file.state_directory))
    bundle = BundleView.of(site_file)
    options = RolloutOptions(
        check=check,
        texts=diff,
        forks=forks or site_file.site.rollout.forks,
        accept_host_keys=accept_host_keys,
        at_once=at_once,
        every_step=verbose,
    )
    site, models = site_file.site, read_models(bundle.manifest)
    plan_site(site, models)  # a site that no plan fits is refused here; the plan itself is the coordinator's
    specs = {
        name: spec_of(site, name, models[line.model])
        for name, line in site.pipelines.items()
        if name not in external_pipelines(site_file)
    }
    for name in external_pipelines(site_file):
        progress(f"pipeline {name}: its server is external, this version neither starts nor watches it")
    with contextlib.nullcontext() if check else site_lock(site_file.state_directory):
        if not check and load_authority(site_file.state_directory, site_file.site.site) is None:
            where = site_file.state_directory / "ca"
            progress(f"making the site CA in {where}: keep a copy; without it every box gets a new certificate")
        prepared = prepare(site_file, bundle, specs, keep=not check)
        doing = "comparing" if check else "provisioning"
        progress(f"{site_file.site.site}: {doing} {len(boxes)} of {len(site_file.site.boxes)} boxes")
        report = roll_out(prepared, boxes, options, progress)
    code = run_exit_code(report, fail_on_changes=fail_on_changes)
    if output == "json":
        print_json("provision", json_report(report, code=code, diff=diff))
    else:
        _print(report, diff=diff, verbose=verbose)
    return int(code)


def _print(report: RunReport, *, diff: bool, verbose: bool) -> None:
    """Changes, table and summary on stdout; what failed comes last, on stderr, with the next command."""
    from fleet.provision.table import COLUMNS, change_lines, failure_lines, summary_line, table_rows

    if report.check or diff or verbose:
        for box in report.boxes:
            for line in change_lines(box.changes, box.result.box, diff=diff, check=report.check):
                click.echo(line)
    print_table("", COLUMNS, table_rows(report))
    click.echo(summary_line(report))
    failures = failure_lines((box.result for box in report.boxes), verbose=verbose)
    if report.gate_message:
        progress(report.gate_message)
    for line in failures:
        progress(line)
