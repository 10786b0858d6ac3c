"""The boxes' root tree: Debian, built once with mmdebstrap and cached under a digest of its recipe.

Boxes mount it as the lower layer of an overlay, so it is never written after it was built.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

from tests.lab.errors import LabError, LabTimeoutError
from tests.lab.paths import cache_directory

SUITE = "bookworm"
RECIPE_VERSION = 1  # raise it when `_customise` changes in a way that FILES and LINKS do not show
BUILD_DEADLINE_SECONDS = 900.0
WAIT_LINE_SECONDS = 5.0
ERROR_LINES = 15

PACKAGES = (
    "systemd", "systemd-sysv", "dbus", "openssh-server", "openssl", "python3", "python3-venv", "iproute2",
    "iputils-ping", "procps", "ca-certificates", "sudo", "iperf3", "chrony", "ethtool", "stress-ng", "curl",
    "net-tools", "mtr-tiny", "smartmontools",
)  # fmt: skip

THERMAL_CLASS = Path("/sys/class/thermal")
THERMAL_SOURCE = Path("/run/lab-thermal")

FILES: dict[str, tuple[int, str]] = {
    # Connections and started sessions are counted from these lines.
    "etc/ssh/sshd_config.d/10-lab.conf": (0o644, "LogLevel VERBOSE\n"),
    "etc/systemd/journald.conf.d/10-lab.conf": (0o644, "[Journal]\nStorage=persistent\nSystemMaxUse=64M\n"),
    # Boxes share the host's kernel log; a box prints its own instead, which the lab writes.
    "usr/local/bin/dmesg": (0o755, "#!/bin/sh\n[ ! -f /run/fake-kmsg ] || exec cat /run/fake-kmsg\n"),
    # nspawn mounts /sys/class after its own binds and would cover one there, so the box mounts its fake zones itself.
    "etc/systemd/system/sys-class-thermal.mount": (
        0o644,
        f"""[Unit]
Description=Fake thermal zones of the lab
DefaultDependencies=no
ConditionPathIsDirectory={THERMAL_SOURCE}

[Mount]
What={THERMAL_SOURCE}
Where={THERMAL_CLASS}
Options=bind
""",
    ),
    "etc/machine-id": (0o444, ""),
    "etc/resolv.conf": (0o644, ""),
}
LINKS: dict[str, str] = {
    "etc/systemd/system/sysinit.target.wants/sys-class-thermal.mount": "../sys-class-thermal.mount",
    "etc/systemd/system/default.target": "/lib/systemd/system/multi-user.target",
    # What would change a box's tree by the calendar, or talk to a console that is a file.
    **{
        f"etc/systemd/system/{unit}": "/dev/null"
        for unit in (
            "apt-daily.timer", "apt-daily-upgrade.timer", "dpkg-db-backup.timer", "e2scrub_all.timer",
            "fstrim.timer", "e2scrub_reap.service", "console-getty.service", "smartmontools.service",
        )
    },
}  # fmt: skip
DIRECTORIES = ("var/log/journal",)
LEFT_OUT = ("/usr/share/man/*", "/usr/share/doc/*", "/usr/share/locale/*", "/usr/share/info/*")


def recipe_digest() -> str:
    """SHA-256 (hex) of everything that decides what is in the tree."""
    recipe = [RECIPE_VERSION, SUITE, PACKAGES, FILES, LINKS, DIRECTORIES, LEFT_OUT]
    return hashlib.sha256(json.dumps(recipe, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def root_tree() -> Path:
    """The finished root tree; builds it first when the cache has none (about a minute).

    Raises:
        LabError: mmdebstrap failed or is missing.
        LabTimeoutError: the build, or another builder's, took too long.
    """
    tree = cache_directory() / recipe_digest()[:16]
    if tree.is_dir():
        return tree
    tree.parent.mkdir(parents=True, exist_ok=True)
    with (tree.parent / "lock").open("w", encoding="ascii") as lock:
        _wait_for_lock(lock.fileno())
        if not tree.is_dir():  # another builder may have finished while we waited
            _build(tree)
    return tree


def _wait_for_lock(descriptor: int) -> None:
    end = time.monotonic() + BUILD_DEADLINE_SECONDS
    next_line = time.monotonic()
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            pass
        if time.monotonic() > end:
            raise LabTimeoutError(f"another process built the root tree for {BUILD_DEADLINE_SECONDS:g} s")
        if time.monotonic() >= next_line:
            print("lab: waiting for another process that builds the root tree", file=sys.stderr, flush=True)
            next_line += WAIT_LINE_SECONDS
        time.sleep(0.2)


def _build(tree: Path) -> None:
    partial = tree.with_name(tree.name + ".partial")
    log = tree.with_name(tree.name + ".log")
    if partial.exists():  # of a build that was killed; we hold the lock, so nobody works there
        shutil.rmtree(partial)
    print(f"lab: building the root tree in {tree} (once, about a minute)", file=sys.stderr, flush=True)
    began = time.monotonic()
    argv = ["mmdebstrap", "--variant=minbase", "--components=main", f"--include={','.join(PACKAGES)}"]
    argv += [f"--dpkgopt=path-exclude={pattern}" for pattern in LEFT_OUT]
    _run_mmdebstrap([*argv, SUITE, str(partial)], log)
    _customise(partial)
    os.sync()
    partial.rename(tree)
    print(f"lab: root tree built in {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)


def _run_mmdebstrap(argv: list[str], log: Path) -> None:
    began = time.monotonic()
    with log.open("w", encoding="utf-8") as sink:
        try:
            builder = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=sink, stderr=sink, umask=0o022)
        except FileNotFoundError:
            raise LabError("mmdebstrap is not installed", hint="run: python -m tests.lab.packages") from None
        try:
            while True:
                try:
                    code = builder.wait(WAIT_LINE_SECONDS)
                    break
                except subprocess.TimeoutExpired:
                    seconds = time.monotonic() - began
                    if seconds > BUILD_DEADLINE_SECONDS:
                        raise LabTimeoutError(
                            f"mmdebstrap still ran after {BUILD_DEADLINE_SECONDS:g} s", hint=f"see {log}"
                        ) from None
                    print(f"lab: mmdebstrap: {_last_line(log)} ({seconds:.0f} s)", file=sys.stderr, flush=True)
        finally:
            if builder.poll() is None:
                builder.terminate()  # it cleans its mounts up on SIGTERM
                builder.wait()
    if code != 0:
        tail = "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-ERROR_LINES:])
        raise LabError(f"mmdebstrap exited with {code}:\n{tail}", hint=f"all of it is in {log}")


def _last_line(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").replace("\r", "\n").split("\n")
    return next((line.strip()[:70] for line in reversed(lines) if line.strip()), "starting")


def _customise(tree: Path) -> None:
    for key in (tree / "etc/ssh").glob("ssh_host_*"):
        key.unlink()  # every box gets one of its own
    (tree / "etc/hostname").unlink(missing_ok=True)
    for name in DIRECTORIES:
        (tree / name).mkdir(parents=True, exist_ok=True)
    for name, (mode, text) in FILES.items():
        file = tree / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.unlink(missing_ok=True)
        file.write_text(text, encoding="utf-8")
        file.chmod(mode)
    for name, target in LINKS.items():
        link = tree / name
        link.parent.mkdir(parents=True, exist_ok=True)
        link.unlink(missing_ok=True)
        link.symlink_to(target)
