"""Network links: speed below nominal, links that are down, carriers that come and go."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from guards.deadline import DeadlineReader, Unreadable
from guards.findings import Finding, Repair, State, Value
from guards.roots import Roots
from guards.settings import HOUR_SECONDS, SurroundingsSettings
from guards.surroundings.window import Window

LARGEST_NUMBER = 2**32  # no speed in Mbit/s and no counter of carriers is larger
ETHERNET = "1"  # /sys/class/net/*/type: ARPHRD_ETHER; loopback is 772


@dataclass(frozen=True)
class Nominal:
    """What the data link should be.

    Attributes:
        mac: of its NIC, in any case of letters; None: not known, then the fastest wired link that is up is compared.
    """

    mbit_per_second: float
    mac: str | None = None


@dataclass(frozen=True)
class Link:
    """A link of type Ethernet; Wi-Fi counts as one too.

    Attributes:
        wireless: Wi-Fi. virtual: a bridge, veth or tunnel: no device stands behind it.
        up: it has a carrier; None: not told, or switched off by an administrator (then the kernel says EINVAL).
        mbit_per_second: negotiated; None: not told. The kernel says −1 or EINVAL for Wi-Fi, virtual and down links.
        changes: how often its carrier came or went since boot.
    """

    name: str
    mac: str
    wireless: bool
    virtual: bool
    up: bool | None
    mbit_per_second: float | None
    changes: int | None


@dataclass(frozen=True)
class LinksReading:
    """All links; the problem says why there are none."""

    links: tuple[Link, ...]
    problem: str = ""


@dataclass(frozen=True)
class LinksMemory:
    """What is known of before.

    Attributes:
        once_up: names of links that had a carrier some time: one of them that is down is a fault, an unused port isn't.
        changes: carrier changes within the last hour, by name.
    """

    once_up: frozenset[str] = frozenset()
    changes: Mapping[str, Window] = field(default_factory=dict)


def sense_links(roots: Roots, reader: DeadlineReader) -> LinksReading:
    """Look at each; what can't be read of a link is None."""
    try:
        directories = sorted((roots.sys / "class/net").iterdir())
    except OSError as error:
        return LinksReading((), f"{error.strerror}")
    links = (_link(directory, reader) for directory in directories if directory.is_dir())
    return LinksReading(tuple(link for link in links if link is not None))


def _link(directory: Path, reader: DeadlineReader) -> Link | None:
    def text(name: str) -> str | None:
        try:
            return reader.text(directory / name).strip()
        except Unreadable:
            return None

    def number(name: str) -> int | None:
        try:
            value = int(text(name) or "")
        except ValueError:
            return None
        return value if abs(value) <= LARGEST_NUMBER else None

    if text("type") != ETHERNET:
        return None
    speed, carrier = number("speed"), text("carrier")
    return Link(
        name=directory.name,
        mac=(text("address") or "").lower(),
        wireless=(directory / "wireless").exists() or (directory / "phy80211").exists(),
        virtual=not (directory / "device").exists(),
        up=carrier == "1" if carrier in ("0", "1") else None,
        mbit_per_second=float(speed) if speed is not None and speed > 0 else None,
        changes=number("carrier_changes"),
    )


def judge_links(
    reading: LinksReading, memory: LinksMemory, nominal: Nominal, settings: SurroundingsSettings, now_seconds: float
) -> tuple[tuple[Finding, ...], LinksMemory]:
    """A finding for every link that matters: the data link, Wi-Fi, and all with a device behind them."""
    if reading.problem:
        return (Finding("nic", State.DEGRADED, reading.problem, {}, Repair.CHECK_NETWORK),), memory
    changes = {
        link.name: memory.changes.get(link.name, Window()).added(now_seconds, link.changes, HOUR_SECONDS)
        for link in reading.links
        if link.changes is not None
    }
    up = {link.name for link in reading.links if link.up}
    data = _data_link(reading.links, nominal)
    findings = []
    for link in reading.links:
        if link.virtual and link != data:
            continue  # bridges and tunnels come and go with other software
        mbit = nominal.mbit_per_second if link == data else None
        wired = not link.wireless and not link.virtual
        expected = link == data or (wired and link.name in memory.once_up)
        findings.append(_judge(link, mbit, expected, changes.get(link.name, Window()), settings))
    if nominal.mac is not None and data is None:
        reason = f"no link has the address {nominal.mac} of the data link"
        findings.append(Finding("nic/data", State.UNHEALTHY, reason, {}, Repair.CHECK_NETWORK))
    return tuple(findings), LinksMemory(memory.once_up | up, changes)


def _data_link(links: Sequence[Link], nominal: Nominal) -> Link | None:
    if nominal.mac is not None:
        # a bridge takes its port's address: the device itself is meant
        own = sorted((link for link in links if link.mac == nominal.mac.lower()), key=lambda link: link.virtual)
        return own[0] if own else None
    wired = [link for link in links if link.up and not link.wireless and not link.virtual]
    return max(wired, key=lambda link: link.mbit_per_second or 0.0, default=None)


def _judge(
    link: Link, nominal_mbit: float | None, expected: bool, window: Window, settings: SurroundingsSettings
) -> Finding:
    part = f"nic/{link.name}"
    changes = int(window.growth)
    evidence: dict[str, Value] = {
        "up": link.up,
        "mbit_per_second": link.mbit_per_second,
        "nominal_mbit_per_second": nominal_mbit,
        "carrier_changes_last_hour": changes,
    }
    if changes > settings.link_flaps_per_hour:
        reason = f"its carrier came or went {changes} times within an hour, bound {settings.link_flaps_per_hour:g}"
        return Finding(part, State.DEGRADED, reason, evidence, Repair.CHECK_NETWORK)
    if not link.up and expected:
        return Finding(part, State.UNHEALTHY, "no carrier", evidence, Repair.CHECK_NETWORK)
    if not link.up and not link.wireless:
        return Finding(part, State.UNSUPPORTED, "nothing has ever been plugged in", evidence)
    if link.mbit_per_second is None:
        kind = "Wi-Fi" if link.wireless else "a virtual link" if link.virtual else "its driver"
        return Finding(part, State.UNSUPPORTED, f"{kind} tells no speed", evidence)
    if nominal_mbit is not None and link.mbit_per_second < nominal_mbit:
        reason = f"{link.mbit_per_second:g} Mbit/s, nominal {nominal_mbit:g}"
        return Finding(part, State.DEGRADED, reason, evidence, Repair.CHECK_NETWORK)
    return Finding(part, State.HEALTHY, f"{link.mbit_per_second:g} Mbit/s", evidence)
