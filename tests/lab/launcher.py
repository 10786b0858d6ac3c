"""Runs one box: mounts its disk in a mount namespace of its own and keeps systemd-nspawn running over reboots.

Started by `LabBox.on` as `unshare --mount python -m tests.lab.launcher STATE_DIRECTORY BOX`. The namespace is the
box's alone: with a shared one, another box's nspawn would pin the disk, and after a hard cut it would read EIO.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
from pathlib import Path

from tests.lab import cgroups
from tests.lab.disk import DISK_UPPER, DISK_WORK, mount_image, mount_root
from tests.lab.network import NAMESPACES
from tests.lab.paths import CONTROL, LARGEST_NUMBER, BoxPaths, LabPaths
from tests.lab.processes import ProcessRecord, run
from tests.lab.root_tree import THERMAL_CLASS, THERMAL_SOURCE
from tests.lab.settings import BoxSettings

REBOOTED = 133  # exit code of systemd-nspawn when the container rebooted itself
PR_SET_PDEATHSIG = 1


def hosts_file() -> str:
    """`/etc/hosts` of every box: all names that a lab can have."""
    lines = ["127.0.0.1 localhost"]
    for name in (CONTROL, *(f"box{number}" for number in range(1, LARGEST_NUMBER))):
        lines.append(f"{BoxPaths(name, Path()).address} {name}")
    return "\n".join(lines) + "\n"


def seed_disk(lab: LabPaths, box: BoxPaths) -> None:
    """Write what makes this box itself to a new disk, synced: a power cut in the first seconds must not empty it."""
    upper = box.mounted_disk / DISK_UPPER
    if (upper / "etc/hostname").exists():
        return
    key = lab.host_keys / box.name
    files = {
        "etc/hostname": (0o644, f"{box.name}\n"),
        "etc/hosts": (0o644, hosts_file()),
        "etc/ssh/ssh_host_ed25519_key": (0o600, key.read_text(encoding="ascii")),
        "etc/ssh/ssh_host_ed25519_key.pub": (0o644, key.with_suffix(".pub").read_text(encoding="ascii")),
        "root/.ssh/authorized_keys": (0o600, lab.private_key.with_suffix(".pub").read_text(encoding="ascii")),
    }
    modes = {"root": 0o700, "root/.ssh": 0o700}
    for name, (mode, text) in files.items():
        file = upper / name
        for parent in reversed(file.relative_to(upper).parents[:-1]):
            (upper / parent).mkdir(exist_ok=True, mode=modes.get(str(parent), 0o755))
        file.write_text(text, encoding="utf-8")
        file.chmod(mode)
    run(["sync", "--file-system", str(upper)])


def nspawn_argv(box: BoxPaths) -> list[str]:
    """The command that boots the box, started in its network namespace, or its /sys/class/net would be the host's."""
    namespace = NAMESPACES / box.namespace
    argv = ["nsenter", f"--net={namespace}", "--", "systemd-nspawn", "--quiet", f"--directory={box.mounted_root}"]
    argv += ["--boot", "--register=no", "--keep-unit", f"--machine={box.name}"]
    argv += [f"--network-namespace-path={namespace}", "--capability=CAP_NET_ADMIN"]
    argv += ["--resolv-conf=off", "--timezone=off", "--link-journal=no", "--console=pipe"]
    if THERMAL_CLASS.is_dir():
        source = str(box.thermal).replace(":", "\\:")
        argv.append(f"--bind={source}:{THERMAL_SOURCE}")
    return argv


def run_box(box: BoxPaths, settings: BoxSettings) -> int:
    """Boot the box, again after each reboot of its own; the exit code of the last nspawn."""
    prctl = ctypes.CDLL(None).prctl  # looked up before the fork
    environment = {**os.environ, "SYSTEMD_NSPAWN_API_VFS_WRITABLE": "network"}

    def enter_box() -> None:
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # no box outlives its launcher
        cgroups.join(settings.cgroups)

    code = REBOOTED
    while code == REBOOTED:
        code = subprocess.run(
            nspawn_argv(box),
            stdin=subprocess.DEVNULL,
            env=environment,
            check=False,
            preexec_fn=enter_box,  # safe: this process has one thread
        ).returncode
    return code


def main(state: str, name: str) -> int:
    """Record ourselves, mount, boot."""
    lab = LabPaths(Path(state))
    box = lab.box(name)
    settings = BoxSettings.load(box.settings)
    ProcessRecord.of(os.getpid()).save(box.launcher_record)
    box.mounted_disk.mkdir(parents=True, exist_ok=True)
    mount_image(box.disk, box.mounted_disk)
    for directory in (DISK_UPPER, DISK_WORK):
        (box.mounted_disk / directory).mkdir(exist_ok=True)
    seed_disk(lab, box)
    mount_root(box, settings)
    return run_box(box, settings)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2]))
