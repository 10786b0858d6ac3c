"""`fleet coordinator`: membership and plans on the control box, started by supervisord."""

from __future__ import annotations

from pathlib import Path

import click

EPILOG = """
\b
Examples:
  fleet coordinator --config /opt/fleet/current/etc/coordinator.json
  fleet coordinator --config /opt/fleet/current/etc/coordinator.json --check
  fleet coordinator --config coordinator.json --check
"""


@click.command(epilog=EPILOG)
@click.option(
    "--config",
    type=click.Path(dir_okay=False, path_type=Path),
    required=True,
    help="coordinator.json as `fleet provision` writes it.",
)
@click.option("--check", is_flag=True, help="Read configuration and certificates, then stop.")
def coordinator(config: Path, check: bool) -> None:
    """Watch a site's boxes and own its plans until SIGTERM."""
    import asyncio

    from fleet.coordinator.config import load_config
    from fleet.coordinator.run import check as check_files
    from fleet.coordinator.run import serve
    from fleet.gateway.log import set_up_logging

    set_up_logging()
    settings = load_config(config)
    check_files(settings)
    if not check:
        asyncio.run(serve(settings))
