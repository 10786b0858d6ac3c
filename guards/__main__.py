"""`python -m guards`: the guards of a box, under supervisord, or a look at what they see."""

from __future__ import annotations

import argparse
import json
import logging
import shutil
import signal
import sys
import time
from pathlib import Path
from types import FrameType
from typing import Any

from fleet.errors import ExitCode, FleetError
from guards.assembly import House, house_of, house_without_configuration
from guards.config import GuardsConfig, load_config
from guards.findings import State
from guards.http import GuardsServer, json_page, metrics_page
from guards.metrics import BoardCollector, render
from guards.roots import Roots
from guards.status import status_document
from guards.table import table

EXAMPLES = """examples:
  python -m guards --observe                                    what guards can see of this machine
  python -m guards --observe --json                             the same, for programs
  python -m guards --config /opt/fleet/current/etc/guards.json  run, as supervisord does
"""
LOOK_SECONDS = 20.0  # a sensor that hangs costs its own deadline; nobody waits longer for a table


def main(arguments: list[str] | None = None) -> int:
    """Exit code of the process."""
    parser = argparse.ArgumentParser(
        prog="python -m guards",
        description="Watchdog guards of a box: heat, memory, clock, programs, surroundings.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    how = parser.add_mutually_exclusive_group(required=True)
    how.add_argument("--config", type=Path, metavar="FILE", help="guards.json, as `fleet provision` writes it")
    how.add_argument("--observe", action="store_true", help="look once, print a table, and do nothing")
    parser.add_argument("--json", action="store_true", help="with --observe: JSON in place of the table")
    options = parser.parse_args(arguments)
    logging.basicConfig(
        level=logging.INFO if options.config else logging.ERROR,
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
        stream=sys.stdout if options.config else sys.stderr,
    )
    try:
        return _observe(as_json=options.json) if options.observe else _run(load_config(options.config))
    except FleetError as error:
        print(f"error: {error.message}", file=sys.stderr)
        if error.hint:
            print(f"next: {error.hint}", file=sys.stderr)
        return int(error.exit_code)


def _observe(*, as_json: bool) -> int:
    house = house_without_configuration(Roots())
    house.runner.look(LOOK_SECONDS)
    if as_json:
        print(json.dumps(_status(house, site="", box=""), indent=2))
    else:
        print(table(house.board.standings(), shutil.get_terminal_size().columns))
    return int(ExitCode.OK)


def _run(config: GuardsConfig) -> int:
    house = house_of(config, Roots())
    keeper = house.keeper
    collector = BoardCollector(
        house.board, keeper.left, trouble=lambda: keeper.trouble, write_seconds=lambda: keeper.write_seconds
    )

    def status() -> tuple[bool, dict[str, Any]]:
        return True, _status(house, config.site, config.box)

    def health() -> tuple[bool, dict[str, Any]]:
        return _health(house, config.site, config.box)

    pages = {
        "/v1/guards": json_page(status),
        "/health": json_page(health),
        "/metrics": metrics_page(lambda: render(collector)),
    }
    try:
        server = GuardsServer(config.listen.host, config.listen.port, config.tls, config.site, pages)
    except OSError as error:
        raise FleetError(
            f"cannot listen on {config.listen.host}:{config.listen.port}: {error.strerror or error}",
            hint=f"see who has the port: ss -ltnp 'sport = :{config.listen.port}'",
        ) from None

    def stop(number: int, frame: FrameType | None) -> None:
        del number, frame
        house.runner.stop()

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)
    server.start()
    try:
        house.runner.run(house.helpers)
    finally:
        server.close()
    return int(ExitCode.OK)


def _health(house: House, site: str, box: str) -> tuple[bool, dict[str, Any]]:
    """Well unless the worst finding needs an action."""
    states = {name: standing.state for name, standing in house.board.standings().items()}
    worst = max(states.values(), key=lambda state: state.severity)
    document = {
        "schema": 1,
        "site": site,
        "box": box,
        "state": worst.value,
        "guards": {name: state.value for name, state in states.items()},
        "reason": house.keeper.trouble,
    }
    return worst is not State.UNHEALTHY, document


def _status(house: House, site: str, box: str) -> dict[str, Any]:
    return status_document(
        site=site,
        box=box,
        observe=house.observe,
        settings=house.settings,
        standings=house.board.standings(),
        events=house.board.events(),
        budgets_left=house.keeper.left(),
        trouble=house.keeper.trouble,
        monotonic_seconds=time.monotonic(),
    )


if __name__ == "__main__":
    sys.exit(main())
