"""What provisioning remembers on the operator's side: plan epoch, API key, cores, endpoints, last failures."""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from fleet.errors import FleetError
from fleet.inventory.model import Role
from fleet.inventory.sitefile import SiteFile
from fleet.planning.plan import Plan
from fleet.provision.ports import BoxPorts, gateway_box
from fleet.provision.render_etc import pipeline_of, to_bytes
from fleet.provision.render_layout import server_name
from fleet.provision.state_directory import read_state, write_private, write_private_json

FIRST_EPOCH = 1
PLAN_FILE = "plan.json"
API_KEY_FILE = "api_key"
BOXES_FILE = "boxes.json"
ENDPOINTS_FILE = "endpoints.json"
FAILED_FILE = "failed.json"
GENERATED_KEY_NAME = "default"
GENERATED_KEY_BYTES = 32
API_KEY_MAX_BYTES = 4096


def next_plan(known: Plan | None, wanted: Plan) -> Plan:
    """The wanted plan with its epoch: the known one's while nothing changes, one more when anything does."""
    if known is None:
        return replace(wanted, epoch=max(FIRST_EPOCH, wanted.epoch))
    if known.pipelines == wanted.pipelines:
        return known
    return replace(wanted, epoch=known.epoch + 1)


def site_plan(state_directory: Path, wanted: Plan, *, keep: bool) -> Plan:
    """The site's plan with its epoch; with `keep` it is written to `<state>/plan.json` before any box hears of it,
    so that no epoch ever names two plans.

    Raises:
        FleetError: plan.json is damaged.
    """
    path = state_directory / PLAN_FILE
    hint = "put it back from a backup: its epoch must not fall below what the boxes have seen"
    known = read_state(path, lambda data: Plan.from_data(data["plan"]), hint)
    plan = next_plan(known, wanted)
    if keep:
        write_private_json(path, {"schema": 1, "plan": json.loads(plan.to_json())})
    return plan


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
    """Where the operator's verbs find gateway and stages: `<state>/endpoints.json`.

    `stages` are the metrics ports (health over mutual TLS); `gateway_loopback` is null unless it is this machine's.
    """
    site = site_file.site

    def of(box: str, port: int) -> dict[str, Any]:
        return {"host": site.boxes[box].address, "port": port, "server_name": server_name(site.site, box)}

    gateway = gateway_box(site_file)
    loopback = None
    if gateway is not None and site.boxes[gateway].connection == "local":
        loopback = {"host": "127.0.0.1", "port": ports[gateway].gateway_loopback}
    stages = [box for box in site_file.boxes_with(Role.STAGE) if pipeline_of(site_file, box) is not None]
    return {
        "schema": 1,
        "gateway": None if gateway is None else of(gateway, ports[gateway].gateway),
        "gateway_loopback": loopback,
        "stages": {box: of(box, ports[box].metrics) for box in stages},
    }
