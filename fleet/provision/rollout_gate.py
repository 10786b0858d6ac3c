"""The site's readiness gate: the gateway's `/health` over TLS until it says ready, then the coordinator's plan until it
rests: the first plan serves as soon as any boxes can hold the model, and is spread over the others afterwards."""

from __future__ import annotations

import http.client
import json
import socket
import ssl
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

REQUEST_SECONDS = 5.0  # one question, connect to answer
PAUSE_SECONDS = 0.25
QUIET_SECONDS = 5.0  # a step that stays quiet says what it waits for
RESTING_LOOKS = 6  # a plan rests when so many looks in a row find nothing: a switch takes a moment to begin
BODY_MAX_BYTES = 4 << 20  # the coordinator's document of hundreds of boxes
SHOWN_CHARACTERS = 200
RESTING_STATES = ("serving", "standby", "drained", "held-down")  # a held-down box comes back later, by itself


@dataclass(frozen=True)
class Expected:
    """What is waited for; other boxes may be as they are.

    Attributes:
        places: box → states that it may be in. heard: boxes whose pulse the coordinator hears.
    """

    places: Mapping[str, Collection[str]]
    heard: Collection[str] = ()


@dataclass(frozen=True)
class HealthTarget:
    """Where `/health` is asked for.

    Attributes:
        host, port: of the gateway or the coordinator. server_name: that its certificate must carry.
        ca: certificate file of the site CA. certificate, key: of the operator.
        api_key: sent as bearer token; the coordinator looks at the certificate alone.
    """

    host: str
    port: int
    server_name: str
    ca: Path
    certificate: Path
    key: Path
    api_key: str


def wait_until_ready(target: HealthTarget, *, seconds: float, report: Callable[[str], None]) -> str | None:
    """Ask the gateway until the answer is 200.

    Args:
        seconds: longest wait.
        report: takes a line whenever QUIET_SECONDS passed without an end.

    Returns:
        None once ready, otherwise the last answer in words.
    """
    context = _context(target)

    def look() -> str | None:
        status, body = _get(target, context, "/health")
        return None if status == http.HTTPStatus.OK else f"{status}: {_reason(body)[:SHOWN_CHARACTERS]}"

    return _wait(look, "the gateway to be ready", looks=1, seconds=seconds, report=report)


def ask_site(target: HealthTarget) -> dict[str, Any] | None:
    """The coordinator's `/v1/site`; None if it does not answer with one."""
    status, body = _get(target, _context(target), "/v1/site")
    try:
        document = json.loads(body) if status == http.HTTPStatus.OK else None
    except ValueError:
        return None
    return document if isinstance(document, dict) else None


def wait_until_spread(
    target: HealthTarget,
    *,
    seconds: float,
    report: Callable[[str], None],
    expected: Expected | None = None,
    pause: Callable[[float], None] = time.sleep,
) -> str | None:
    """Ask the coordinator until no plan changes and every box has its place.

    Args:
        seconds: longest wait. report: as for `wait_until_ready`.
        expected: what of the boxes is waited for; None: every one has a place.
        pause: sleeps between two questions; what it raises ends the wait.

    Returns:
        None once the plans rest, otherwise what still moves.
    """
    context = _context(target)

    def look() -> str | None:
        status, body = _get(target, context, "/v1/site")
        return (
            moving(body, expected) if status == http.HTTPStatus.OK else f"{status}: {_reason(body)[:SHOWN_CHARACTERS]}"
        )

    what = "the plan to be spread over the boxes"
    return _wait(look, what, looks=RESTING_LOOKS, seconds=seconds, report=report, pause=pause)


def moving(body: str, expected: Expected | None = None) -> str | None:
    """What still changes at a site, by the coordinator's `/v1/site`; None if nothing. Pure."""
    try:
        document = json.loads(body)
    except ValueError:
        return "the coordinator's answer is no JSON"
    pipelines, boxes = entries(document, "pipelines"), entries(document, "boxes")
    for name, entry in pipelines.items():
        switching = entry.get("switching")
        if isinstance(switching, dict):
            return f"pipeline {name} switches to epoch {switching.get('epoch')}"
        if entry.get("draining") is not None:
            return f"pipeline {name} finishes what is open under epoch {entry['draining']}"
    wanted = expected or Expected(dict.fromkeys(boxes, RESTING_STATES))
    for name, states in wanted.places.items():
        state = boxes[name].get("state") if name in boxes else "unknown"
        if state not in states:
            return f"{name} is {state}"
    for name in wanted.heard:
        if boxes.get(name, {}).get("heartbeat") is None:
            return f"{name} is not heard"
    return None


def entries(document: object, key: str) -> dict[str, dict[str, Any]]:
    """The objects below a key of `/v1/site`, by name; what is no object is left out."""
    value = document.get(key) if isinstance(document, dict) else None
    found = value if isinstance(value, dict) else {}
    return {name: entry for name, entry in found.items() if isinstance(entry, dict)}


def _wait(
    look: Callable[[], str | None],
    what: str,
    *,
    looks: int,
    seconds: float,
    report: Callable[[str], None],
    pause: Callable[[float], None] = time.sleep,
) -> str | None:
    """Look until nothing is missing in so many looks one after the other; the last reason when the time is up."""
    start = told = time.monotonic()
    good = 0
    while True:
        reason = look()
        now = time.monotonic()
        good = good + 1 if reason is None else 0
        if good >= looks:
            return None
        if now - start >= seconds:
            return reason
        if reason is not None and now - told >= QUIET_SECONDS:
            told = now
            report(f"waiting for {what}, {now - start:.0f} of {seconds:.0f} s: {reason}")
        pause(PAUSE_SECONDS)


def _context(target: HealthTarget) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.load_verify_locations(target.ca)
    context.load_cert_chain(target.certificate, target.key)
    return context


def _get(target: HealthTarget, context: ssl.SSLContext, path: str) -> tuple[int | str, str]:
    """One question: status and body; the kind of trouble and its text if nobody answers."""
    connection = http.client.HTTPConnection(target.host, target.port, timeout=REQUEST_SECONDS)
    try:
        # HTTPSConnection would check the certificate against the address instead of the box's name
        plain = socket.create_connection((target.host, target.port), timeout=REQUEST_SECONDS)
        with plain:
            connection.sock = context.wrap_socket(plain, server_hostname=target.server_name)
            connection.request("GET", path, headers={"Authorization": f"Bearer {target.api_key}"})
            answer = connection.getresponse()
            return answer.status, answer.read(BODY_MAX_BYTES).decode("utf-8", "replace")
    except (OSError, http.client.HTTPException) as error:
        return type(error).__name__, str(error)
    finally:
        connection.close()


def _reason(body: str) -> str:
    """What the gateway says is missing; the body as it is if it says so in another way."""
    try:
        data = json.loads(body)
    except ValueError:
        return body.strip()
    return str(data.get("reason") or body) if isinstance(data, dict) else body
