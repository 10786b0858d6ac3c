"""What is seen on recorded boxes."""

from __future__ import annotations

import pytest

from guards.deadline import DeadlineReader
from guards.thermal.readings import Clock, Kind, Seen, ThermalReading, Throttle
from guards.thermal.sources.alerts import ThrottleAlerts
from guards.thermal.sources.cpufreq import CpuClocks
from guards.thermal.sources.devfreq import GpuClocks
from guards.thermal.sources.hwmon import HardwareMonitors
from guards.thermal.sources.raspberry import RaspberryPi
from guards.thermal.sources.zones import ThermalZones
from tests.guards.thermal.trees import Tree


def look(tree: Tree, reader: DeadlineReader) -> ThermalReading:
    """With all sources that need files only."""
    reader.begin_round()
    sources = (ThermalZones, HardwareMonitors, RaspberryPi, ThrottleAlerts, CpuClocks, GpuClocks)
    return ThermalReading.of([source(tree.roots, reader).read() for source in sources], None)


@pytest.mark.parametrize(
    ("device", "hottest", "zones"),
    [
        ("pi4", ("thermal_zone0/cpu-thermal", 57.939), (1, 0)),
        ("pi5", ("thermal_zone0/cpu-thermal", 61.7), (1, 0)),
        ("orin-nano", ("thermal_zone0/cpu-thermal", 52.187), (9, 4)),
        ("orin-nx", ("thermal_zone6/soc1-thermal", 47.625), (9, 4)),
        ("agx-orin", ("thermal_zone0/CPU-therm", 55.843), (9, 3)),
        ("jetson-nano", ("thermal_zone1/CPU-therm", 37.0), (2, 0)),
        ("thor", ("thermal_zone2/soc012-thermal", 55.1), (5, 1)),
        ("discrete-gpu", ("hwmon1/k10temp/tdie", 52.125), (3, 0)),
        ("mini-pc", ("hwmon2/coretemp/package id 0", 65.0), (4, 1)),
    ],
)
def test_the_hottest_part_of_every_device(
    tree: Tree, reader: DeadlineReader, device: str, hottest: tuple[str, float], zones: tuple[int, int]
) -> None:
    reading = look(tree.lay_out(device), reader)
    assert reading.hottest is not None
    assert (reading.hottest.name, reading.hottest.celsius) == hottest
    silent = [zone for zone in reading.counted if zone.celsius is None]
    assert (len(reading.counted), len(silent)) == zones
    assert all(zone.reason for zone in silent)
    assert all(not zone.reason for zone in reading.counted if zone.celsius is not None)


def test_faults_of_zones_are_told_each_with_its_reason(tree: Tree, reader: DeadlineReader) -> None:
    zones = {zone.name: zone for zone in ThermalZones(tree.lay_out("orin-nano").roots, reader).read().zones}
    assert "EAGAIN" in zones["thermal_zone1/gpu-thermal"].reason
    assert "no answer within" in zones["thermal_zone2/cv0-thermal"].reason
    assert zones["thermal_zone8/tj-thermal"].celsius == 52.187


def test_zones_by_type_whatever_their_number(tree: Tree, reader: DeadlineReader) -> None:
    tree.lay_out("orin-nx")
    zones = {zone.name: zone for zone in ThermalZones(tree.roots, reader).read().zones}
    assert zones["thermal_zone1/gpu-thermal"].reason == "-256 °C is not plausible"
    assert "EINVAL" in zones["thermal_zone3/cv1-thermal"].reason
    assert "ENOENT" in zones["thermal_zone4/cv2-thermal"].reason
    assert zones["thermal_zone8/tj-thermal"].kind is Kind.JUNCTION


def test_a_box_in_the_frost_is_believed(tree: Tree, reader: DeadlineReader) -> None:
    tree.lay_out("pi4")
    tree.heat(-17.5)
    hottest = look(tree, reader).hottest
    assert hottest is not None
    assert hottest.celsius == -17.5


def test_the_boards_sensor_counts_only_where_the_chip_has_none(tree: Tree, reader: DeadlineReader) -> None:
    tree.write("class/thermal/thermal_zone0/type", "acpitz")
    tree.heat(48.0)
    assert [zone.kind for zone in look(tree, reader).counted] == [Kind.BOARD]
    tree.write("class/thermal/thermal_zone1/type", "x86_pkg_temp")
    tree.fault("class/thermal/thermal_zone1/temp", "EIO")
    reading = look(tree, reader)
    assert [zone.name for zone in reading.counted] == ["thermal_zone1/x86_pkg_temp"]
    assert reading.hottest is None


def test_a_box_without_any_sensor(tree: Tree, reader: DeadlineReader) -> None:
    assert look(tree, reader) == ThermalReading((), (), (), None)


@pytest.mark.parametrize(
    ("word", "bits"),
    [
        ("0", (False, False, False)),
        ("50000", (False, False, False)),
        ("50005", (False, False, True)),
        ("80008", (True, True, False)),
        ("e0006", (True, True, False)),
        ("e0000", (False, True, False)),
    ],
)
def test_throttle_bits_by_sysfs(tree: Tree, reader: DeadlineReader, word: str, bits: tuple[bool, bool, bool]) -> None:
    tree.lay_out("pi4").write("devices/platform/soc/soc:firmware/get_throttled", word)
    assert look(tree, reader).throttles == (Throttle("raspberry-pi", *bits),)


def test_throttle_bits_by_the_tool_where_sysfs_has_none(tree: Tree, reader: DeadlineReader) -> None:
    source = RaspberryPi(tree.lay_out("pi5").roots, reader)
    tree.tool("vcgencmd", 'test "$1" = get_throttled && echo throttled=0xe0008')
    assert source.read() == Seen(throttles=(Throttle("raspberry-pi", True, True, False),))
    # the tool's answer is kept for a while
    tree.tool("vcgencmd", "exit 1")
    assert source.read() == Seen(throttles=(Throttle("raspberry-pi", True, True, False),))


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ("echo 'VCHI initialization failed'; exit 255", "vcgencmd: VCHI initialization failed"),
        ('echo "Can\'t open device file: /dev/vcio" >&2; exit 255', "vcgencmd: Can't open device file: /dev/vcio"),
        ("echo throttled=", "'throttled=' is no word of throttle bits"),
        (None, "neither a file get_throttled in sysfs nor the tool vcgencmd"),
    ],
)
def test_a_tool_that_fails_is_unknown(tree: Tree, reader: DeadlineReader, script: str | None, reason: str) -> None:
    tree.lay_out("pi5")
    if script is not None:
        tree.tool("vcgencmd", script)
    assert RaspberryPi(tree.roots, reader).read().throttles == (Throttle("raspberry-pi", None, reason=reason),)


def test_bits_that_can_not_be_read_are_unknown(tree: Tree, reader: DeadlineReader) -> None:
    tree.lay_out("pi4").fault("devices/platform/soc/soc:firmware/get_throttled", "EIO")
    (throttle,) = RaspberryPi(tree.roots, reader).read().throttles
    assert throttle.heat is None
    assert "EIO" in throttle.reason


def test_no_other_device_is_asked_for_bits(tree: Tree, reader: DeadlineReader) -> None:
    tree.lay_out("agx-orin").tool("vcgencmd", "echo throttled=0xf")
    assert RaspberryPi(tree.roots, reader).read() == Seen()


def test_clocks(tree: Tree, reader: DeadlineReader) -> None:
    clocks = CpuClocks(tree.lay_out("agx-orin").roots, reader).read().clocks
    assert [(clock.name, clock.megahertz, clock.allowed_megahertz) for clock in clocks] == [
        ("cpu/policy0", 2188.8, 2188.8),
        ("cpu/policy4", 2188.8, 2188.8),
    ]


@pytest.mark.parametrize(
    ("device", "name", "megahertz"),
    [("agx-orin", "gpu/17000000.ga10b", 1300.5), ("orin-nx", "gpu/17000000.gpu", 918.0)],
)
def test_clocks_of_integrated_gpus(
    tree: Tree, reader: DeadlineReader, device: str, name: str, megahertz: float
) -> None:
    assert GpuClocks(tree.lay_out(device).roots, reader).read() == Seen(clocks=(Clock(name, megahertz),))


def test_throttle_alerts_of_a_jetson(tree: Tree, reader: DeadlineReader) -> None:
    tree.lay_out("agx-orin")
    alerts = ThrottleAlerts(tree.roots, reader)
    assert alerts.read().throttles == (Throttle("cpu-throttle-alert", False), Throttle("gpu-throttle-alert", False))
    tree.write("class/thermal/cooling_device2/cur_state", "1")
    tree.fault("class/thermal/cooling_device1/cur_state", "EIO")
    cpu, gpu = alerts.read().throttles
    assert (cpu.heat, gpu.heat) == (None, True)
    assert "EIO" in cpu.reason


def test_of_many_clocks_a_few_are_asked(tree: Tree, reader: DeadlineReader) -> None:
    clocks = CpuClocks(tree.lay_out("discrete-gpu").roots, reader).read().clocks
    assert [clock.name for clock in clocks] == ["cpu/policy0", "cpu/policy2", "cpu/policy4"]
