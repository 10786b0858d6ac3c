"""Keeping freed memory from staying with the process: glibc's allocator, told what a stage needs.

glibc raises its mmap threshold to the size of whatever large block was freed last (mallopt(3), M_MMAP_THRESHOLD), so
after loading, later large blocks land on the heap, where holes stay resident. A fixed threshold keeps every large
block a mapping of its own, which ends when it is freed.
"""

from __future__ import annotations

import ctypes
from typing import Any

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


def return_freed_memory() -> None:
    """Give free heap pages back to the system; no effect on other C libraries than glibc."""
    trim: Any = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
