"""Clocks of integrated GPUs: `/sys/class/devfreq`, on Jetsons and boards with a Mali."""

from __future__ import annotations

import re
from pathlib import Path

from guards.deadline import DeadlineReader, Unreadable
from guards.roots import Roots
from guards.thermal.readings import Clock, Seen

# 17000000.gpu (Orin; ga10b on JetPack 5), 17000000.gv11b (Xavier), 57000000.gpu (Nano), gpu-gpc-0 (Thor), fb000000.gpu
_GPU = re.compile(r"gpu|g[apv]\d")


class GpuClocks:
    """One clock for each GPU. What is allowed is left out: an unused GPU runs far below it, and is not throttled."""

    def __init__(self, roots: Roots, reader: DeadlineReader) -> None:
        self._directory = roots.sys / "class" / "devfreq"
        self._reader = reader

    def read(self) -> Seen:
        """GPUs that can be read; the others are left out."""
        try:
            gpus = sorted(entry for entry in self._directory.iterdir() if _GPU.search(entry.name))
        except OSError:
            return Seen()
        clocks = [self._clock(gpu) for gpu in gpus]
        return Seen(clocks=tuple(clock for clock in clocks if clock is not None))

    def _clock(self, gpu: Path) -> Clock | None:
        """The kernel's file is in Hz."""
        try:
            megahertz = int(self._reader.text(gpu / "cur_freq")) / 1e6
        except (Unreadable, ValueError, OverflowError):
            return None
        return Clock(f"gpu/{gpu.name}", megahertz) if megahertz > 0 else None
