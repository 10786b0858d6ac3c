"""Switching a box on and off, in order or by cutting its power."""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from pathlib import Path

from tests.lab import cgroups, disk, network
from tests.lab.box import BOX_PATH, BoxBase
from tests.lab.errors import LabError
from tests.lab.paths import REPOSITORY
from tests.lab.processes import POLL_SECONDS, ProcessRecord, wait_until

START_DEADLINE_SECONDS = 20.0
SSH_UP_DEADLINE_SECONDS = 30.0
BOOT_DEADLINE_SECONDS = 60.0
POWER_OFF_DEADLINE_SECONDS = 30.0
POWER_CUT_DEADLINE_SECONDS = 10.0
BANNER_SECONDS = 1.0
SSH_PORT = 22
POWER_OFF_SIGNAL = signal.SIGRTMIN + 4  # systemd(1): starts poweroff.target


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
