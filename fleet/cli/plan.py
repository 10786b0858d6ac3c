"""`fleet plan`: which box holds which layers, and why."""

from __future__ import annotations

import json
from pathlib import Path

import click

from fleet.cli.options import inventory_argument, output_option
from fleet.cli.output import print_json, print_table

EXAMPLES = """
\b
Examples:
  fleet plan inventory/site.yaml
  fleet plan inventory/local.yaml -o json
  fleet plan inventory/lab.yaml --raw > plan.json
"""


@click.command(epilog=EXAMPLES)
@inventory_argument
@output_option
@click.option("--raw", is_flag=True, help="Print the plan itself as the boxes get it (JSON).")
def plan(inventory: Path, output: str, raw: bool) -> None:
    """Split each model over its pipeline's boxes and explain the result; changes nothing."""
    from fleet.bundle.models import read_models
    from fleet.inventory.loader import load_site
    from fleet.planning.explain import COLUMNS, as_data, stage_row, summary
    from fleet.planning.site import forecast, plan_site
    from fleet.provision.render_bundle import BundleView

    site_file = load_site(inventory, resolve_secrets=False)
    site, models = site_file.site, read_models(BundleView.of(site_file).manifest)
    planned = plan_site(site, models)
    if raw:
        click.echo(json.dumps(json.loads(planned.to_json()), indent=2))
        return
    forecasts = {name: forecast(site, name, models[pipeline.model]) for name, pipeline in planned.pipelines.items()}
    if output == "json":
        print_json("plan", {name: as_data(planned.pipelines[name], one) for name, one in forecasts.items()})
        return
    for name, predicted in forecasts.items():
        pipeline = planned.pipelines[name]
        print_table(f"pipeline {name}", COLUMNS, [stage_row(pipeline, stage) for stage in predicted.stages])
        click.echo(summary(name, pipeline, predicted))
