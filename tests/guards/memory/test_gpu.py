"""Memory of GPUs: the real bindings, whose calls into the library are replaced, as not every machine has the driver."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pynvml
import pytest

from guards.deadline import DeadlineReader
from guards.memory import gpu
from guards.memory.gpu import GpuMemory, Gpus

GIB = 1 << 30
NOT_SUPPORTED = pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
LOST = pynvml.NVMLError(pynvml.NVML_ERROR_GPU_IS_LOST)
Install = Callable[..., "Driver"]


class Driver:
    """What the library answers for each GPU; an exception is raised. `opened`: how often it was initialised."""

    def __init__(self, memories: list[object], names: list[object]) -> None:
        self.memories, self.names, self.opened = memories, names, 0

    def init(self) -> None:
        self.opened += 1


def say(answer: object) -> object:
    if isinstance(answer, Exception):
        raise answer
    return answer


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Install:
    """Puts a driver under the bindings."""

    def under(memories: list[object], names: list[object]) -> Driver:
        driver = Driver(memories, names)
        monkeypatch.setattr(gpu, "LIBRARY", "libc.so.6")
        monkeypatch.setattr(pynvml, "nvmlInit", driver.init)
        monkeypatch.setattr(pynvml, "nvmlDeviceGetCount", lambda: len(driver.memories))
        monkeypatch.setattr(pynvml, "nvmlDeviceGetHandleByIndex", lambda index: index)
        monkeypatch.setattr(pynvml, "nvmlDeviceGetMemoryInfo", lambda index: say(driver.memories[index]))
        monkeypatch.setattr(pynvml, "nvmlDeviceGetName", lambda index: say(driver.names[index]))
        return driver

    return under


def gpus(retry_seconds: float = 300.0) -> Gpus:
    return Gpus(DeadlineReader(2.0, 300.0), retry_seconds)


def memory(used: int, total: int) -> SimpleNamespace:
    return SimpleNamespace(used=used, total=total, free=total - used)


def test_each_gpu_and_each_field_on_its_own(install: Install) -> None:
    install(
        [memory(7 * GIB, 8 * GIB), NOT_SUPPORTED, memory(2 * GIB, 24 * GIB)],
        ["RTX A2000", b"Orin (nvgpu)", NOT_SUPPORTED],
    )
    discrete, unified, unnamed = gpus().read()
    assert discrete == GpuMemory(0, "RTX A2000", 7 * GIB, 8 * GIB)
    assert discrete.used_percent == 87.5
    assert unified == GpuMemory(1, "Orin (nvgpu)", reason="Not Supported")
    assert unified.used_percent is None
    assert unnamed == GpuMemory(2, "", 2 * GIB, 24 * GIB)


@pytest.mark.parametrize(("used", "total"), [(0, 0), (9, 8), (-1, 8)])
def test_implausible_memory_is_unknown(used: int, total: int, install: Install) -> None:
    install([memory(used, total)], ["x"])
    (seen,) = gpus().read()
    assert seen.used_percent is None
    assert "implausible" in seen.reason


def test_one_lost_gpu_does_not_hide_the_other(install: Install) -> None:
    install([LOST, memory(GIB, 8 * GIB)], ["x", "y"])
    assert [seen.used_percent for seen in gpus().read()] == [None, 12.5]


def test_the_library_is_opened_once(install: Install) -> None:
    driver = install([memory(GIB, 8 * GIB)], ["x"])
    reader = gpus()
    assert reader.read() == reader.read()
    assert driver.opened == 1


def test_a_driver_that_fails_is_opened_again(install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = install([memory(GIB, 8 * GIB)], ["x"])
    reader = gpus(retry_seconds=0.0)
    assert len(reader.read()) == 1
    monkeypatch.setattr(pynvml, "nvmlDeviceGetCount", lambda: say(LOST))
    assert reader.read() == ()
    monkeypatch.setattr(pynvml, "nvmlDeviceGetCount", lambda: 1)
    assert len(reader.read()) == 1
    assert driver.opened == 2


def test_no_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "LIBRARY", "libno-such-driver.so.1")
    assert gpus().read() == ()
