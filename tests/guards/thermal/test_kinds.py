"""Which sensors count, and which of their values are believed."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from guards.thermal.kinds import COLDEST_CELSIUS, HOTTEST_CELSIUS, believe, believe_millidegrees, kind_of
from guards.thermal.readings import ON_DIE, Kind

KINDS = {
    Kind.JUNCTION: ["tj-thermal", "tj", "TJ-therm"],
    Kind.CPU: [
        "cpu-thermal",
        "CPU-therm",
        "cpu_thermal",
        "x86_pkg_temp",
        "coretemp",
        "k10temp",
        "zenpower",
        "TCPU",
        "bigcore0-thermal",
        "littlecore-thermal",
        "cpu0-thermal",
        "cluster1",
    ],
    Kind.GPU: ["gpu-thermal", "GPU-therm", "gpu-top-thermal", "amdgpu", "nouveau", "xe"],
    Kind.SOC: ["soc-thermal", "soc0-thermal", "soc012-thermal", "SOC2", "center-thermal", "soc_dts0"],
    Kind.ACCELERATOR: ["npu-thermal", "cv0-thermal", "CV2-therm"],
    Kind.PMIC: ["PMIC-Die", "pmic-thermal", "pm8150-pmic"],
    Kind.BOARD: ["acpitz", "Tboard_tegra", "Tdiode_tegra", "tmp451"],
    Kind.OTHER: [
        "battery",
        "BAT0",
        "bq25703-charger",
        "iwlwifi_1",
        "nvme",
        "pch_cannonlake",
        "INT3400 Thermal",
        "SEN1",
        "thermal-fan-est",
        "rp1_adc",
        "pwmfan",
        "AO-therm",
        "PLL-therm",
        "ina3221",
        "drivetemp",
        "ucsi_usb",
        "",
    ],
}


@pytest.mark.parametrize(("name", "kind"), [(name, kind) for kind, names in KINDS.items() for name in names])
def test_names_of_sensors(name: str, kind: Kind) -> None:
    assert kind_of(name) is kind


@pytest.mark.parametrize(
    ("text", "celsius"),
    [("57939\n", 57.939), ("-12500\n", -12.5), ("-150\n", -0.15), ("129000", 129.0), ("1000", 1.0)],
)
def test_plausible_values_are_believed_frost_too(text: str, celsius: float) -> None:
    assert believe_millidegrees(text, Kind.CPU) == (celsius, "")


@pytest.mark.parametrize(
    "text",
    [
        "-256000",
        "-128000",
        "-125000",
        "-263200",
        "-32768000",
        "-274000",
        "255000",
        "2147483647",
        "0",
        "45",
        "-45",
        "",
        "\n",
        "N/A",
        "57.9",
        "<unknown>",
        "9" * 4000,
        " " * 4000,
        "\ufffd\ufffd",
    ],
)
@pytest.mark.parametrize("kind", sorted(ON_DIE, key=lambda kind: kind.value))
def test_what_drivers_say_without_an_answer_is_unknown(text: str, kind: Kind) -> None:
    celsius, reason = believe_millidegrees(text, kind)
    assert celsius is None
    assert reason


def test_a_constant_placeholder_of_a_power_chip() -> None:
    assert believe(100.0, Kind.PMIC)[0] is None
    assert believe(101.0, Kind.PMIC)[0] == 101.0
    assert believe(100.0, Kind.CPU)[0] == 100.0


@given(st.floats(), st.sampled_from(Kind))
def test_no_value_is_changed_and_none_is_absurd(celsius: float, kind: Kind) -> None:
    believed, reason = believe(celsius, kind)
    assert (believed is None) == bool(reason)
    assert believed is None or (believed == celsius and COLDEST_CELSIUS < believed < HOTTEST_CELSIUS)
