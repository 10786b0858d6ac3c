"""`fleet plan`: which box holds which layers, and why; what becomes of that when boxes are lost."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import click

from fleet.cli.options import inventory_argument, output_option
from fleet.cli.output import print_json, print_table
from fleet.errors import ExitCode, FleetError

if TYPE_CHECKING:
    from fleet.inventory.model import Site
    from fleet.planning.what_if import Outlook

EXAMPLES = """
\b
Examples:
  fleet plan inventory/site.yaml
  fleet plan inventory/local.yaml --without box2
  fleet plan inventory/lab.yaml --without box1,box2 -o json
  fleet plan inventory/lab.yaml --raw > preview.json
"""


def _names(_: click.Context, __: click.Parameter, values: tuple[str, ...]) -> tuple[str, ...]:
    """Names of a repeatable option with comma lists."""
    return tuple(name.strip() for value in values for name in value.split(",") if name.strip())


@click.command(epilog=EXAMPLES)
@inventory_argument
@output_option
@click.option(
    "--without",
    metavar="BOX",
    multiple=True,
    callback=_names,
    help="Show the plan after these boxes are lost; repeatable, comma-separated. Exit code 1 if no plan fits then.",
)
@click.option("--raw", is_flag=True, help="Print the previewed plan as JSON.")
def plan(inventory: Path, output: str, without: tuple[str, ...], raw: bool) -> int:
    """Split each model over its pipeline's boxes and explain the result; changes nothing."""
    from fleet.bundle.models import read_models
    from fleet.inventory.loader import load_site
    from fleet.planning.explain import outlook_as_data
    from fleet.planning.site import box_costs, plan_site, spec_of
    from fleet.planning.what_if import look_ahead
    from fleet.provision.render_bundle import BundleView

    if raw and without:
        raise click.UsageError("--raw prints the plan of the whole site; leave out --without, or use -o json")
    site_file = load_site(inventory, resolve_secrets=False)
    site = site_file.site
    _check_names(site, inventory, without)
    models = read_models(BundleView.of(site_file).manifest)
    planned = plan_site(site, models)
    if raw:
        click.echo(json.dumps(json.loads(planned.to_json()), indent=2))
        return ExitCode.OK
    outlooks = {
        name: look_ahead(spec_of(site, name, models[one.model]), one, box_costs(site, name), without)
        for name, one in planned.pipelines.items()
    }
    if output == "json":
        print_json("plan", {name: outlook_as_data(outlook) for name, outlook in outlooks.items()})
    else:
        for name, outlook in outlooks.items():
            _show(name, outlook)
    return _verdict(outlooks)


def _check_names(site: Site, inventory: Path, names: tuple[str, ...]) -> None:
    """Refuse names that are no stage box.

    Raises:
        FleetError: names the nearest box.
    """
    from fleet.inventory.problems import nearest

    lines = site.pipelines.values()
    boxes = dict.fromkeys(box for line in lines if line.engine.kind != "external" for box in line.boxes)
    for name in names:
        if name not in boxes:
            raise FleetError(
                f"{inventory}: --without {name}: no pipeline has such a box; {nearest(name, boxes)}",
                hint=f"fleet plan {inventory}",
                exit_code=ExitCode.USAGE,
            )


def _show(name: str, outlook: Outlook) -> None:
    """The plan with all boxes, its weak spots, and the plan after the loss, if one was asked about."""
    from fleet.planning.explain import COLUMNS, loss_summary, stage_row, summary, survival
    from fleet.planning.spec import Refusal

    rows = [stage_row(outlook.plan, stage) for stage in outlook.forecast.stages]
    print_table(f"pipeline {name}", COLUMNS, rows)
    click.echo(summary(name, outlook.plan, outlook.forecast))
    click.echo(survival(name, outlook.unsurvivable))
    loss = outlook.loss
    if loss is None or isinstance(loss, Refusal):
        return
    click.echo()
    rows = [stage_row(loss.after, stage) for stage in loss.forecast.stages]
    print_table(f"pipeline {name} without {', '.join(loss.boxes)}", COLUMNS, rows)
    click.echo(loss_summary(name, outlook.plan, outlook.forecast, loss))


def _verdict(outlooks: dict[str, Outlook]) -> int:
    """Exit code 1, and the reason on stderr, if a pipeline does not survive the loss that was asked about."""
    from fleet.planning.site import MAKE_ROOM
    from fleet.planning.spec import Refusal

    refusals = [outlook.loss for outlook in outlooks.values() if isinstance(outlook.loss, Refusal)]
    for refusal in refusals:
        click.echo(f"fleet: {refusal.reason}\n  next: {MAKE_ROOM}", err=True)
    return ExitCode.FAILED if refusals else ExitCode.OK
