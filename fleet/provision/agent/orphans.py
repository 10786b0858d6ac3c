"""Processes that a killed supervisord left behind in local mode: they hold ports and sockets, and nobody watches them.
Under systemd the unit's control group ends them."""

from __future__ import annotations

import os
import signal
import time

from fleet.provision.agent.peer import Peer

POLL_SECONDS = 0.2
DRAIN_SECONDS = 60.0  # asked to end, a stage finishes what it is about; then it is killed


def _command_line(pid: str) -> list[str]:
    """Of a process of this user; empty for anyone else's, and for one that is gone."""
    try:
        if os.stat(f"/proc/{pid}").st_uid != os.geteuid():
            return []
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            return file.read().decode(errors="replace").split("\0")
    except (FileNotFoundError, ProcessLookupError):
        return []


def find(config_path: str) -> dict[int, str]:
    """Python processes that run with a file of this box's active configuration: process id → the file's name.

    Args:
        config_path: supervisord's configuration, `<prefix>/current/etc/supervisord.conf`.
    """
    below = os.path.dirname(config_path) + "/"
    found = {}
    for pid in filter(str.isdigit, os.listdir("/proc")):
        program, *arguments = _command_line(pid) or [""]
        files = [argument for argument in arguments if argument.startswith(below)]
        if files and os.path.basename(program).startswith("python"):
            found[int(pid)] = os.path.splitext(os.path.basename(files[0]))[0]
    return found


def end(config_path: str, peer: Peer) -> list[str]:
    """Ask them to end, then kill what is left. Returns their names."""
    found = find(config_path)
    _signal(found, signal.SIGTERM)
    deadline = time.monotonic() + DRAIN_SECONDS
    while left := find(config_path):
        peer.waits_for(f"{', '.join(left.values())} to end, left behind by a supervisord that was killed")
        if time.monotonic() > deadline:
            _signal(left, signal.SIGKILL)
        time.sleep(POLL_SECONDS)
    return sorted(found.values())


def _signal(processes: dict[int, str], number: signal.Signals) -> None:
    for pid in processes:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            continue  # it ended by itself
