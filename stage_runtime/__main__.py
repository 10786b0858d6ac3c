"""`python -m stage_runtime --config FILE`: one stage of a pipeline."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from fleet import __version__
from fleet.errors import ExitCode, FleetError

EXAMPLES = """\
examples:
  python -m stage_runtime --config /opt/fleet/current/etc/stage.json
  python -m stage_runtime --config stage.json --check
  python -m stage_runtime --version
"""


def main(arguments: list[str] | None = None) -> int:
    """Parse the command line, then serve until SIGTERM; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m stage_runtime",
        description="Serve one stage of a pipeline: load its layers, join the ring, compute.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--config", type=Path, required=True, help="stage.json, written by `fleet provision`")
    parser.add_argument("--check", action="store_true", help="read the configuration, complain or not, and exit")
    parser.add_argument("--version", action="version", version=__version__)
    options = parser.parse_args(arguments)
    try:
        from stage_runtime.server.config import load_config

        config = load_config(options.config)
        if options.check:
            return ExitCode.OK
        from stage_runtime.server.logs import set_up_logging
        from stage_runtime.server.process import serve

        set_up_logging(config.box)
        serve(config)
    except FleetError as error:
        print(f"stage_runtime: {error.message}\n  {error.hint}", file=sys.stderr)
        return error.exit_code
    except ModuleNotFoundError as error:
        print(f"stage_runtime: {error}; install it with: pip install 'fleet-hardening[stage]'", file=sys.stderr)
        return ExitCode.FAILED
    except OSError as error:
        print(f"stage_runtime: can't start: {error}", file=sys.stderr)
        return ExitCode.FAILED


if __name__ == "__main__":
    sys.exit(main())
