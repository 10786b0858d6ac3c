"""The machine: what it is, and commands run on it."""

from __future__ import annotations

import ctypes
import os
import platform
import signal
import socket
import subprocess
import sys
import time
from typing import Any

from fleet.provision.agent.errors import AgentError

COMMAND_SECONDS = 60.0
PR_SET_PDEATHSIG = 1  # <linux/prctl.h>
_libc = ctypes.CDLL(None)
# a login that is not root's often lacks sbin, and tools would seem missing
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


def _die_with_parent() -> None:
    """In the child: the kernel kills it when the agent's thread that started it ends, however that ends; prctl(2)."""
    _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def command(
    step: str,
    argv: list[str],
    *,
    stdin: bytes = b"",
    timeout_seconds: float = COMMAND_SECONDS,
    environment: dict[str, str] | None = None,
    check: bool = True,
    pass_fds: tuple[int, ...] = (),
    dies_with_agent: bool = False,
) -> subprocess.CompletedProcess[bytes]:
    """Run a command with a deadline; nothing of it reaches the terminal.

    Args:
        dies_with_agent: for what writes for long: it must not go on writing beside the next run's.

    Raises:
        AgentError: not found, too slow, or (with `check`) a failure, with the last lines it printed.
    """
    variables = {"PATH": PATH, "LC_ALL": "C", "HOME": "/nonexistent"} | (environment or {})
    name = os.path.basename(argv[0])
    try:
        done = subprocess.run(
            argv,
            input=stdin,
            capture_output=True,
            timeout=timeout_seconds,
            env=variables,
            check=False,
            pass_fds=pass_fds,
            cwd="/",
            preexec_fn=_die_with_parent if dies_with_agent else None,
        )
    except FileNotFoundError as error:
        raise AgentError(step, f"{name} is not installed, expected it on {PATH}") from error
    except subprocess.TimeoutExpired as error:
        raise AgentError(step, f"{name} did not end within {timeout_seconds:.0f} s") from error
    if check and done.returncode != 0:
        output = (done.stderr or done.stdout).decode(errors="replace").strip()
        last = output.splitlines()[-1] if output else "nothing printed"
        raise AgentError(step, f"{name} ended with {done.returncode}: {last}", detail=output)
    return done


def _memory_bytes() -> int:
    with open("/proc/meminfo", encoding="ascii") as file:
        for line in file:
            if line.startswith("MemTotal:"):
                return int(line.split()[1]) * 1024
    return 0


def _os_name() -> str:
    try:
        return platform.freedesktop_os_release().get("PRETTY_NAME", "")
    except OSError:
        return platform.system()


def _existing_parent(path: str) -> str:
    while not os.path.exists(path):
        path = os.path.dirname(path)
    return path


def system_fact(prefix: str) -> dict[str, Any]:
    """In the shape of `fleet.provision.facts.SystemFact`."""
    disk = os.statvfs(_existing_parent(prefix))
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        boot_id = file.read().strip()
    return {
        "os_name": _os_name(),
        "architecture": platform.machine(),
        "kernel": platform.release(),
        "hostname": socket.gethostname(),
        "python": platform.python_version(),
        "python_path": sys.executable,
        "memory_bytes": _memory_bytes(),
        "cores": len(os.sched_getaffinity(0)),
        "disk_free_bytes": disk.f_bavail * disk.f_frsize,
        "boot_id": boot_id,
        "clock_unix_seconds": time.time(),
    }


def packages_missing(packages: list[str]) -> list[str]:
    """Debian packages that are not installed."""
    if not packages:
        return []
    argv = ["dpkg-query", "--show", "--showformat", "${db:Status-Status} ${Package}\n", *packages]
    lines = command("packages", argv, check=False).stdout.decode().splitlines()
    installed = {line.partition(" ")[2] for line in lines if line.startswith("installed ")}
    return [name for name in packages if name not in installed]
