"""Which port each process of a box listens on: the inventory's on real boxes, probed and remembered in local mode."""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fleet.errors import ExitCode, FleetError
from fleet.inventory.model import Role
from fleet.inventory.sitefile import SiteFile
from fleet.provision.state_directory import read_state, write_private_json

PORTS_FILE = "ports.json"
PORT_SEARCH = 1000  # ports tried above the wanted one before giving up
HIGHEST_PORT = 65535
PORT_ROLES = {
    "ring": {Role.STAGE},
    "metrics": {Role.STAGE},
    "gateway": {Role.GATEWAY},
    "gateway_loopback": {Role.GATEWAY},
    "coordinator": {Role.COORDINATOR},
    "coordinator_http": {Role.COORDINATOR},
    "guards": set(Role),
}


@dataclass(frozen=True)
class BoxPorts:
    """TCP ports of one box; 0 for those of roles that it does not have (and in files of versions without them)."""

    ring: int = 0
    metrics: int = 0
    gateway: int = 0
    gateway_loopback: int = 0
    coordinator: int = 0
    coordinator_http: int = 0
    guards: int = 0


def is_free(port: int) -> bool:
    """Whether a process of this machine could listen on this port now; bound for a moment, on every address."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("0.0.0.0", port))  # noqa: S104 - never listens
        except OSError:
            return False
    return True


def choose_ports(
    site_file: SiteFile, known: Mapping[str, BoxPorts], free: Callable[[int], bool]
) -> dict[str, BoxPorts]:
    """Ports of every box. Boxes over ssh take the inventory's; local boxes keep what they have, or take free ones.

    Args:
        site_file: the site.
        known: ports that local boxes were given before.
        free: whether a port can be listened on.

    Raises:
        FleetError: no free port within PORT_SEARCH above the wanted one.
    """
    wanted = site_file.site.ports
    local = [name for name, box in site_file.site.boxes.items() if box.connection == "local"]
    taken = {port for name in local if name in known for port in asdict(known[name]).values()}

    def take(port: int, kept: int) -> int:
        if kept:
            return kept
        for candidate in range(port, min(port + PORT_SEARCH, HIGHEST_PORT + 1)):
            if candidate not in taken and free(candidate):
                taken.add(candidate)
                return candidate
        raise FleetError(
            f"no free port from {port} to {min(port + PORT_SEARCH, HIGHEST_PORT + 1) - 1} on this machine",
            hint=f"set other numbers under `ports:` in {site_file.file}",
        )

    chosen: dict[str, BoxPorts] = {}
    for name, box in site_file.site.boxes.items():
        numbers = {port: getattr(wanted, port) if roles & set(box.roles) else 0 for port, roles in PORT_ROLES.items()}
        if box.connection == "local":
            kept = asdict(known[name]) if name in known else {}
            numbers = {port: take(number, kept.get(port, 0)) if number else 0 for port, number in numbers.items()}
        chosen[name] = BoxPorts(**numbers)
    return chosen


def site_ports(site_file: SiteFile, *, keep: bool) -> dict[str, BoxPorts]:
    """Ports of every box; with `keep`, those of local boxes are remembered in `<state>/ports.json`.

    Raises:
        FleetError: as `choose_ports`; or the file is damaged.
    """
    path = site_file.state_directory / PORTS_FILE
    known = _read(path)
    ports = choose_ports(site_file, known, is_free)
    local = {name: asdict(ports[name]) for name, box in site_file.site.boxes.items() if box.connection == "local"}
    if keep and local:
        write_private_json(path, {"schema": 1, "boxes": local})
    return ports


def gateway_box(site_file: SiteFile) -> str | None:
    """The box that runs the gateway, or None if the site has none."""
    boxes = site_file.boxes_with(Role.GATEWAY)
    return boxes[0] if boxes else None


def coordinator_box(site_file: SiteFile) -> str:
    """The box that runs the coordinator.

    Raises:
        FleetError: no box has the role; the inventory's own check refuses such a site if it needs one.
    """
    boxes = site_file.boxes_with(Role.COORDINATOR)
    if not boxes:
        raise FleetError(
            f"{site_file.file}: no box has the role coordinator",
            hint=f"fleet inventory check {site_file.file}",
            exit_code=ExitCode.INVALID_INVENTORY,
        )
    return boxes[0]


def _read(path: Path) -> dict[str, BoxPorts]:
    def parse(data: dict[str, Any]) -> dict[str, BoxPorts]:
        return {
            name: BoxPorts(**{port: int(number) for port, number in p.items()}) for name, p in data["boxes"].items()
        }

    return read_state(path, parse, f"run `fleet down`, then remove {path}") or {}
