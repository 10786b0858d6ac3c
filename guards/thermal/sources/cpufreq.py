"""Clocks of the CPUs: `/sys/devices/system/cpu/cpufreq/policy*`."""

from __future__ import annotations

from pathlib import Path

from guards.deadline import DeadlineReader, Unreadable
from guards.roots import Roots
from guards.thermal.readings import Clock, Seen
from guards.thermal.sources.names import numbered, read_name

MOST_POLICIES = 4
"""Of an x86 machine, where each CPU has a policy of its own and asking for its clock interrupts it."""


class CpuClocks:
    """One clock for each cluster of CPUs.

    On a Raspberry Pi the kernel shows the clock that it asked for, which the firmware may lower further without a
    word: there the throttle bits are the better evidence.
    """

    def __init__(self, roots: Roots, reader: DeadlineReader) -> None:
        self._directory = roots.sys / "devices" / "system" / "cpu" / "cpufreq"
        self._reader = reader

    def read(self) -> Seen:
        """Policies that can be read; the others are left out."""
        policies = numbered(self._directory, "policy")
        step = max(1, -(-len(policies) // MOST_POLICIES))
        clocks = [self._clock(policy) for policy in policies[::step]]
        return Seen(clocks=tuple(clock for clock in clocks if clock is not None))

    def _clock(self, policy: Path) -> Clock | None:
        try:
            now = _megahertz(self._reader.text(policy / "scaling_cur_freq"))
        except Unreadable:
            return None
        if now is None:
            return None
        # what the governor may choose: a power mode or the kernel's own cooling lowers it below the hardware's
        return Clock(f"cpu/{policy.name}", now, _megahertz(read_name(policy / "scaling_max_freq")))


def _megahertz(text: str) -> float | None:
    """The kernel's files are in kHz; `<unknown>` and 0 stand for none."""
    try:
        return int(text) / 1000 or None
    except (ValueError, OverflowError):
        return None
