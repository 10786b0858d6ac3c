"""GPUs by NVML: the real bindings, whose calls into the library are replaced, as this machine has no such driver."""

from __future__ import annotations

import pynvml
import pytest

from guards.deadline import DeadlineReader
from guards.thermal.readings import Clock, Kind, Seen, Throttle, Zone
from guards.thermal.sources import nvml
from guards.thermal.sources.nvml import NvmlGpus

SW_POWER_CAP, HW_SLOWDOWN, SW_THERMAL, HW_THERMAL = 0x4, 0x8, 0x20, 0x40


class Driver:
    """What the library answers; an exception is raised.

    Attributes:
        opened: how often it was initialised.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.temperature: object = 48
        self.clock: object = 1980
        self.reasons: object = SW_POWER_CAP
        self.opened = 0
        monkeypatch.setattr(nvml, "LIBRARY", "libc.so.6")
        monkeypatch.setattr(pynvml, "nvmlInit", self._open)
        monkeypatch.setattr(pynvml, "nvmlDeviceGetCount", lambda: 1)
        monkeypatch.setattr(pynvml, "nvmlDeviceGetHandleByIndex", lambda index: f"handle {index}")
        monkeypatch.setattr(pynvml, "nvmlDeviceGetTemperature", lambda handle, sensor: say(self.temperature))
        monkeypatch.setattr(pynvml, "nvmlDeviceGetClockInfo", lambda handle, clock: say(self.clock))
        monkeypatch.setattr(pynvml, "nvmlDeviceGetCurrentClocksEventReasons", lambda handle: say(self.reasons))

    def _open(self) -> None:
        self.opened += 1


def say(answer: object) -> object:
    if isinstance(answer, Exception):
        raise answer
    return answer


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    """Of one discrete GPU."""
    return Driver(monkeypatch)


NOT_SUPPORTED = pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)


def test_a_discrete_gpu(driver: Driver, reader: DeadlineReader) -> None:
    assert NvmlGpus(reader, 300.0).read() == Seen(
        (Zone("gpu0", Kind.GPU, 48.0),), (Clock("gpu0", 1980.0),), (Throttle("gpu0", False),)
    )


@pytest.mark.parametrize(
    ("reasons", "heat"),
    [(0, False), (SW_POWER_CAP | HW_SLOWDOWN, False), (SW_THERMAL, True), (HW_THERMAL | HW_SLOWDOWN, True)],
)
def test_only_reasons_of_heat_count(driver: Driver, reader: DeadlineReader, reasons: int, heat: bool) -> None:
    driver.reasons = reasons
    assert NvmlGpus(reader, 300.0).read().throttles == (Throttle("gpu0", heat),)


def test_an_older_driver_knows_the_reasons_by_their_old_name(
    driver: Driver, reader: DeadlineReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver.reasons = pynvml.NVMLError(pynvml.NVML_ERROR_FUNCTION_NOT_FOUND)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetCurrentClocksThrottleReasons", lambda handle: HW_THERMAL)
    assert NvmlGpus(reader, 300.0).read().throttles == (Throttle("gpu0", True),)


def test_each_field_fails_alone(driver: Driver, reader: DeadlineReader) -> None:
    driver.temperature = driver.reasons = NOT_SUPPORTED  # as on Orin
    seen = NvmlGpus(reader, 300.0).read()
    assert seen.zones[0].celsius is None
    assert "Not Supported" in seen.zones[0].reason
    assert seen.clocks == (Clock("gpu0", 1980.0),)
    assert seen.throttles[0].heat is None


@pytest.mark.parametrize("temperature", [0, 255, 4294967295])
def test_an_absurd_temperature_of_a_running_gpu_is_unknown(
    driver: Driver, reader: DeadlineReader, temperature: int
) -> None:
    driver.temperature = temperature
    (zone,) = NvmlGpus(reader, 300.0).read().zones
    assert zone.celsius is None
    assert zone.reason


def test_a_box_without_the_driver_is_asked_again_later_only(
    driver: Driver, reader: DeadlineReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nvml, "LIBRARY", "libnone-of-this-name.so.1")
    gpus = NvmlGpus(reader, 300.0)
    assert gpus.read() == Seen()
    monkeypatch.setattr(nvml, "LIBRARY", "libc.so.6")
    assert gpus.read() == Seen()
    assert driver.opened == 0
    assert NvmlGpus(reader, 300.0).read().zones
    assert driver.opened == 1


def test_a_gpu_that_falls_off_the_bus_comes_back_after_its_driver_was_opened_anew(
    driver: Driver, reader: DeadlineReader
) -> None:
    gpus = NvmlGpus(reader, 0.0)
    driver.temperature = driver.clock = driver.reasons = pynvml.NVMLError(pynvml.NVML_ERROR_GPU_IS_LOST)
    assert gpus.read().zones[0].celsius is None
    driver.temperature, driver.clock, driver.reasons = 52, 1200, 0
    assert gpus.read().zones == (Zone("gpu0", Kind.GPU, 52.0),)
    assert driver.opened == 2
