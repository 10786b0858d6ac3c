"""What can go wrong with a box from the outside: cable, memory, CPU, disk, clock, heat, GPU, kernel log."""

from __future__ import annotations

import re
from pathlib import Path

from tests.lab import cgroups, native, network
from tests.lab.box import BoxBase
from tests.lab.errors import LabError
from tests.lab.processes import run
from tests.lab.root_tree import THERMAL_CLASS
from tests.lab.settings import Shape

CLOCK_SHIM = "/usr/local/lib/fleet-lab-skew.so"
CLOCK_OFFSET = "/etc/clock-skew"
PRELOAD = "/etc/ld.so.preload"
LEAK_SHIM = "/usr/local/lib/fleet-lab-leak.so"
LEAK_RATE = "/etc/leak-rate"
CLOCK_OFFSET_WIDTH = 31  # fixed, because running programs have the file mapped
FAKE_GPU_STATE = "/run/fake-gpu"
FAKE_GPU_LIBRARY = "/usr/lib/libnvidia-ml.so.1"
FAKE_GPU_COMMAND = "/usr/local/bin/nvidia-smi"
FAKE_KERNEL_LOG = "/run/fake-kmsg"
DISK_FILLER = "/var/tmp/fleet-lab-filler"
LAB_FILES = frozenset({
    CLOCK_SHIM, CLOCK_OFFSET, LEAK_SHIM, LEAK_RATE, PRELOAD, FAKE_GPU_LIBRARY, FAKE_GPU_COMMAND, DISK_FILLER,
})  # fmt: skip

_OOM_CONSTRAINT = re.compile(r"oom-kill:.*oom_memcg=(?P<cgroup>[^,]+),.*pid=(?P<pid>[0-9]+)")
_OOM_KILLED = re.compile(r"Killed process (?P<pid>[0-9]+) ")


class BoxFaults(BoxBase):
    """Faults to put into a box, and their ends."""

    def end_faults(self) -> None:
        """Plug in, thaw, lift limits, empty the disk filler and put the clock right; the power stays as it is."""
        self.link_heal()
        if not self.is_on:
            return
        self.thaw()
        self.memory_limit(None)
        self.cpu_quota(None)
        self.disk_unfill()
        if self.inside(CLOCK_OFFSET).exists():
            self.clock_skew(0.0)
        if self.inside(LEAK_RATE).exists():
            self.leak(0.0)

    # --- cable ---

    def link_cut(self) -> None:
        """Unplug the network cable: the box loses carrier. It stays out over power cycles."""
        self._remember_link(cut=True)
        if self.is_on:
            network.set_link(self.paths, up=False)

    def link_heal(self) -> None:
        """Plug the cable in again and end any shaping."""
        self.unshape()
        self._remember_link(cut=False)
        if self.is_on:
            network.set_link(self.paths, up=True)

    def _remember_link(self, *, cut: bool) -> None:
        settings = self.settings
        settings.link_cut = cut
        settings.save(self.paths.settings)

    def shape(self, shape: Shape) -> None:
        """Delay, drop or slow frames of this box, each way; stays over power cycles until `unshape`.

        Raises:
            LabError: the box is off.
        """
        self.need_init()
        network.wire_up(self.paths, shape)
        settings = self.settings
        settings.shape = shape
        settings.save(self.paths.settings)

    def unshape(self) -> None:
        """A plain cable again."""
        network.wire_down(self.paths)
        settings = self.settings
        settings.shape = None
        settings.save(self.paths.settings)

    # --- memory, CPU, hang ---

    def memory_limit(self, limit_bytes: int | None) -> None:
        """Cap the box's memory, page cache included; None lifts the cap. Ends with the power.

        Raises:
            LabError: the box is off, or holds more than that.
        """
        self.need_init()
        cgroups.limit_memory(self.settings.cgroups, limit_bytes)

    @property
    def memory_used_bytes(self) -> int:
        """Memory charged to the box, page cache included."""
        return cgroups.memory_used(self.settings.cgroups)

    @property
    def out_of_memory_kills(self) -> int:
        """Processes killed for the box's memory limit since it was switched on."""
        return cgroups.out_of_memory_kills(self.settings.cgroups)

    def cpu_quota(self, cores: float | None) -> None:
        """Give the box this many cores (0.1 or more) in periods of 10 ms; None lifts the quota. Ends with the power.

        Raises:
            LabError: the box is off, or less than the minimum.
        """
        self.need_init()
        cgroups.limit_cpu(self.settings.cgroups, cores)

    @property
    def throttled_seconds(self) -> float:
        """Seconds that the box stood still for its CPU quota since it was switched on."""
        return cgroups.throttled_seconds(self.settings.cgroups)

    def freeze(self) -> None:
        """Hang the box: the kernel still answers ping and takes connections, no process of it runs."""
        self.need_init()
        cgroups.freeze(self.settings.cgroups, frozen=True)

    def thaw(self) -> None:
        """End the hang."""
        cgroups.freeze(self.settings.cgroups, frozen=False)

    def leak(self, bytes_per_second: float) -> None:
        """Let the stage leak at this rate, for good; 0 ends it. Live in a stage that was started after the first call.

        Raises:
            LabError: the box is off, or gcc is missing on the host.
        """
        installed = self.inside(LEAK_SHIM).exists()
        self.write_file(LEAK_RATE, f"{bytes_per_second:.0f}\n")
        if not installed:
            self.write_file(LEAK_SHIM, native.library("leak").read_bytes(), mode=0o755)
            self._preload(LEAK_SHIM)

    def _preload(self, shim: str) -> None:
        """Load a library into every program that starts from now on."""
        file = self.inside(PRELOAD)
        loaded = file.read_text(encoding="ascii").split() if file.exists() else []
        self.write_file(PRELOAD, "".join(f"{name}\n" for name in [*loaded, shim]))

    # --- disk ---

    def disk_fill(self, leave_bytes: int = 0) -> None:
        """Fill the disk until at most `leave_bytes` are free.

        Raises:
            LabError: less is free already, or the box is off.
        """
        self.disk_unfill()
        free, block = (int(word) for word in self.exec(["stat", "-f", "--format=%a %S", "/"]).stdout.split())
        amount = free * block - leave_bytes
        if amount <= 0:
            raise LabError(f"{self.name} has {free * block} bytes free, {leave_bytes} were to be left")
        # Whole blocks may go to metadata, so the last megabytes are written until the disk says no.
        self.exec(["fallocate", "--length", str(amount), DISK_FILLER], check=False)
        if leave_bytes == 0:
            self.exec(["sh", "-c", f"cat /dev/zero >>{DISK_FILLER} 2>/dev/null"], check=False)
        self.exec(["sync", "--file-system", DISK_FILLER])

    def disk_unfill(self) -> None:
        """Take away again what `disk_fill` wrote."""
        self.exec(["rm", "--force", DISK_FILLER])

    # --- clock ---

    def install_clock_shim(self) -> None:
        """Put the wall-clock shim under every program that starts from now on; init, sshd and journal start anew.

        Static programs do not see it, and file times stay true.

        Raises:
            LabError: the box is off, or gcc is missing on the host.
        """
        if self.inside(CLOCK_OFFSET).exists():
            return
        shim = native.library("skew").read_bytes()
        self.write_file(CLOCK_OFFSET, _offset_text(0.0))
        self.write_file(CLOCK_SHIM, shim, mode=0o755)
        self._preload(CLOCK_SHIM)
        self.exec(["systemctl", "daemon-reexec"])
        self.exec(["systemctl", "restart", "systemd-journald", "ssh"])

    def clock_skew(self, seconds: float) -> None:
        """Shift the box's wall clock by `seconds` (0 for none), at once in all programs that have the shim.

        Programs that were started before the first skew do not have it; see `install_clock_shim`.
        """
        self.install_clock_shim()
        with self.inside(CLOCK_OFFSET).open("r+b") as file:  # in place: programs have it mapped
            file.write(_offset_text(seconds).encode())

    # --- heat, GPU, kernel log ---

    def set_temperature(self, zone: str, celsius: float) -> None:
        """Show `celsius` in the thermal zone of that type; the zone is made when there is none. Live.

        Raises:
            LabError: this host's kernel has no `/sys/class/thermal` to show zones in.
        """
        if not THERMAL_CLASS.is_dir():
            raise LabError(f"this host has no {THERMAL_CLASS}, so boxes cannot have fake zones")
        zones = sorted(self.paths.thermal.glob("thermal_zone*"))
        for directory in zones:
            if (directory / "type").read_text(encoding="ascii").strip() == zone:
                break
        else:
            directory = self.paths.thermal / f"thermal_zone{len(zones)}"
            directory.mkdir(parents=True)
            (directory / "type").write_text(f"{zone}\n", encoding="ascii")
        (directory / "temp").write_text(f"{round(celsius * 1000)}\n", encoding="ascii")

    def fake_gpu(self, **values: int) -> None:
        """Show a GPU through NVML and `nvidia-smi`; values are those of `native/nvml.c`, others keep their defaults.

        Keywords: count, temperature_celsius, utilisation_percent, used_mib, total_mib, power_milliwatts,
        throttle_reasons (bits of NVML), init_error, temperature_error (codes of NVML). The values end with the power.

        Raises:
            LabError: an unknown keyword, the box is off, or gcc is missing on the host.
        """
        unknown = values.keys() - native.GPU_VALUES
        if unknown:
            raise LabError(f"a fake GPU has no {', '.join(sorted(unknown))}", hint=", ".join(sorted(native.GPU_VALUES)))
        library = native.library("nvml").read_bytes()
        self.write_file(FAKE_GPU_STATE, "".join(f"{name} {value}\n" for name, value in values.items()))
        self.write_file(FAKE_GPU_LIBRARY, library, mode=0o755)
        self.write_file(FAKE_GPU_COMMAND, native.NVIDIA_SMI.read_bytes(), mode=0o755)

    def show_out_of_memory_kills(self) -> list[str]:
        """Copy the host's kernel log lines about this box's memory limit to the box's `dmesg`; those that were new."""
        memory = Path(self.settings.cgroups["memory"]).relative_to(cgroups.MOUNT / "memory")
        lines = out_of_memory_lines(run(["dmesg"]).stdout, f"/{memory}")
        log = self.inside(FAKE_KERNEL_LOG)
        known = set(log.read_text(encoding="utf-8").splitlines()) if log.exists() else set()
        fresh = [line for line in lines if line not in known]
        for line in fresh:
            self.kernel_log(line)
        return fresh

    def kernel_log(self, line: str) -> None:
        """Add a line to what `dmesg` prints in the box; ends with the power."""
        with self.inside(FAKE_KERNEL_LOG).open("a", encoding="utf-8") as log:
            log.write(line.rstrip("\n") + "\n")


def out_of_memory_lines(kernel_log: str, cgroup: str) -> list[str]:
    """Lines of a kernel log (text of dmesg) about kills for the limit of `cgroup` or one below it.

    The kernel writes `oom-kill:…,oom_memcg=<cgroup>,…,pid=<pid>,…`, then `…Killed process <pid> (…) …`.
    """
    lines: list[str] = []
    victims: set[str] = set()
    for line in kernel_log.splitlines():
        if match := _OOM_CONSTRAINT.search(line):
            if match["cgroup"] == cgroup or match["cgroup"].startswith(cgroup + "/"):
                victims.add(match["pid"])
                lines.append(line)
        elif (match := _OOM_KILLED.search(line)) and match["pid"] in victims:
            victims.discard(match["pid"])
            lines.append(line)
    return lines


def _offset_text(seconds: float) -> str:
    return f"{seconds:+.6f}".ljust(CLOCK_OFFSET_WIDTH - 1) + "\n"
