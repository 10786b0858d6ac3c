"""pip as a subprocess: the user's own configuration (pip.conf, PIP_*) is honoured, failures become clear errors.

Old pips (Debian 12 ships 23.0) download a whole wheel just to read its requirements; then a newer pip is fetched
with the old one, as a wheel, and run from that wheel. The environment that fleet runs in is never changed.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fleet.bundle.files import Report, saying_when_quiet
from fleet.errors import FleetError

NEEDED_PIP = (25, 0)
"""From here on, `--dry-run` with `fast-deps` reads a remote wheel's metadata by range requests, without the wheel."""
SHOWN_ERROR_LINES = 4
UNREACHED = "connection broken by"
"""What pip's warning about a failed connection says (urllib3's retries)."""
NO_WHEEL = re.compile(r"No matching distribution found for (\S+)")


@dataclass(frozen=True)
class Pip:
    """Runs pip.

    Attributes:
        command: argv up to pip's own arguments.
        environment: pip's environment variables.
        report: takes lines of progress.
        verbose: also report pip's own output.
    """

    command: tuple[str, ...]
    environment: Mapping[str, str]
    report: Report
    verbose: bool = False

    def run(self, arguments: Sequence[str], doing: str, *, offline: bool = False) -> str:
        """Run pip to its end.

        Args:
            arguments: pip's arguments.
            doing: what this is, as "downloading torch"; said when it stays quiet, and in the error.
            offline: look at no index and at none of the user's places: only what the arguments name.

        Returns:
            pip's standard output.

        Raises:
            FleetError: pip failed; its last error lines are in the message, a package without a wheel by name.
        """
        environment = dict(self.environment)
        if offline:
            environment = {key: value for key, value in environment.items() if not key.startswith("PIP_")}
            environment |= {"PIP_CONFIG_FILE": os.devnull, "PIP_NO_INDEX": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
        if self.verbose:
            self.report(f"  $ pip {' '.join(arguments)}")
        with saying_when_quiet(self.report, doing):
            done = subprocess.run(
                [*self.command, *arguments],
                env=environment,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                errors="replace",
                check=False,
            )
        if self.verbose:
            for line in (done.stdout + done.stderr).splitlines():
                self.report(f"  | {line}")
        if done.returncode != 0:
            raise _failure(doing, done.stdout + done.stderr)
        return done.stdout

    def resolve(self, arguments: Sequence[str], doing: str, *, offline: bool = False) -> list[dict[str, Any]]:
        """What pip would install: the `install` list of its report (PyPA "Installation Report", version 1)."""
        with tempfile.TemporaryDirectory(prefix="fleet-pip-") as directory:
            report = Path(directory) / "report.json"
            options = ["--dry-run", "--ignore-installed", "--quiet", "--target", directory, "--report", str(report)]
            self.run(["install", *options, *arguments], doing, offline=offline)
            installed: list[dict[str, Any]] = json.loads(report.read_bytes())["install"]
            return installed


def _failure(doing: str, output: str) -> FleetError:
    no_wheel = NO_WHEEL.findall(output)
    if no_wheel and UNREACHED in output:
        return FleetError(
            f"{doing}: pip did not reach its index, so {no_wheel[-1]} was not found",
            hint="check the network, the proxy and `pip config list`, then run it again: what is finished is kept",
        )
    if no_wheel:
        return FleetError(
            f"{doing}: no usable wheel of {no_wheel[-1]}",
            hint="give pip a place that has one (PIP_FIND_LINKS=DIR, or PIP_EXTRA_INDEX_URL); -v shows pip's own words",
        )
    lines = [line for line in output.splitlines() if line.strip()]
    errors = [line for line in lines if "ERROR" in line] or lines
    words = " / ".join(line.strip() for line in errors[-SHOWN_ERROR_LINES:])
    return FleetError(
        f"{doing}: pip failed: {words}", hint="check the network and `pip config list`; run again with -v"
    )


def office_pip(tools: Path, report: Report, *, verbose: bool = False) -> Pip:
    """The pip of the running interpreter, or a newer one fetched with it into `tools`.

    Raises:
        FleetError: the interpreter has no pip at all, or an old one that cannot fetch a newer one.
    """
    environment = {**os.environ, "PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_NO_INPUT": "1", "PYTHONWARNINGS": "ignore"}
    own = Pip((sys.executable, "-m", "pip"), environment, report, verbose)
    try:
        version = own.run(["--version"], "looking at pip").split()[1]
    except FleetError as error:
        raise FleetError(
            f"{sys.executable} has no pip: {error.message}", hint="run fleet from a `python3 -m venv` environment"
        ) from error
    if tuple(int(part) for part in version.split(".")[:2]) >= NEEDED_PIP:
        return own
    wheel = next(iter(sorted(tools.glob("pip-*.whl"), reverse=True)), None)
    if wheel is None:
        report(f"pip {version} is too old to look into wheels before it downloads them: fetching a newer one")
        tools.mkdir(parents=True, exist_ok=True)
        needed = ".".join(str(part) for part in NEEDED_PIP)
        arguments = ["download", "--quiet", "--no-deps", "--only-binary=:all:", "--dest", str(tools), f"pip>={needed}"]
        own.run(arguments, "fetching a newer pip")
        wheel = next(tools.glob("pip-*.whl"))
    return Pip((sys.executable, str(wheel / "pip")), environment, report, verbose)
