"""One box: power, commands inside and over SSH. Faults and views are in `faults.py` and `views.py`."""

from __future__ import annotations

import os
import shlex
import signal
import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from tests.lab import cgroups, disk, network
from tests.lab.errors import LabError, LabTimeoutError
from tests.lab.paths import REPOSITORY, LabPaths
from tests.lab.processes import POLL_SECONDS, ProcessRecord, Result, children, command_name, run, wait_until
from tests.lab.settings import BoxSettings

START_DEADLINE_SECONDS = 20.0
SSH_UP_DEADLINE_SECONDS = 30.0
BOOT_DEADLINE_SECONDS = 60.0
POWER_OFF_DEADLINE_SECONDS = 30.0
POWER_CUT_DEADLINE_SECONDS = 10.0
COMMAND_DEADLINE_SECONDS = 60.0
SSH_CONNECT_SECONDS = 3
BANNER_SECONDS = 1.0
SSH_PORT = 22
POWER_OFF_SIGNAL = signal.SIGRTMIN + 4  # systemd(1): starts poweroff.target
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


class BoxPower(BoxBase):
    """Switching a box on and off."""

    def on(self, *, wait: bool = True) -> None:
        """Switch on; with `wait`, return when sshd answers. Nothing happens to a box that is on.

        Raises:
            LabError: the box does not start; the message has the end of its console.
            LabTimeoutError: sshd did not answer in time.
        """
        if not self.is_on:
            self._start()
        if wait:
            self.wait_for_ssh()

    def _start(self) -> None:
        self._clear()
        settings = self.settings
        disk.make_disk(self.paths.disk, settings.disk_mib)
        self.paths.thermal.mkdir(parents=True, exist_ok=True)
        network.cable_up(self.paths, link_up=not settings.link_cut)
        if settings.shape:
            network.wire_up(self.paths, settings.shape)
        settings.cgroups = cgroups.make(self.name)
        settings.save(self.paths.settings)
        launcher = [sys.executable, "-m", "tests.lab.launcher", str(self.lab.state), self.name]
        environment = ["env", "-i", f"PATH={BOX_PATH}", f"PYTHONPATH={REPOSITORY}"]
        unshare = ["unshare", "--mount", "--propagation", "private", "--"]
        network.start_detached([*environment, *unshare, *launcher], self.paths.console)
        began = time.monotonic()
        while not self.is_on:
            record = ProcessRecord.load(self.paths.launcher_record)
            if (record and not record.alive) or time.monotonic() - began > START_DEADLINE_SECONDS:
                raise LabError(f"{self.name} did not start: {self._end_of_console()}", hint=f"see {self.paths.console}")
            time.sleep(POLL_SECONDS)

    def _end_of_console(self) -> str:
        if not self.paths.console.exists():
            return "its console is empty"
        return self.paths.console.read_text(encoding="utf-8", errors="replace")[-1000:].strip()

    def _clear(self) -> None:
        """Remove what a box that is off, or a lab that crashed, has left: processes, cgroups, cable."""
        settings = self.settings
        cgroups.kill_members(settings.cgroups, self.name)
        launcher = ProcessRecord.load(self.paths.launcher_record)
        if launcher:
            launcher.kill()
            wait_until(lambda: not launcher.alive, f"{self.name}: end of its launcher", POWER_CUT_DEADLINE_SECONDS)
        self.paths.launcher_record.unlink(missing_ok=True)
        disk.wait_released(self.paths.disk, self.name)
        network.wire_down(self.paths)
        network.cable_down(self.paths)
        cgroups.remove(settings.cgroups)

    def wait_for_ssh(self, deadline_seconds: float = SSH_UP_DEADLINE_SECONDS) -> None:
        """Return when sshd sends its banner.

        Raises:
            LabTimeoutError: it does not within the deadline.
        """
        wait_until(self._has_banner, f"{self.name}: banner of sshd at {self.address}:{SSH_PORT}", deadline_seconds)

    def _has_banner(self) -> bool:
        try:
            with socket.create_connection((self.address, SSH_PORT), timeout=BANNER_SECONDS) as connection:
                return connection.recv(4) == b"SSH-"
        except OSError:
            return False

    def wait_until_booted(self, deadline_seconds: float = BOOT_DEADLINE_SECONDS) -> None:
        """Return when systemd has finished booting (`running` or `degraded`).

        Raises:
            LabTimeoutError: it has not within the deadline.
        """

        def booted() -> bool:
            state = self.exec(["systemctl", "is-system-running"], check=False).stdout.strip()
            return state in ("running", "degraded")

        wait_until(booted, f"{self.name}: end of its boot", deadline_seconds)

    def off(self) -> None:
        """Shut down in order, as `systemctl poweroff` does. Nothing happens to a box that is off.

        Raises:
            LabTimeoutError: it had not ended within the deadline.
        """
        init = self.init_pid
        if init is not None:
            cgroups.freeze(self.settings.cgroups, frozen=False)
            os.kill(init, POWER_OFF_SIGNAL)
            wait_until(lambda: not self._launcher_alive(), f"{self.name}: power-off", POWER_OFF_DEADLINE_SECONDS)
        self._clear()

    def power_cut(self) -> None:
        """Cut the power, quietly: nothing more leaves the box, and what had not reached its disk is lost.

        The link goes first, or the kernel would send FIN or RST for the dying sockets. Then the disk stops without
        flushing its journal, then every process is killed.

        Raises:
            LabError: the box is off.
        """
        init = self.need_init()
        launcher = ProcessRecord.load(self.paths.launcher_record)
        assert launcher is not None  # init was found through it
        network.set_link(self.paths, up=False)
        disk.lose_power(Path(f"/proc/{launcher.pid}/root") / str(self.paths.mounted_disk).lstrip("/"))
        os.kill(init, signal.SIGKILL)
        self._clear()

    def kill(self) -> None:
        """End the box at once without any care for its disk or its neighbours; for tearing down."""
        self._clear()

    def reboot(self) -> None:
        """Ask the box to reboot, and return when it has booted anew and sshd answers.

        Raises:
            LabTimeoutError: a step took too long.
        """
        before = self.need_init()
        self.exec(["systemctl", "--no-block", "reboot"])
        wait_until(lambda: self.init_pid not in (None, before), f"{self.name}: reboot", POWER_OFF_DEADLINE_SECONDS)
        self.wait_for_ssh()

    def renew_disk(self, disk_mib: int | None = None) -> None:
        """Give a box that is off an empty disk, of another size (MiB) if told so: it starts unprovisioned.

        Raises:
            LabError: the box is on.
        """
        if self.is_on:
            raise LabError(f"{self.name} is on, its disk is in use", hint=f"run: python -m tests.lab off {self.name}")
        settings = self.settings
        settings.layers = []
        settings.disk_mib = disk_mib or settings.disk_mib
        settings.save(self.paths.settings)
        self.paths.disk.unlink(missing_ok=True)

    def _launcher_alive(self) -> bool:
        launcher = ProcessRecord.load(self.paths.launcher_record)
        return launcher is not None and launcher.alive


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


__all__ = ["BoxBase", "BoxPower", "LabTimeoutError"]
