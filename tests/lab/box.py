"""One box: its names, settings and processes, commands inside it and over SSH."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from pathlib import Path

from tests.lab import cgroups
from tests.lab.errors import LabError
from tests.lab.paths import LabPaths
from tests.lab.processes import ProcessRecord, Result, children, command_name, run
from tests.lab.settings import BoxSettings

COMMAND_DEADLINE_SECONDS = 60.0
SSH_CONNECT_SECONDS = 3
BOX_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_EXEC_IN_CGROUPS = 'while [ "$1" != -- ]; do echo $$ >"$1/cgroup.procs"; shift; done; shift; exec "$@"'


class BoxBase:
    """What every part of a box needs: names, settings, its processes, commands inside it and over SSH."""

    def __init__(self, lab: LabPaths, name: str) -> None:
        self.lab = lab
        self.name = name
        self.paths = lab.box(name)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name} {self.address}>"

    @property
    def address(self) -> str:
        """IPv4 address on the lab's network."""
        return self.paths.address

    @property
    def settings(self) -> BoxSettings:
        """What the lab remembers of this box; a fresh copy on each read."""
        return BoxSettings.load(self.paths.settings)

    @property
    def init_pid(self) -> int | None:
        """Pid, on the host, of the box's init; None when the box is off."""
        launcher = ProcessRecord.load(self.paths.launcher_record)
        if launcher is None or not launcher.alive:
            return None
        for child in children(launcher.pid):
            if command_name(child) == "systemd-nspawn":
                for candidate in children(child):
                    if _is_init(candidate):
                        return candidate
        return None

    @property
    def is_on(self) -> bool:
        """Whether the box runs (frozen counts)."""
        return self.init_pid is not None

    def need_init(self) -> int:
        """Pid of the box's init.

        Raises:
            LabError: the box is off.
        """
        pid = self.init_pid
        if pid is None:
            raise LabError(f"{self.name} is off", hint=f"run: python -m tests.lab on {self.name}")
        return pid

    def inside(self, path: str) -> Path:
        """Where the host sees the box's absolute `path`. Links on the way must be relative.

        Raises:
            LabError: the box is off.
        """
        return Path(f"/proc/{self.need_init()}/root") / path.lstrip("/")

    def write_file(self, path: str, content: str | bytes, *, mode: int = 0o644) -> None:
        """Write a file in the box, synced, as root; parent directories are made."""
        file = self.inside(path)
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("wb") as sink:
            sink.write(content.encode() if isinstance(content, str) else content)
            os.fchmod(sink.fileno(), mode)
            sink.flush()
            os.fsync(sink.fileno())

    def exec_argv(self, argv: Sequence[str]) -> list[str]:
        """The host's command line that runs `argv` in the box: in its namespaces, limits and root, without SSH."""
        limits = [directory for name, directory in self.settings.cgroups.items() if name in cgroups.LIMITING]
        enter = ["nsenter", f"--target={self.need_init()}", "--all", "--", "env", "-i", f"PATH={BOX_PATH}"]
        enter += ["HOME=/root", "USER=root", "LANG=C.UTF-8", f"TERM={os.environ.get('TERM', 'dumb')}"]
        return ["sh", "-c", _EXEC_IN_CGROUPS, "sh", *limits, "--", *enter, *argv]

    def exec(
        self,
        argv: Sequence[str],
        *,
        input_text: str | None = None,
        check: bool = True,
        deadline_seconds: float = COMMAND_DEADLINE_SECONDS,
    ) -> Result:
        """Run a command in the box as root, without SSH (so it leaves no login record).

        Raises:
            LabError: the box is off, or (`check`) the command failed.
            LabTimeoutError: it still ran after `deadline_seconds`.
        """
        result = run(self.exec_argv(argv), input_text=input_text, check=False, deadline_seconds=deadline_seconds)
        return self._checked(Result(tuple(argv), result.exit_code, result.stdout, result.stderr), check)

    def ssh_argv(self, argv: Sequence[str]) -> list[str]:
        """The command line that runs `argv` on the box over SSH as root; an empty `argv` is a login shell."""
        options = {
            "BatchMode": "yes",
            "ConnectTimeout": str(SSH_CONNECT_SECONDS),
            "IdentitiesOnly": "yes",
            "LogLevel": "ERROR",
            "StrictHostKeyChecking": "yes",
            "UserKnownHostsFile": _ssh_quoted(self.lab.known_hosts),
        }
        words = [word for name, value in options.items() for word in ("-o", f"{name}={value}")]
        remote = [shlex.join(argv)] if argv else []
        return ["ssh", "-F", "none", "-i", str(self.lab.private_key), *words, f"root@{self.address}", *remote]

    def ssh(
        self,
        argv: Sequence[str],
        *,
        input_text: str | None = None,
        check: bool = True,
        deadline_seconds: float = COMMAND_DEADLINE_SECONDS,
    ) -> Result:
        """Run a command on the box over SSH as root.

        Raises:
            LabError: (`check`) the command failed, or the box was not reached (exit code 255).
            LabTimeoutError: it still ran after `deadline_seconds`.
        """
        result = run(self.ssh_argv(argv), input_text=input_text, check=False, deadline_seconds=deadline_seconds)
        return self._checked(Result(tuple(argv), result.exit_code, result.stdout, result.stderr), check)

    def _checked(self, result: Result, check: bool) -> Result:
        if check and result.exit_code != 0:
            words = (result.stderr.strip() or result.stdout.strip() or "it said nothing")[-2000:]
            raise LabError(f"{self.name}: {shlex.join(result.argv)} exited with {result.exit_code}: {words}")
        return result


def _is_init(pid: int) -> bool:
    """Whether the process is number 1 of a pid namespace (proc(5), NSpid) and has become the box's systemd."""
    try:
        status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return False
    numbers = next((line.split()[1:] for line in status.splitlines() if line.startswith("NSpid:")), [])
    return len(numbers) > 1 and numbers[-1] == "1" and command_name(pid) == "systemd"


def _ssh_quoted(path: Path) -> str:
    """A path as a value of an ssh option: quoted for blanks, `%` doubled (ssh_config(5), TOKENS)."""
    return '"' + str(path).replace("%", "%%") + '"'
