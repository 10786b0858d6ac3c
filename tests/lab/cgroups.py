"""A box's own cgroups (version 1), made outside of it, because the controllers are read-only inside."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path

from tests.lab.errors import LabError
from tests.lab.processes import KILL_DEADLINE_SECONDS, wait_until

MOUNT = Path("/sys/fs/cgroup")
LIMITING = ("memory", "pids", "freezer", "cpu", "cpuacct")  # these must exist
NAMED = {"systemd": "name=systemd", "unified": ""}  # directory -> controller in /proc/self/cgroup; used where mounted
PARENT = "fleet-lab"
CPU_PERIOD_MICROSECONDS = 10_000  # the default of 100 ms would stall a throttled box for tens of ms at a time
CPU_QUOTA_FLOOR_MICROSECONDS = 1_000  # the kernel's minimum


def own_paths(text: str) -> dict[str, str]:
    """Controller -> our own cgroup, from the text of `/proc/self/cgroup` (cgroups(7))."""
    paths: dict[str, str] = {}
    for line in text.splitlines():
        _, controllers, path = line.split(":", 2)
        for controller in controllers.split(","):
            paths[controller] = path
    return paths


def make(box: str) -> dict[str, str]:
    """Make the box's cgroup below our own in each hierarchy, so that limits on us hold for the boxes too.

    Returns:
        controller -> directory.

    Raises:
        LabError: a version 1 controller that the lab needs is not mounted.
    """
    own = own_paths(Path("/proc/self/cgroup").read_text(encoding="utf-8"))
    directories: dict[str, str] = {}
    for controller in (*LIMITING, *NAMED):
        hierarchy = MOUNT / controller
        if not (hierarchy / "cgroup.procs").exists():
            if controller in NAMED:
                continue
            raise LabError(
                f"the cgroup v1 controller {controller} is not mounted at {hierarchy}",
                hint="boot the host with systemd.unified_cgroup_hierarchy=0 (hybrid)",
            )
        base = hierarchy / own.get(NAMED.get(controller, controller), "/").lstrip("/")
        directory = (base if base.is_dir() else hierarchy) / PARENT / box
        directory.mkdir(parents=True, exist_ok=True)
        directories[controller] = str(directory)
    return directories


def join(cgroups: dict[str, str]) -> None:
    """Move the calling process into the box's cgroups."""
    for directory in cgroups.values():
        Path(directory, "cgroup.procs").write_text(str(os.getpid()), encoding="ascii")


def members(cgroups: dict[str, str]) -> set[int]:
    """Pids of all processes of the box (those of its nspawn included)."""
    pids: set[int] = set()
    for file in Path(cgroups["pids"]).rglob("cgroup.procs"):
        with contextlib.suppress(FileNotFoundError, OSError):  # a cgroup that went away in between
            pids.update(int(line) for line in file.read_text(encoding="ascii").split())
    return pids


def kill_members(cgroups: dict[str, str], box: str) -> None:
    """SIGKILL whatever is still in the box's cgroups (which only the lab fills) and wait until it is gone."""
    if not cgroups or not Path(cgroups["pids"]).is_dir():
        return
    freeze(cgroups, frozen=False)

    def all_gone() -> bool:
        pids = members(cgroups)
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return not pids

    wait_until(all_gone, f"{box}: end of its processes", KILL_DEADLINE_SECONDS)


def remove(cgroups: dict[str, str]) -> None:
    """Remove the box's empty cgroups."""
    for directory in cgroups.values():
        for path, _, _ in os.walk(directory, topdown=False):
            with contextlib.suppress(OSError):  # busy while a killed process is still being reaped
                Path(path).rmdir()
        with contextlib.suppress(OSError):  # other boxes are still in it
            Path(directory).parent.rmdir()


def freeze(cgroups: dict[str, str], *, frozen: bool) -> None:
    """Stop or continue every process of the box."""
    Path(cgroups["freezer"], "freezer.state").write_text("FROZEN" if frozen else "THAWED", encoding="ascii")


def limit_memory(cgroups: dict[str, str], limit_bytes: int | None) -> None:
    """Cap the box's memory (page cache included); None lifts the cap.

    Raises:
        LabError: the box uses more than that and could not be shrunk.
    """
    try:
        Path(cgroups["memory"], "memory.limit_in_bytes").write_text(str(limit_bytes or -1), encoding="ascii")
    except OSError as error:
        raise LabError(f"memory limit of {limit_bytes} bytes refused, the box holds more: {error}") from None


def memory_used(cgroups: dict[str, str]) -> int:
    """Bytes charged to the box, page cache included."""
    return int(Path(cgroups["memory"], "memory.usage_in_bytes").read_text(encoding="ascii"))


def out_of_memory_kills(cgroups: dict[str, str]) -> int:
    """How many processes the kernel has killed for the box's memory limit since it was switched on."""
    return _counters(Path(cgroups["memory"], "memory.oom_control"))["oom_kill"]


def limit_cpu(cgroups: dict[str, str], cores: float | None) -> None:
    """Give the box `cores` (0.5 = half a core) in periods of 10 ms; None lifts the quota.

    Raises:
        LabError: less than the kernel's minimum of 0.1 cores at this period.
    """
    quota = -1 if cores is None else round(cores * CPU_PERIOD_MICROSECONDS)
    if cores is not None and quota < CPU_QUOTA_FLOOR_MICROSECONDS:
        raise LabError(f"a CPU quota of {cores:g} cores is below the minimum of 0.1")
    directory = Path(cgroups["cpu"])
    (directory / "cpu.cfs_quota_us").write_text("-1", encoding="ascii")  # a period change must not break the quota
    (directory / "cpu.cfs_period_us").write_text(str(CPU_PERIOD_MICROSECONDS), encoding="ascii")
    (directory / "cpu.cfs_quota_us").write_text(str(quota), encoding="ascii")


def throttled_seconds(cgroups: dict[str, str]) -> float:
    """Seconds that the box's run queues stood still for the quota since it was switched on."""
    return _counters(Path(cgroups["cpu"], "cpu.stat"))["throttled_time"] / 1e9


def _counters(file: Path) -> dict[str, int]:
    pairs = (line.split() for line in file.read_text(encoding="ascii").splitlines())
    return {name: int(value) for name, value in pairs}
