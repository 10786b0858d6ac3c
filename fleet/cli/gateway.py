"""`fleet gateway`: the OpenAI API on the control box, started by supervisord."""

from __future__ import annotations

from pathlib import Path

import click

EPILOG = """
\b
Examples:
  fleet gateway --config /opt/fleet/current/etc/gateway.json
  fleet gateway --config /opt/fleet/current/etc/gateway.json --check
  fleet gateway --config gateway.json --check
"""


@click.command(epilog=EPILOG)
@click.option(
    "--config",
    type=click.Path(dir_okay=False, path_type=Path),
    required=True,
    help="gateway.json as `fleet provision` writes it.",
)
@click.option("--check", is_flag=True, help="Read configuration, keys, tokenizers and templates, then stop.")
def gateway(config: Path, check: bool) -> None:
    """Serve the OpenAI API for a site's pipelines until SIGTERM."""
    import asyncio

    from fleet.gateway.config import load_config
    from fleet.gateway.links import make_pipelines
    from fleet.gateway.log import set_up_logging
    from fleet.gateway.metrics import GatewayMetrics
    from fleet.gateway.server import make_gateway, serve

    set_up_logging()
    settings = load_config(config)
    metrics = GatewayMetrics([each.name for each in settings.pipelines])
    served = make_gateway(settings, make_pipelines(settings, metrics), metrics)
    if not check:
        asyncio.run(serve(served))
