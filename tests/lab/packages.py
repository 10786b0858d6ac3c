"""Install the Debian packages that the lab needs on its host: `python -m tests.lab.packages` (root).

Nothing that comes along may start a server on the host, so a `policy-rc.d` that forbids it (exit 101, see
Debian's `invoke-rc.d`) stands while apt works. One that was there before is put back, whatever happens.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

from tests.lab.errors import LabError, require_root

PACKAGE_LIST = Path(__file__).with_name("packages.txt")
POLICY = Path("/usr/sbin/policy-rc.d")
POLICY_ASIDE_SUFFIX = ".before-fleet-lab"
FORBID_ALL = "#!/bin/sh\n# Written by fleet's lab while it installs packages: no server may start.\nexit 101\n"
INSTALL_DEADLINE_SECONDS = 900
QUERY_DEADLINE_SECONDS = 30


def wanted(text: str) -> list[str]:
    """Package names of a `packages.txt`: one a line, `#` starts a comment.

    >>> wanted("gcc  # compiler\\n\\n# nothing\\nzstd\\n")
    ['gcc', 'zstd']
    """
    names = (line.split("#", 1)[0].strip() for line in text.splitlines())
    return [name for name in names if name]


def missing(names: list[str]) -> list[str]:
    """Those of `names` that dpkg does not list as installed.

    Raises:
        LabError: this is not a Debian system.
    """
    try:
        answer = subprocess.run(
            ["dpkg-query", "--show", "--showformat=${Package} ${db:Status-Status}\\n", *names],
            capture_output=True,
            text=True,
            check=False,  # it exits 1 when a package is unknown, which is what we ask about
            timeout=QUERY_DEADLINE_SECONDS,
        )
    except FileNotFoundError:
        raise LabError(
            "this machine has no dpkg; the lab needs a Debian or Ubuntu host",
            hint=f"install by other means what {PACKAGE_LIST} lists",
        ) from None
    installed = {line.split()[0] for line in answer.stdout.splitlines() if line.endswith(" installed")}
    return [name for name in names if name not in installed]


@contextlib.contextmanager
def no_server_starts(policy: Path = POLICY) -> Iterator[None]:
    """Forbid starting servers through `policy`; put back what was there at the end, also on Ctrl-C and SIGTERM.

    A run that was killed in between leaves the earlier policy aside; the next run finds it and puts it back.
    """
    aside = policy.with_name(policy.name + POLICY_ASIDE_SUFFIX)
    interrupted: list[int] = []

    def remember(number: int, _frame: FrameType | None) -> None:
        interrupted.append(number)
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, remember)
    try:
        if policy.exists() and not aside.exists():
            policy.rename(aside)
        policy.write_text(FORBID_ALL, encoding="utf-8")
        policy.chmod(0o755)
        yield
    finally:
        if aside.exists():
            aside.replace(policy)
        else:
            policy.unlink(missing_ok=True)
        signal.signal(signal.SIGTERM, before)


def install(names: list[str]) -> None:
    """Install `names` with apt; if that fails, refresh the package lists and try again.

    Raises:
        LabError: apt failed twice; its own words stand above on stderr.
    """
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive", "LC_ALL": "C.UTF-8"}
    argv = ["apt-get", "install", "--yes", "--quiet", "--no-install-recommends", *names]

    def apt(command: list[str]) -> bool:
        print("lab:", " ".join(command), file=sys.stderr, flush=True)
        result = subprocess.run(
            command, env=environment, check=False, stdout=sys.stderr, timeout=INSTALL_DEADLINE_SECONDS
        )
        return result.returncode == 0

    refresh = ["apt-get", "update", "--quiet"]
    with no_server_starts():
        # Fails at first where package lists are absent or old; a refresh over a shaky line gets a second chance.
        if not apt(argv) and not ((apt(refresh) or apt(refresh)) and apt(argv)):
            raise LabError(
                f"apt-get could not install {', '.join(names)}",
                hint="read apt's lines above, mend its sources, then run: python -m tests.lab.packages",
            )


def install_missing() -> list[str]:
    """Install what `packages.txt` lists and the host lacks; the names installed, empty when all were there.

    Raises:
        LabError: not root, no dpkg, or apt failed.
    """
    lacking = missing(wanted(PACKAGE_LIST.read_text(encoding="utf-8")))
    if lacking:
        require_root("installing packages")
        install(lacking)
    return lacking


def main() -> int:
    """Entry point: 0 when everything is there at the end."""
    try:
        installed = install_missing()
    except LabError as error:
        print(error.for_terminal(), file=sys.stderr)
        return 1
    print(f"lab: installed {', '.join(installed)}" if installed else "lab: all packages are there", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
