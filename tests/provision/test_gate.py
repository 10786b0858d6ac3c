"""The readiness gate, against a real TLS server with certificates of the site CA."""

from __future__ import annotations

import http.server
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from fleet.provision.rollout_gate import RESTING_LOOKS, HealthTarget, moving, wait_until_ready, wait_until_spread
from tests.provision.https import https_server

RESTING = {"pipelines": {"main": {"switching": None}}, "boxes": {"box1": {"state": "serving"}}}
SWITCHING = {**RESTING, "pipelines": {"main": {"switching": {"epoch": 2}}}}
RETURNING = {**RESTING, "boxes": {"box1": {"state": "standby"}, "box2": {"state": "returning"}}}
PLANS = (RETURNING, SWITCHING, RESTING, RETURNING, RESTING)


class Health(http.server.BaseHTTPRequestHandler):
    """503 twice, then 200, to whoever brings the right key."""

    asked: list[str]

    def do_GET(self) -> None:
        self.asked.append(self.path)
        if self.path == "/v1/site":
            site = PLANS[min(len(self.asked), len(PLANS)) - 1]
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps(site).encode())
            return
        right = self.headers["Authorization"] == "Bearer sesame"
        status = 401 if not right else 503 if len(self.asked) < 3 else 200
        self.send_response(status)
        self.end_headers()
        self.wfile.write(b'{"reason": "ring not formed"}' if status == 503 else b"{}")

    def log_message(self, format: str, *args: object) -> None:
        """Quiet."""


@pytest.fixture
def asked() -> list[str]:
    """Paths as the server was asked for them."""
    return []


@pytest.fixture
def target(tmp_path: Path, asked: list[str]) -> Iterator[HealthTarget]:
    with https_server(tmp_path, type("Handler", (Health,), {"asked": asked})) as server:
        yield server


def test_it_waits_until_the_gateway_is_ready(target: HealthTarget) -> None:
    assert wait_until_ready(target, seconds=30, report=print) is None


def test_it_gives_up_with_the_last_answer(target: HealthTarget) -> None:
    assert wait_until_ready(target, seconds=0.01, report=print) == "503: ring not formed"
    assert wait_until_ready(replace(target, api_key="wrong"), seconds=0.01, report=print) == "401: {}"


def test_another_boxs_certificate_is_not_believed(target: HealthTarget) -> None:
    other = replace(target, server_name="box1.demo.fleet.internal")
    reason = wait_until_ready(other, seconds=0.01, report=print)
    assert reason is not None
    assert "SSLCertVerificationError" in reason


def test_nobody_there(target: HealthTarget) -> None:
    reason = wait_until_ready(replace(target, port=1), seconds=0.01, report=print)
    assert reason is not None
    assert "refused" in reason


def test_it_waits_until_the_plan_rests(target: HealthTarget, asked: list[str]) -> None:
    assert wait_until_spread(target, seconds=60, report=print) is None
    assert len(asked) == len(PLANS) - 1 + RESTING_LOOKS


def test_a_plan_that_never_rests_is_named(target: HealthTarget) -> None:
    assert wait_until_spread(target, seconds=0, report=print) == "box2 is returning"


@pytest.mark.parametrize(
    ("site", "reason"),
    [
        (RESTING, None),
        (SWITCHING, "pipeline main switches to epoch 2"),
        (RETURNING, "box2 is returning"),
        ({"boxes": {"box1": {"state": "drained"}, "box2": {"state": "held-down"}}}, None),
        ({"boxes": {"box1": {"state": "dead"}}}, "box1 is dead"),
        ({"boxes": [], "pipelines": {"main": 7}}, None),
        ([], None),
    ],
)
def test_what_still_moves(site: object, reason: str | None) -> None:
    assert moving(json.dumps(site)) == reason
