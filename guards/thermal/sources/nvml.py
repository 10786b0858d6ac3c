"""GPUs by NVIDIA's management library: discrete ones, and the integrated ones of Thor and later JetPacks."""

from __future__ import annotations

import ctypes
import importlib
import time
from collections.abc import Callable
from typing import Any, TypeVar

from guards.deadline import DeadlineReader, Unreadable
from guards.thermal.kinds import believe
from guards.thermal.readings import Clock, Kind, Seen, Throttle, Zone

AnswerT = TypeVar("AnswerT")

LIBRARY = "libnvidia-ml.so.1"

# nvml.h: nvmlClocksEventReasonSwThermalSlowdown, …HwThermalSlowdown. The general HwSlowdown (8) comes for power too.
HEAT_REASONS = 0x20 | 0x40


class NvmlGpus:
    """All GPUs. Each field is asked alone: Orin, Thor and consumer cards lack one or the other.

    Args:
        retry_seconds: a library that is absent or fails is asked again after so long; drivers are loaded late.
    """

    def __init__(self, reader: DeadlineReader, retry_seconds: float) -> None:
        self._reader = reader
        self._retry_seconds = retry_seconds
        self._library: Any = None
        self._handles: tuple[Any, ...] = ()
        self._next_seconds = 0.0

    def read(self) -> Seen:
        """Nothing on a box without NVIDIA's driver."""
        if self._library is None:
            if time.monotonic() < self._next_seconds:
                return Seen()
            try:
                self._library, self._handles = self._reader.ask("nvml", _open)
            except Unreadable:
                self._next_seconds = time.monotonic() + self._retry_seconds
                return Seen()
        gpus = [self._gpu(f"gpu{index}", handle) for index, handle in enumerate(self._handles)]
        if gpus and all(gpu.zones[0].celsius is None and not gpu.clocks for gpu in gpus):
            # fallen off the bus, or the driver was renewed: open it again, later
            self._library, self._next_seconds = None, time.monotonic() + self._retry_seconds
        return Seen(
            tuple(zone for gpu in gpus for zone in gpu.zones),
            tuple(clock for gpu in gpus for clock in gpu.clocks),
            tuple(throttle for gpu in gpus for throttle in gpu.throttles),
        )

    def _gpu(self, name: str, handle: Any) -> Seen:
        nvml = self._library
        celsius, reason = self._field(name, lambda: nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU))
        if celsius is not None:
            celsius, reason = believe(float(celsius), Kind.GPU)
        megahertz, _ = self._field(name, lambda: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM))
        reasons, reasons_reason = self._field(name, lambda: _reasons(nvml, handle))
        return Seen(
            zones=(Zone(name, Kind.GPU, celsius, reason),),
            clocks=(Clock(name, float(megahertz)),) if megahertz else (),
            throttles=(
                Throttle(name, None if reasons is None else bool(reasons & HEAT_REASONS), reason=reasons_reason),
            ),
        )

    def _field(self, name: str, question: Callable[[], AnswerT]) -> tuple[AnswerT | None, str]:
        """One field of one GPU. A driver that hangs does so for all of them: the GPU has one quarantine."""
        try:
            return self._reader.ask(name, question), ""
        except Unreadable as error:
            return None, str(error)


def _open() -> tuple[Any, tuple[Any, ...]]:
    # a box without the driver is spared the bindings, which take some MiB
    ctypes.CDLL(LIBRARY)
    nvml = importlib.import_module("pynvml")
    nvml.nvmlInit()
    return nvml, tuple(nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount()))


def _reasons(nvml: Any, handle: Any) -> int:
    """Under the name of drivers from 535 on, else under the old one."""
    try:
        return int(nvml.nvmlDeviceGetCurrentClocksEventReasons(handle))
    except nvml.NVMLError_FunctionNotFound:
        return int(nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle))
