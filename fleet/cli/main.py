"""Entry point of `fleet`: verbs are loaded only when called, so that `fleet --help` stays light."""

from __future__ import annotations

import importlib
import io
import os
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any

try:
    import click
except ModuleNotFoundError:  # the base distribution has no dependency: a stage box does not need the verbs
    sys.exit("fleet: this environment has no command line. Install it with: pip install 'fleet-hardening[operator]'")

from fleet import __version__
from fleet.errors import ExitCode, FleetError

# verb → (module with a click command of that name, one line of help); the module is imported when it is called
VERBS: dict[str, tuple[str, str]] = {
    "init": ("fleet.cli.init", "Write a commented inventory to start from."),
    "inventory": ("fleet.cli.inventory", "Check and show a site's inventory."),
    "plan": ("fleet.cli.plan", "Show which box holds which layers, and why."),
    "bundle": ("fleet.cli.bundle", "Gather wheels and models for a site, in the office."),
    "provision": ("fleet.cli.provision", "Bring every box of a site to its desired state."),
    "status": ("fleet.cli.status", "Show who holds which layers, health, and what the coordinator plans."),
    "events": ("fleet.cli.events", "Show what happened, why, and how long each phase took."),
    "drain": ("fleet.cli.drain", "Take a box out of its pipeline without losing an answer."),
    "undrain": ("fleet.cli.undrain", "Let a drained box take part again."),
    "drill": ("fleet.cli.drill", "Rehearse a failure on a live site, and say what users would have noticed."),
    "guard": ("fleet.cli.guard", "Show what the guards of the boxes see and do."),
    "time": ("fleet.cli.time", "Compare and set the clocks of boxes, where there is no time server."),
    "ask": ("fleet.cli.ask", "Ask the site's model a question."),
    "coordinator": ("fleet.cli.coordinator", "Run the coordinator (started by supervisord on the control box)."),
    "gateway": ("fleet.cli.gateway", "Run the gateway (started by supervisord on the control box)."),
    "docs": ("fleet.cli.docs", "Print reference pages generated from the code."),
    "down": ("fleet.cli.down", "Stop everything of a local site."),
}

EXAMPLES = """
\b
Examples:
  fleet inventory check inventory/site.yaml
  fleet provision inventory/site.yaml --check --diff
  fleet ask "Why is the sky blue?" -i inventory/local.yaml
"""


class LazyGroup(click.Group):
    """A click group that imports a verb's module only when the verb is called or its own help is asked for."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in VERBS:
            return None
        command: Any = getattr(importlib.import_module(VERBS[cmd_name][0]), cmd_name)
        assert isinstance(command, click.Command)  # noqa: S101 - a wrong table entry is a bug of ours
        return command

    def invoke(self, ctx: click.Context) -> Any:
        """Run the verb; its known error goes to stdout too where the verb was asked for JSON."""
        try:
            return super().invoke(ctx)
        except BrokenPipeError:  # `fleet … | head` closed our stdout: no error of ours
            _print_no_more()
            return int(ExitCode.OK)
        except FleetError as error:
            from fleet.cli.options import WANTS_JSON
            from fleet.cli.output import print_json

            if ctx.meta.get(WANTS_JSON):
                data = {"message": error.message, "next": error.hint, "exit_code": int(error.exit_code)}
                print_json("error", data)
            raise

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(verb, help_line) for verb, (_, help_line) in VERBS.items()])


@click.command(
    cls=LazyGroup,
    epilog=EXAMPLES,
    context_settings={"auto_envvar_prefix": "FLEET", "help_option_names": ["-h", "--help"]},
)
@click.version_option(__version__, prog_name="fleet")
def cli() -> None:
    """Provision, check and heal LLM inference on a site of edge boxes."""


def main(argv: list[str] | None = None) -> int:
    """Run a verb and turn every outcome into one of the exit codes of the contract.

    Args:
        argv: the arguments after the program's name; `sys.argv` if None.

    Returns:
        The exit code. Known errors print two lines; a bug of ours writes its traceback to a file and names it.
    """
    sys.stdout = sys.stdout or Path(os.devnull).open("w")  # noqa: SIM115 - closed by the caller (`>&-`)
    sys.stderr = sys.stderr or Path(os.devnull).open("w")  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a terminal that lacks a character shows ? for it
            stream.reconfigure(errors="replace")
    code = _run(argv)
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        _print_no_more()
    return code


def _print_no_more() -> None:
    """Nobody reads: what is still buffered goes nowhere, without a complaint at the interpreter's end."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for descriptor in (1, 2):
        os.dup2(nowhere, descriptor)
    os.close(nowhere)


def _run(argv: list[str] | None) -> int:
    try:
        result = cli.main(args=argv, prog_name="fleet", standalone_mode=False)
    except FleetError as error:
        click.echo(f"fleet: {error.message}", err=True)
        if error.hint:
            click.echo(f"  next: {error.hint}", err=True)
        return int(error.exit_code)
    except click.exceptions.Exit as error:
        return error.exit_code
    except click.ClickException as error:
        error.show()
        return int(ExitCode.USAGE)
    except (click.Abort, KeyboardInterrupt):
        click.echo("fleet: interrupted", err=True)
        return int(ExitCode.INTERRUPTED)
    except OSError as error:
        from fleet.provision.agent.main import MACHINE_ERRORS

        if error.errno not in MACHINE_ERRORS:
            return _bug(error)
        place = f"{error.filename}: " if error.filename else ""
        click.echo(f"fleet: {place}{error.strerror}", err=True)
        click.echo("  next: look at the disk (df -h), and at owner and mode of that path (ls -ld)", err=True)
        return int(ExitCode.FAILED)
    except Exception as error:
        return _bug(error)
    return int(result) if isinstance(result, int) else int(ExitCode.OK)


def _bug(error: Exception) -> int:
    """Keep the traceback in a file and say where."""
    with tempfile.NamedTemporaryFile("w", prefix="fleet-bug-", suffix=".txt", delete=False) as file:
        traceback.print_exc(file=file)
    click.echo(f"fleet: a bug in fleet, not in your input: {type(error).__name__}: {error}", err=True)
    click.echo(f"  next: send {Path(file.name)} to the maintainers with the command you typed", err=True)
    return int(ExitCode.FAILED)


if __name__ == "__main__":
    sys.exit(main())
