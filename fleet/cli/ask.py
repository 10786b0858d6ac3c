"""`fleet ask`: a question to the site's model, answered as it is generated."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from fleet.cli.options import inventory_option, output_option

EPILOG = """
\b
Examples:
  fleet ask "Why is the sky blue?" -i inventory/local.yaml
  fleet ask "Name three rivers." --system "Answer in one line." --max-tokens 40
  fleet ask "Tell me a joke." --temperature 0.8 --seed 7 -o json
"""


def _share_a_line() -> bool:
    """Whether stdout and stderr end in the same place, a terminal or a log."""
    import os

    try:
        return os.path.sameopenfile(sys.stdout.fileno(), sys.stderr.fileno())
    except OSError:  # one of them is closed, or no file
        return False


@click.command(epilog=EPILOG)
@click.argument("question")
@inventory_option
@click.option("--model", help="Name of the model; the site's first one if not given.")
@click.option("--max-tokens", type=click.IntRange(min=1), help="Most tokens of the answer.")
@click.option(
    "--temperature",
    type=click.FloatRange(0, 2),
    default=0.0,
    show_default=True,
    help="0 always takes the likeliest token, so that equal questions get equal answers.",
)
@click.option("--seed", type=int, help="Equal seeds give equal answers.")
@click.option("--system", help="System message before the question.")
@output_option
def ask(
    *,
    question: str,
    inventory: Path,
    model: str | None,
    max_tokens: int | None,
    temperature: float,
    seed: int | None,
    system: str | None,
    output: str,
) -> None:
    """Ask the site's model a QUESTION; the answer goes to stdout while it is generated."""
    import asyncio
    from dataclasses import asdict

    from fleet.cli.output import print_json, progress
    from fleet.errors import FleetError
    from fleet.inventory.loader import load_site
    from fleet.observe.asking import Asker, Question
    from fleet.observe.site_access import api_key, client_context, load_endpoints

    site_file = load_site(inventory)
    endpoint = load_endpoints(site_file).gateway
    if endpoint is None:
        raise FleetError(
            f"{inventory}: the site has no gateway", hint="give a box the role gateway, then fleet provision"
        )

    in_line = False

    def show(text: str) -> None:
        nonlocal in_line
        sys.stdout.write(text)
        sys.stdout.flush()
        in_line = not text.endswith("\n")

    def wait(line: str) -> None:
        nonlocal in_line
        progress(f"\n{line}" if in_line and _share_a_line() else line)
        in_line = False

    asker = Asker(
        endpoint=endpoint,
        context=client_context(site_file, with_certificate=False),
        key=api_key(site_file),
        status_command=f"fleet status -i {inventory}",
        on_text=(lambda _: None) if output == "json" else show,
        on_wait=wait,
    )
    reply = asyncio.run(asker.ask(Question(question, system, model, max_tokens, temperature, seed)))
    if output == "json":
        print_json("answer", asdict(reply))
    else:
        sys.stdout.write("\n")
