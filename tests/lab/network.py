"""The lab's network: a switch (bridge) in a namespace of its own, one virtual cable to the host and one to each box.

Boxes have no route but to the lab's /24, and the host keeps an `unreachable` route for it, so that lab traffic never
leaves by the host's default route, not even after the lab is down.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.lab.paths import HOST_ADDRESS, NETWORK, REPOSITORY, BoxPaths
from tests.lab.processes import ProcessRecord, run, wait_until
from tests.lab.settings import Shape

SWITCH = "fleet-sw"
BRIDGE = "br0"
HOST_END = "fl-root"
UPLINK = "uplink"  # the switch-side end of the host's cable
NAMESPACES = Path("/run/netns")
UNREACHABLE_METRIC = 9999
WIRE_DEADLINE_SECONDS = 10.0


def in_switch(argv: Sequence[str]) -> list[str]:
    """`argv`, run in the switch's network namespace."""
    return ["nsenter", f"--net={NAMESPACES / SWITCH}", "--", *argv]


def _ip(*words: str) -> None:
    run(["ip", *words])


def _ip_batch(namespace: str, lines: Sequence[str]) -> None:
    run(["ip", "-n", namespace, "-batch", "-"], input_text="\n".join(lines) + "\n")


def _whole_frames(namespace: str, device: str) -> None:
    """No offloads: captures and the wire must see frames as a real cable carries them, checksums filled in."""
    run(["nsenter", f"--net={NAMESPACES / namespace}", "ethtool", "-K", device, "tx", "off", "gro", "off"])


def switch_is_up() -> bool:
    """Whether switch and host cable are there."""
    return (NAMESPACES / SWITCH).exists() and Path(f"/sys/class/net/{HOST_END}").exists()


def switch_up() -> None:
    """Make the switch and the host's cable, unless they are there."""
    if switch_is_up():
        return
    switch_down()
    _ip("netns", "add", SWITCH)
    run(in_switch(["sysctl", "-qw", "net.ipv6.conf.all.disable_ipv6=1", "net.ipv6.conf.default.disable_ipv6=1"]))
    _ip_batch(SWITCH, ["link set lo up", f"link add {BRIDGE} type bridge", f"link set {BRIDGE} up"])
    _ip("link", "add", HOST_END, "type", "veth", "peer", "name", UPLINK, "netns", SWITCH)
    _ip_batch(SWITCH, [f"link set {UPLINK} master {BRIDGE} up"])
    run(["sysctl", "-qw", f"net.ipv6.conf.{HOST_END}.disable_ipv6=1"])
    run(["ethtool", "-K", HOST_END, "tx", "off", "gro", "off"])
    _ip("addr", "add", f"{HOST_ADDRESS}/24", "dev", HOST_END)
    _ip("link", "set", HOST_END, "up")
    _ip("route", "replace", "unreachable", f"{NETWORK}.0/24", "metric", str(UNREACHABLE_METRIC))


def switch_down() -> None:
    """Remove switch and host cable; the `unreachable` route stays."""
    if Path(f"/sys/class/net/{HOST_END}").exists():
        _ip("link", "del", HOST_END)
    if (NAMESPACES / SWITCH).exists():
        _ip("netns", "del", SWITCH)


def cable_up(box: BoxPaths, *, link_up: bool) -> None:
    """Make the box's network namespace and its cable to the switch."""
    cable_down(box)
    _ip("netns", "add", box.namespace)
    _ip_batch(box.namespace, ["link set lo up", f"link add eth0 type veth peer name {box.port} netns {SWITCH}"])
    _whole_frames(box.namespace, "eth0")
    _whole_frames(SWITCH, box.port)
    _ip_batch(
        box.namespace,
        [f"link set eth0 address {box.mac}", f"addr add {box.address}/24 dev eth0", "link set eth0 up"],
    )
    _ip_batch(SWITCH, [f"link set {box.port} master {BRIDGE} {'up' if link_up else 'down'}"])


def cable_down(box: BoxPaths) -> None:
    """Remove the box's network namespace, and its cable with it."""
    if _has_device(box.port):
        _ip("-n", SWITCH, "link", "del", box.port)
    if (NAMESPACES / box.namespace).exists():
        _ip("netns", "del", box.namespace)


def _has_device(device: str) -> bool:
    if not (NAMESPACES / SWITCH).exists():
        return False
    return run(["ip", "-n", SWITCH, "link", "show", device], check=False).exit_code == 0


def set_link(box: BoxPaths, *, up: bool) -> None:
    """Plug or unplug the cable at the switch: the box loses or gets carrier."""
    _ip("-n", SWITCH, "link", "set", box.port, "up" if up else "down")


def link_state(box: BoxPaths) -> str:
    """`up`, `down` (cut), or `none` (no cable: the box is off)."""
    shown = run(["ip", "-n", SWITCH, "-json", "link", "show", box.port], check=False)
    if shown.exit_code != 0:
        return "none"
    return "up" if "UP" in json.loads(shown.stdout)[0]["flags"] else "down"


def wire_up(box: BoxPaths, shape: Shape) -> None:
    """Put a wire that delays, drops and slows frames between the box's port and the switch.

    The kernels we test on have no netem, so a process shuttles the frames.
    """
    wire_down(box)
    inner, outer = f"w-{box.name}", f"x-{box.name}"
    _ip_batch(SWITCH, [f"link add {inner} type veth peer name {outer}"])
    for device in (inner, outer):
        _whole_frames(SWITCH, device)
    _ip_batch(
        SWITCH,
        [f"link set {box.port} nomaster", f"link set {outer} master {BRIDGE} up", f"link set {inner} up"],
    )
    numbers = [f"{value:g}" for value in (shape.delay_ms, shape.jitter_ms, shape.loss, shape.rate_mbit)]
    module = [sys.executable, "-m", "tests.lab.wire", str(box.wire_record), box.port, inner, *numbers]
    start_detached(in_switch(module), box.directory / "wire.log")
    wait_until(box.wire_record.exists, f"{box.name}: start of its wire", WIRE_DEADLINE_SECONDS)


def wire_down(box: BoxPaths) -> None:
    """Take the wire out again, if there is one."""
    record = ProcessRecord.load(box.wire_record)
    if record:
        record.end(f"{box.name}: end of its wire")
    box.wire_record.unlink(missing_ok=True)
    if _has_device(f"w-{box.name}"):
        _ip("-n", SWITCH, "link", "del", f"w-{box.name}")
        if _has_device(box.port):
            _ip("-n", SWITCH, "link", "set", box.port, "master", BRIDGE)


def start_detached(argv: Sequence[str], log: Path) -> None:
    """Start a process in a session of its own that outlives us; its output is appended to `log`."""
    shell = 'log=$1; shift; exec setsid --fork "$@" </dev/null >>"$log" 2>&1'
    run(["env", f"--chdir={REPOSITORY}", "sh", "-c", shell, "sh", str(log), *argv])
