"""The site's readiness gate: the gateway's `/health` over TLS until it says ready."""

from __future__ import annotations

import http.client
import json
import socket
import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

REQUEST_SECONDS = 5.0  # one question, connect to answer
PAUSE_SECONDS = 0.25
QUIET_SECONDS = 5.0  # a step that stays quiet says what it waits for
BODY_MAX_BYTES = 64 * 1024
SHOWN_CHARACTERS = 200


@dataclass(frozen=True)
class HealthTarget:
    """Where `/health` is asked for.

    Attributes:
        host, port: of the gateway. server_name: that its certificate must carry.
        ca: certificate file of the site CA. certificate, key: of the operator.
        api_key: sent as bearer token.
    """

    host: str
    port: int
    server_name: str
    ca: Path
    certificate: Path
    key: Path
    api_key: str


def wait_until_ready(target: HealthTarget, *, seconds: float, report: Callable[[str], None]) -> str | None:
    """Ask until the answer is 200.

    Args:
        seconds: longest wait.
        report: takes a line whenever QUIET_SECONDS passed without an end.

    Returns:
        None once ready, otherwise the last answer in words.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.load_verify_locations(target.ca)
    context.load_cert_chain(target.certificate, target.key)
    start = told = time.monotonic()
    while True:
        reason = _ask(target, context)
        now = time.monotonic()
        if reason is None:
            return None
        if now - start >= seconds:
            return reason
        if now - told >= QUIET_SECONDS:
            told = now
            report(f"waiting for the gateway to be ready, {now - start:.0f} of {seconds:.0f} s: {reason}")
        time.sleep(PAUSE_SECONDS)


def _ask(target: HealthTarget, context: ssl.SSLContext) -> str | None:
    """One question. None if ready, otherwise why not."""
    connection = http.client.HTTPConnection(target.host, target.port, timeout=REQUEST_SECONDS)
    try:
        # HTTPSConnection would check the certificate against the address instead of the box's name
        plain = socket.create_connection((target.host, target.port), timeout=REQUEST_SECONDS)
        with plain:
            connection.sock = context.wrap_socket(plain, server_hostname=target.server_name)
            connection.request("GET", "/health", headers={"Authorization": f"Bearer {target.api_key}"})
            answer = connection.getresponse()
            body = answer.read(BODY_MAX_BYTES).decode("utf-8", "replace")
    except (OSError, http.client.HTTPException) as error:
        return f"{type(error).__name__}: {error}"
    finally:
        connection.close()
    return None if answer.status == http.HTTPStatus.OK else f"{answer.status}: {_reason(body)[:SHOWN_CHARACTERS]}"


def _reason(body: str) -> str:
    """What the gateway says is missing; the body as it is if it says so in another way."""
    try:
        data = json.loads(body)
    except ValueError:
        return body.strip()
    return str(data.get("reason") or body) if isinstance(data, dict) else body
