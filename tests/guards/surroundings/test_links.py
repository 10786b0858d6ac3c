"""Network links."""

from __future__ import annotations

from pathlib import Path

import pytest

from guards.deadline import DeadlineReader
from guards.findings import Finding, State
from guards.settings import SurroundingsSettings
from guards.surroundings.links import Link, LinksMemory, LinksReading, Nominal, judge_links, sense_links
from tests.guards.surroundings.trees import fixture, plant, roots

SETTINGS = SurroundingsSettings()


def sense(base: Path) -> LinksReading:
    return sense_links(roots(base), DeadlineReader(5.0, 300.0))


def judge(reading: LinksReading, nominal: Nominal, memory: LinksMemory | None = None) -> dict[str, Finding]:
    findings, _ = judge_links(reading, memory or LinksMemory(), nominal, SETTINGS, 0.0)
    return {finding.part: finding for finding in findings}


@pytest.mark.parametrize(
    ("tree", "nominal", "states"),
    [
        ("net_pi.txt", Nominal(1000.0), {"nic/eth0": State.UNSUPPORTED, "nic/wlan0": State.UNSUPPORTED}),
        (
            "net_pi.txt",
            Nominal(1000.0, "DC:A6:32:00:00:01"),
            {"nic/eth0": State.UNHEALTHY, "nic/wlan0": State.UNSUPPORTED},
        ),
        ("net_jetson.txt", Nominal(1000.0), {"nic/eno1": State.HEALTHY}),
        ("net_jetson.txt", Nominal(10000.0), {"nic/eno1": State.DEGRADED}),
        (
            "net_x86.txt",
            Nominal(1000.0, "00:1b:21:00:00:01"),
            {"nic/enp1s0": State.DEGRADED, "nic/enp2s0": State.UNSUPPORTED},
        ),
        ("net_veth.txt", Nominal(1000.0), {}),
        ("net_veth.txt", Nominal(1000.0, "52:54:00:00:00:01"), {"nic/host0": State.HEALTHY}),
        ("net_veth.txt", Nominal(1000.0, "52:54:00:00:00:99"), {"nic/data": State.UNHEALTHY}),
    ],
)
def test_recorded_links(tmp_path: Path, tree: str, nominal: Nominal, states: dict[str, State]) -> None:
    plant(tmp_path, fixture(tree))
    found = judge(sense(tmp_path), nominal)
    assert {part: finding.state for part, finding in found.items()} == states


def test_no_speed_is_never_a_number(tmp_path: Path) -> None:
    plant(tmp_path, fixture("net_pi.txt"))
    assert all(link.mbit_per_second is None for link in sense(tmp_path).links)
    assert judge(sense(tmp_path), Nominal(1000.0))["nic/wlan0"].evidence["mbit_per_second"] is None


def test_figures_that_are_none_are_unknown(tmp_path: Path) -> None:
    plant(tmp_path, fixture("net_pi.txt"))
    for link in (tmp_path / "sys/class/net").iterdir():
        for name in ("speed", "carrier_changes"):
            (link / name).write_text("9" * 4000)
    assert {(link.mbit_per_second, link.changes) for link in sense(tmp_path).links} == {(None, None)}


def wired(up: bool, changes: int) -> LinksReading:
    return LinksReading((Link("eth0", "aa", False, False, up, 1000.0 if up else None, changes),))


def test_a_link_that_was_up_is_missed() -> None:
    _, memory = judge_links(wired(True, 1), LinksMemory(), Nominal(1000.0), SETTINGS, 0.0)
    findings, _ = judge_links(wired(False, 2), memory, Nominal(1000.0), SETTINGS, 30.0)
    assert findings[0].state is State.UNHEALTHY


def test_flapping_is_seen_for_an_hour_and_forgotten() -> None:
    memory, states = LinksMemory(), []
    counts = [2, 4, 6, 8, 9, *[9] * 124]
    for round_, changes in enumerate(counts):
        findings, memory = judge_links(wired(True, changes), memory, Nominal(1000.0), SETTINGS, 30.0 * round_)
        states.append(findings[0].state)
    assert states[3] is State.HEALTHY  # 6 changes
    assert states[4] is State.DEGRADED  # 7
    assert states[-1] is State.HEALTHY
    findings, memory = judge_links(wired(True, 1), memory, Nominal(1000.0), SETTINGS, 10_000.0)  # after a reboot
    assert findings[0].evidence["carrier_changes_last_hour"] == 0


def test_no_network_at_all(tmp_path: Path) -> None:
    assert judge(sense(tmp_path), Nominal(1000.0))["nic"].state is State.DEGRADED
