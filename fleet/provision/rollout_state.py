"""What provisioning remembers on the operator's side: API key, cores, endpoints, last failures."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from fleet.errors import FleetError
from fleet.inventory.model import Role
from fleet.inventory.sitefile import SiteFile
from fleet.provision.ports import BoxPorts, coordinator_box, gateway_box
from fleet.provision.render_etc import external_pipelines, pipeline_of, to_bytes
from fleet.provision.render_layout import server_name
from fleet.provision.state_directory import read_state, write_private, write_private_json

API_KEY_FILE = "api_key"
BOXES_FILE = "boxes.json"
ENDPOINTS_FILE = "endpoints.json"
FAILED_FILE = "failed.json"
GENERATED_KEY_NAME = "default"
GENERATED_KEY_BYTES = 32
API_KEY_MAX_BYTES = 4096


def client_key(site_file: SiteFile, *, create: bool) -> str | None:
    """A key that the gateway knows: the inventory's first, else the generated one in `<state>/api_key`.

    Args:
        create: generate it if there is none yet; otherwise None is returned.
    """
    if site_file.site.gateway.api_keys:
        return site_file.site.gateway.api_keys[0].key.get_secret_value()
    path = site_file.state_directory / API_KEY_FILE
    if path.is_file():
        with path.open("rb") as file:
            key = file.read(API_KEY_MAX_BYTES).decode(errors="replace").strip()
        if key.isascii() and key.isprintable():
            if key:
                return key
        else:
            raise FleetError(f"{path}: not a key", hint=f"move {path} away; provisioning makes another key")
    if not create:
        return None
    key = f"fleet-{secrets.token_urlsafe(GENERATED_KEY_BYTES)}"
    write_private(path, f"{key}\n".encode())
    return key


def api_keys_file(site_file: SiteFile, generated: str | None) -> bytes:
    """The gateway's `api_keys_file`: digests only.

    Args:
        generated: key of a site whose inventory has none; None if it is not made yet (`--check`).
    """
    declared = {key.name: key.key.get_secret_value() for key in site_file.site.gateway.api_keys}
    keys = declared or ({GENERATED_KEY_NAME: generated} if generated is not None else {})
    entries = [{"name": name, "sha256": hashlib.sha256(key.encode()).hexdigest()} for name, key in keys.items()]
    return to_bytes({"schema": 1, "keys": entries})


def known_cores(state_directory: Path) -> dict[str, int]:
    """Usable CPUs of boxes, as measured by earlier runs."""

    def parse(data: dict[str, Any]) -> dict[str, int]:
        return {str(name): int(box["cores"]) for name, box in data["boxes"].items()}

    return read_state(state_directory / BOXES_FILE, parse) or {}


def remember_cores(state_directory: Path, cores: Mapping[str, int]) -> None:
    """Keep measured cores, so that the next run's desired state is right at the first question."""
    merged = {**known_cores(state_directory), **cores}
    write_private_json(
        state_directory / BOXES_FILE, {"schema": 1, "boxes": {name: {"cores": count} for name, count in merged.items()}}
    )


def remember_failures(state_directory: Path, boxes: Iterable[str]) -> None:
    """Boxes of `--limit @failed`."""
    write_private_json(state_directory / FAILED_FILE, {"schema": 1, "boxes": sorted(boxes)})


def last_failures(state_directory: Path) -> tuple[str, ...]:
    """Boxes that failed or were unreachable in the last run."""
    return read_state(state_directory / FAILED_FILE, lambda data: tuple(map(str, data["boxes"]))) or ()


def endpoints(site_file: SiteFile, ports: Mapping[str, BoxPorts]) -> dict[str, Any]:
    """Where the operator's verbs find gateway, coordinator and stages: `<state>/endpoints.json`.

    `stages` are the metrics ports (health over mutual TLS), `guards` those of all boxes' guards, `coordinator` its
    HTTP port, null where the site has only external engines; `gateway_loopback` is null unless it is this machine's.
    """
    site = site_file.site

    def of(box: str, port: int) -> dict[str, Any]:
        return {"host": site.boxes[box].address, "port": port, "server_name": server_name(site.site, box)}

    gateway = gateway_box(site_file)
    loopback = None
    if gateway is not None and site.boxes[gateway].connection == "local":
        loopback = {"host": "127.0.0.1", "port": ports[gateway].gateway_loopback}
    coordinator = coordinator_box(site_file) if len(external_pipelines(site_file)) < len(site.pipelines) else None
    stages = [box for box in site_file.boxes_with(Role.STAGE) if pipeline_of(site_file, box) is not None]
    return {
        "schema": 1,
        "gateway": None if gateway is None else of(gateway, ports[gateway].gateway),
        "gateway_loopback": loopback,
        "coordinator": None if coordinator is None else of(coordinator, ports[coordinator].coordinator_http),
        "stages": {box: of(box, ports[box].metrics) for box in stages},
        "guards": {box: of(box, ports[box].guards) for box in site.boxes},
    }
