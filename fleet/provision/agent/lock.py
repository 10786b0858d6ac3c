"""One provisioning run at a time on a box; the lock is a lock of the kernel and dies with its holder."""

from __future__ import annotations

import fcntl
import os
import stat
import time

from fleet.provision.agent.errors import AgentError

SYSTEM_LOCK = "/run/fleet-provision.lock"
STEP = "lock"


def make_private_directory(path: str) -> None:
    """A directory (and missing parents) of 0700 below /tmp that nobody else may have prepared.

    Raises:
        AgentError: it exists and belongs to someone else, or is a link.
    """
    parent = os.path.dirname(path)
    if not os.path.isdir(parent):
        make_private_directory(parent)
    try:
        os.mkdir(path, 0o700)
    except FileExistsError:
        status = os.lstat(path)
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
            raise AgentError(
                "directories",
                f"{path} belongs to user {status.st_uid}, expected a directory of user {os.geteuid()}",
                hint=f"ls -ld {path}",
            ) from None


def lock_path(privileged: bool, supervisor_socket: str) -> str:
    """Where the lock file lies: on a file system that is empty after a boot, beside the sockets in local mode."""
    return SYSTEM_LOCK if privileged else os.path.join(os.path.dirname(supervisor_socket), "provision.lock")


def take(path: str, holder: str) -> int:
    """Take the lock until the process ends.

    Args:
        holder: one line that the next one who comes reads.

    Returns:
        The open file; keep it.

    Raises:
        AgentError: kind "locked", naming the holder.
    """
    if not path.startswith("/run/"):
        make_private_directory(os.path.dirname(path))
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        other = os.read(descriptor, 200).decode(errors="replace").strip() or "an unnamed run"
        os.close(descriptor)
        raise AgentError(
            STEP,
            f"another provisioning run holds the box: {other}",
            hint="wait for it to end, or end that process, then provision again",
            kind="locked",
        ) from None
    os.ftruncate(descriptor, 0)
    since = time.strftime("%Y-%m-%d %H:%M:%S")
    os.pwrite(descriptor, f"{holder}, process {os.getpid()} of the box, since {since}\n".encode(), 0)
    return descriptor
