"""`fleet inventory check` and `fleet inventory show`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from fleet.cli.options import inventory_argument, output_option
from fleet.cli.output import print_json, print_table

BOX_COLUMNS = ("box", "address", "connection", "profile", "roles", "labels", "pipeline")
PIPELINE_COLUMNS = ("pipeline", "model", "boxes", "layers", "engine", "policy")


@click.group(
    epilog="""
\b
Examples:
  fleet inventory check inventory/site.yaml
  fleet inventory show inventory/site.yaml
  fleet inventory show inventory/site.yaml -o json
"""
)
def inventory() -> None:
    """Check and show a site's inventory. Works without the site's secrets."""


@inventory.command(
    epilog="""
\b
Examples:
  fleet inventory check
  fleet inventory check inventory/site.yaml
  fleet inventory check inventory/lab.yaml && fleet bundle inventory/lab.yaml
"""
)
@inventory_argument
def check(inventory: Path) -> None:
    """Check INVENTORY and name every mistake with its line. Exit code 78 if there is one."""
    from fleet.inventory.loader import load_site

    site = load_site(inventory, resolve_secrets=False).site
    counts = {
        "box": len(site.boxes),
        "device profile": len(site.device_profiles),
        "model": len(site.models),
        "pipeline": len(site.pipelines),
    }
    click.echo(f"ok: site {site.site}, " + ", ".join(_counted(number, noun) for noun, number in counts.items()))


@inventory.command(
    epilog="""
\b
Examples:
  fleet inventory show
  fleet inventory show inventory/lab.yaml
  fleet inventory show inventory/site.yaml -o json
"""
)
@inventory_argument
@output_option
def show(inventory: Path, output: str) -> None:
    """Show INVENTORY with all defaults applied. Secrets show as their references."""
    from fleet.inventory.loader import load_site

    site = load_site(inventory, resolve_secrets=False).site
    data = site.model_dump(mode="json")
    if output == "json":
        print_json("inventory", data)
        return
    print_table(f"site {site.site}", BOX_COLUMNS, [_box_row(name, box, data) for name, box in data["boxes"].items()])
    click.echo("")
    print_table("pipelines", PIPELINE_COLUMNS, [_pipeline_row(name, line) for name, line in data["pipelines"].items()])
    click.echo("")
    settings = {key: value for key, value in data.items() if key not in ("boxes", "pipelines")}
    print_table("settings", ("key", "value"), _leaves(settings))


def _counted(number: int, noun: str) -> str:
    plural = noun + "es" if noun.endswith("x") else noun + "s"
    return f"{number} {noun if number == 1 else plural}"


def _box_row(name: str, box: dict[str, Any], data: dict[str, Any]) -> list[str]:
    address = box["address"] if box["port"] == 22 else f"{box['address']} port {box['port']}"
    labels = " ".join(f"{key}={value}" for key, value in box["labels"].items())
    lines = " ".join(line for line, spec in data["pipelines"].items() if name in spec["boxes"])
    return [name, address, box["connection"], box["profile"], " ".join(box["roles"]), labels or "–", lines or "–"]


def _pipeline_row(name: str, line: dict[str, Any]) -> list[str]:
    layers = line["layers"]
    ranges = layers if isinstance(layers, str) else " ".join(f"{box}:{layers[box]}" for box in line["boxes"])
    return [name, line["model"], " → ".join(line["boxes"]), ranges, line["engine"]["kind"], line["policy"]]


def _leaves(value: Any, path: str = "") -> list[tuple[str, str]]:
    """Every value below a mapping with its key path, e.g. ("ports.ring", "7401")."""
    if isinstance(value, dict) and value:
        return [leaf for key, part in value.items() for leaf in _leaves(part, f"{path}.{key}" if path else key)]
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return [leaf for index, part in enumerate(value) for leaf in _leaves(part, f"{path}[{index}]")]
    if value is None or value in ([], {}):
        return [(path, "–")]
    return [(path, ", ".join(map(str, value)) if isinstance(value, list) else str(value))]
