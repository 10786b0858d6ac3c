"""Memory of GPUs, from NVML. Every field on its own: one that a board refuses does not hide another.

On boards whose GPU shares the box's memory (Orin, Thor, GB10) NVML answers "not supported": there is nothing to judge
here then, and pressure on the box's memory says it all. Nothing is imported where there is no driver.
"""

from __future__ import annotations

import ctypes
import importlib
import math
import time
from dataclasses import dataclass
from typing import Any

from guards.deadline import DeadlineReader, Unreadable

LIBRARY = "libnvidia-ml.so.1"


@dataclass(frozen=True)
class GpuMemory:
    """One GPU.

    Attributes:
        index: NVML's. name: of the board; empty if it does not say.
        used_bytes, total_bytes: None: not known, or shared with the box.
        reason: why they are None.
    """

    index: int
    name: str = ""
    used_bytes: int | None = None
    total_bytes: int | None = None
    reason: str = ""

    @property
    def used_percent(self) -> float | None:
        """Share of its memory that is used, by any process."""
        if self.used_bytes is None or self.total_bytes is None:
            return None
        return 100.0 * self.used_bytes / self.total_bytes


class Gpus:
    """All GPUs of the box. The library stays open: opening it anew can take a board longer than a period.

    Args:
        reader: asks NVML on a thread of its own; a driver that hangs costs nothing but its figures.
        retry_seconds: a library that is absent or fails is asked again after so long; drivers are loaded late.
    """

    def __init__(self, reader: DeadlineReader, retry_seconds: float) -> None:
        self._reader, self._retry_seconds = reader, retry_seconds
        self._library: Any = None
        self._next_seconds = -math.inf

    def read(self) -> tuple[GpuMemory, ...]:
        """Nothing on a box without NVIDIA's driver, or while it does not answer. Raises nothing."""
        if self._library is None and time.monotonic() < self._next_seconds:
            return ()
        self._reader.begin_round()
        try:
            return self._reader.ask("nvml", self._look)
        except Unreadable:
            self._library, self._next_seconds = None, time.monotonic() + self._retry_seconds
            return ()

    def _look(self) -> tuple[GpuMemory, ...]:
        if self._library is None:
            self._library = _open()
        return tuple(_read(self._library, index) for index in range(self._library.nvmlDeviceGetCount()))


def _open() -> Any:
    # a box without the driver is spared the bindings, which take some MiB
    ctypes.CDLL(LIBRARY)
    nvml = importlib.import_module("pynvml")
    nvml.nvmlInit()
    return nvml


def _read(nvml: Any, index: int) -> GpuMemory:
    name = ""
    try:
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
        name = _name(nvml, handle)
        memory = nvml.nvmlDeviceGetMemoryInfo(handle)
    except nvml.NVMLError as error:
        return GpuMemory(index, name, reason=str(error))
    used, total = int(memory.used), int(memory.total)
    if not 0 <= used <= total or total == 0:
        return GpuMemory(index, name, reason=f"implausible: {used} of {total} bytes used")
    return GpuMemory(index, name, used, total)


def _name(nvml: Any, handle: Any) -> str:
    try:
        name = nvml.nvmlDeviceGetName(handle)
    except nvml.NVMLError:
        return ""
    return name.decode("utf-8", "replace") if isinstance(name, bytes) else str(name)
