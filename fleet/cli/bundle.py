"""`fleet bundle`: gather everything a site needs, in the office."""

from __future__ import annotations

import time
from pathlib import Path

import click

from fleet.cli.options import inventory_argument
from fleet.cli.output import print_table, progress, short_path


@click.command(
    epilog="""
\b
Examples:
  fleet bundle inventory/site.yaml
  fleet bundle inventory/lab.yaml --refresh
  fleet bundle inventory/site.yaml --output /media/stick/site -v
"""
)
@inventory_argument
@click.option(
    "--output",
    type=click.Path(file_okay=False, path_type=Path),
    help="Directory of the bundle, instead of the inventory's bundle_dir/<site>.",
)
@click.option("--refresh", is_flag=True, help="Look for newer wheels even if nothing changed.")
@click.option("-v", "--verbose", is_flag=True, help="Show pip's own output too.")
def bundle(inventory: Path, output: Path | None, refresh: bool, verbose: bool) -> None:
    """Gather wheels, uv, our own wheel and models for INVENTORY into one directory, with digests.

    Needs the network; the boxes do not. What is finished is kept: after Ctrl-C, run it again.
    TORCH_SOURCE=DIR_OR_WHEEL in the environment takes torch from there.
    """
    from fleet.bundle.build import build_bundle, total_size_text
    from fleet.inventory.loader import load_site

    started = time.monotonic()
    site_file = load_site(inventory, resolve_secrets=False)
    directory = output.resolve() if output is not None else site_file.bundle_directory
    result = build_bundle(site_file, directory, progress, refresh=refresh, verbose=verbose)
    manifest = result.manifest
    rows = [("own wheel", Path(manifest.fleet_wheel).name, "")]
    for target, wheels in manifest.targets.items():
        for name, lock in sorted(wheels.locks.items()):
            rows.append((f"{name} wheels", target, f"{len(lock.requirements)} wheels"))
    for name, model in manifest.models.items():
        rows.append((f"model {name}", model.directory, f"licence {model.licence}"))
    print_table(f"bundle of site {manifest.site}", ("part", "what", "detail"), rows)
    done = "done" if result.changed else "nothing changed"
    seconds = time.monotonic() - started
    progress(
        f"{done}: {short_path(directory)}, {len(manifest.files)} files, {total_size_text(manifest)}, {seconds:.1f} s"
    )
