"""Memory of the box and of the process.

How much may be taken: the system's own figure, or what the box's cgroup leaves, if that is less.

Keeping freed memory from staying with the process: glibc's allocator, told what a stage needs.

glibc raises its mmap threshold to the size of whatever large block was freed last (mallopt(3), M_MMAP_THRESHOLD), so
after loading, later large blocks land on the heap, where holes stay resident. A fixed threshold keeps every large
block a mapping of its own, which ends when it is freed.
"""

from __future__ import annotations

import ctypes
import gc
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

M_MMAP_THRESHOLD = -3  # malloc.h
# While loading, packed weights and conversion buffers are large and the buffers go away again; FBGEMM also pads its
# matrices, and padding that is never touched costs nothing in a fresh mapping.
LOADING_THRESHOLD_BYTES = 128 * 1024
# While serving, activations of a micro-batch come and go at every layer; mapping each would cost page faults.
SERVING_THRESHOLD_BYTES = 1024 * 1024


def map_blocks_from(threshold_bytes: int) -> None:
    """Give every block of at least this size a mapping of its own; no effect on other C libraries than glibc."""
    mallopt: Any = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(M_MMAP_THRESHOLD, threshold_bytes)


def trim() -> int:
    """Collect garbage and give free heap pages back to the system; how many bytes of the process' own went."""
    before = _own_bytes()
    gc.collect()
    return_freed_memory()
    return max(0, before - _own_bytes())


def _own_bytes() -> int:
    memory = psutil.Process().memory_info()
    return int(memory.rss - memory.shared)


def return_freed_memory() -> None:
    """Give free heap pages back to the system; no effect on other C libraries than glibc."""
    malloc_trim: Any = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if malloc_trim is not None:
        malloc_trim(0)


CGROUPS = Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class BoxMemory:
    """Bytes of memory of the box, or of the cgroup that it may not leave."""

    total: int
    available: int


def box_memory(cgroups: Path = CGROUPS) -> BoxMemory:
    """Total and available memory; reads files of the kernel only, which takes microseconds.

    Args:
        cgroups: where control groups are mounted: version 2 (memory.max) or 1 (memory/memory.limit_in_bytes).
    """
    system = psutil.virtual_memory()
    total, available = int(system.total), int(system.available)
    layouts = (
        (cgroups / "memory.max", cgroups / "memory.current", cgroups / "memory.stat", "inactive_file"),
        (
            cgroups / "memory" / "memory.limit_in_bytes",
            cgroups / "memory" / "memory.usage_in_bytes",
            cgroups / "memory" / "memory.stat",
            "total_inactive_file",
        ),
    )
    for limit_file, usage_file, stat_file, reclaimable in layouts:
        limit, usage = _number(limit_file), _number(usage_file)
        if limit is None or usage is None or limit >= total:
            continue
        # pages of files that nobody has touched lately go when memory is short
        free = limit - usage + _field(stat_file, reclaimable)
        total, available = limit, min(available, max(0, free))
    return BoxMemory(total, available)


def _number(file: Path) -> int | None:
    """The only number in a file; None if there is no file, or no limit ("max")."""
    try:
        return int(file.read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None


def _field(file: Path, name: str) -> int:
    """A number by its name in a file of "name number" lines; 0 if it is not there."""
    try:
        lines = file.read_text(encoding="ascii").splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith(f"{name} ")), 0)
