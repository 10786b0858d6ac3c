"""How the operator's verbs reach a provisioned site: addresses, certificates and API key of its state directory."""

from __future__ import annotations

import json
import os
import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from fleet.errors import FleetError
from fleet.inventory.sitefile import SiteFile

ENDPOINTS_FILE = "endpoints.json"
ENDPOINTS_SCHEMA = 1
API_KEY_FILE = "api_key"
MAX_STATE_FILE_BYTES = 2**20


@dataclass(frozen=True)
class Endpoint:
    """Where a process answers, and the name in its certificate."""

    host: str
    port: int
    server_name: str

    @property
    def url(self) -> str:
        """https URL without path; IPv6 addresses in brackets."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"https://{host}:{self.port}"


@dataclass(frozen=True)
class Endpoints:
    """The ports a site really uses. `stages` and `guards` are in inventory order; `coordinator` is its HTTP port."""

    gateway: Endpoint | None
    coordinator: Endpoint | None
    stages: Mapping[str, Endpoint]
    guards: Mapping[str, Endpoint] = field(default_factory=dict)


def connect_reason(error: aiohttp.ClientConnectorError) -> str:
    """Why a connection could not be made, in the system's words; aiohttp's own name only the address again."""
    number = error.os_error.errno
    return os.strerror(number) if number is not None and number > 0 else str(error.os_error)


def load_endpoints(site_file: SiteFile) -> Endpoints:
    """What provisioning wrote down about where the site answers.

    Raises:
        FleetError: the site was not provisioned from here, or the file is damaged.
    """
    path = site_file.state_directory / ENDPOINTS_FILE
    provision = f"fleet provision {site_file.file}"
    try:
        with path.open("rb") as file:
            data = json.loads(file.read(MAX_STATE_FILE_BYTES))
        if data["schema"] != ENDPOINTS_SCHEMA:
            raise ValueError(f"schema {data['schema']!r}, expected {ENDPOINTS_SCHEMA}")
        if "coordinator" not in data:  # null where a site has only external engines
            raise FleetError(f"{path}: written by an older version: it names no coordinator", hint=provision)
        return Endpoints(
            _optional(data.get("gateway")),
            _optional(data["coordinator"]),
            {box: _endpoint(entry) for box, entry in data["stages"].items()},
            {box: _endpoint(entry) for box, entry in data.get("guards", {}).items()},  # none in older files
        )
    except FileNotFoundError:
        raise FleetError(
            f"site {site_file.site.site} was not provisioned from here: there is no {path}", hint=provision
        ) from None
    except OSError as error:
        raise FleetError(f"{path}: {error.strerror}", hint=f"check its owner and mode, or {provision}") from None
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise FleetError(f"{path}: damaged: {type(error).__name__}: {error}", hint=provision) from None


def _optional(data: dict[str, Any] | None) -> Endpoint | None:
    return None if data is None else _endpoint(data)


def _endpoint(data: dict[str, Any]) -> Endpoint:
    return Endpoint(str(data["host"]), int(data["port"]), str(data["server_name"]))


def client_context(site_file: SiteFile, *, with_certificate: bool) -> ssl.SSLContext:
    """TLS 1.3 context that trusts the site's CA alone.

    Args:
        site_file: the site.
        with_certificate: show the operator's certificate, which stages ask for.

    Raises:
        FleetError: a file is missing or no PEM.
    """
    state = site_file.state_directory
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    try:
        context.load_verify_locations(state / "ca" / "ca.crt")
        if with_certificate:
            context.load_cert_chain(state / "operator.crt", state / "operator.key")
    except OSError as error:  # ssl.SSLError is one
        raise FleetError(
            f"{state}: the site's certificates cannot be used: {error}", hint=f"fleet provision {site_file.file}"
        ) from None
    return context


@dataclass(frozen=True)
class ClientAccess:
    """What a client of the site's API needs to know; the key itself is shown nowhere."""

    base_url: str
    ca_file: str
    api_key_in: str

    def __str__(self) -> str:
        return f"API {self.base_url} · CA {self.ca_file} · key in {self.api_key_in}"


def client_access(site_file: SiteFile, endpoints: Endpoints) -> ClientAccess | None:
    """How clients reach the gateway; None on a site without one."""
    if endpoints.gateway is None:
        return None
    state = site_file.state_directory
    return ClientAccess(
        f"{endpoints.gateway.url}/v1",
        str(state / "ca" / "ca.crt"),
        f"{site_file.file} (gateway: api_keys)" if site_file.site.gateway.api_keys else str(state / API_KEY_FILE),
    )


def api_key(site_file: SiteFile) -> str:
    """The first key of the inventory, else the one provisioning generated.

    Raises:
        FleetError: there is none.
    """
    if site_file.site.gateway.api_keys:
        return site_file.site.gateway.api_keys[0].key.get_secret_value()
    path = site_file.state_directory / API_KEY_FILE
    try:
        with path.open("r", encoding="utf-8") as file:
            key = file.read(4096).strip()
    except (OSError, UnicodeDecodeError) as error:
        raise FleetError(f"no API key: {path}: {error}", hint=f"fleet provision {site_file.file}") from None
    if not key:
        raise FleetError(f"no API key: {path} is empty", hint=f"fleet provision {site_file.file}")
    return key
