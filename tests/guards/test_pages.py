"""The guards' port: who may read what, what a scrape gets, and what strangers can't do."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import ssl
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from guards.board import Board
from guards.findings import Action, Finding, Repair, State
from guards.http import CONNECTIONS_AT_ONCE, GuardsServer, json_page, metrics_page
from guards.metrics import BoardCollector, render
from guards.settings import GuardSettings
from guards.status import status_document
from stage_runtime.link.tls import TlsIdentity
from tests.stage_runtime.pki import SiteCa


def a_board() -> Board:
    board = Board(["thermal", "clock"], lambda: 12.0, wall=lambda: 1_800_000_000.0, monotonic=lambda: 50.0)
    findings = (
        Finding("soc", State.DEGRADED, "83 °C", {"temperature_celsius": 83.5, "zone": "cpu-thermal", "step": 2}),
        Finding("gpu", State.DEGRADED, "can't be read", {"temperature_celsius": None}, Repair.CHECK_SENSOR),
        Finding("npu", State.UNSUPPORTED),
    )
    board.round_ended("thermal", findings, 0.25)
    board.acted("thermal", "done", Action(Repair.LIMIT_BATCH, "stage", "83 °C"), "4 sequences")
    return board


class Site:
    """Two site CAs and a server."""

    def __init__(self, directory: Path) -> None:
        self.ca = SiteCa(directory / "ca", "site")
        self.other = SiteCa(directory / "other", "site")
        self.board = a_board()
        collector = BoardCollector(
            self.board,
            lambda: {"restart-stage": 3},
            trouble=lambda: "a write hangs",
            write_seconds=lambda: 7.5,
            monotonic=lambda: 51.5,
        )

        def broken() -> tuple[bool, dict[str, object]]:
            raise KeyError("a mistake")

        pages = {
            "/metrics": metrics_page(lambda: render(collector)),
            "/health": json_page(lambda: (False, {"state": "unhealthy"})),
            "/broken": json_page(broken),
        }
        self.server = GuardsServer("127.0.0.1", 0, self.ca.issue("box1"), "site", pages)
        self.server.start()

    def context(self, identity: TlsIdentity | None) -> ssl.SSLContext:
        if identity is not None:
            return identity.client_context()
        context = ssl.create_default_context(cafile=str(self.ca.path))
        context.verify_flags &= ~ssl.VERIFY_X509_STRICT
        return context

    def get(self, path: str, identity: TlsIdentity | None, method: str = "GET") -> tuple[int, bytes]:
        connection = http.client.HTTPSConnection(
            "localhost", self.server.port, context=self.context(identity), timeout=10
        )
        try:
            connection.request(method, path)
            answer = connection.getresponse()
            return answer.status, answer.read()
        finally:
            connection.close()


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    made = Site(tmp_path)
    yield made
    made.server.close()


def test_a_stranger_sees_that_it_lives_and_nothing_else(site: Site) -> None:
    assert site.get("/livez", None) == (200, b"ok\n")
    for path in ("/metrics", "/health", "/v1/guards", "/nothing"):
        assert site.get(path, None)[0] == 403


def test_certificates_of_others_are_refused(site: Site) -> None:
    another_site = site.ca.issue("box1", site="elsewhere")
    assert site.get("/metrics", another_site)[0] == 403
    foreign = site.other.issue("box1")
    with pytest.raises(OSError):
        foreign_context = foreign.client_context()
        foreign_context.load_verify_locations(site.ca.path)
        with (
            socket.create_connection(("127.0.0.1", site.server.port), 10) as plain,
            foreign_context.wrap_socket(plain, server_hostname="localhost") as connection,
        ):
            connection.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
            if connection.recv(100) == b"":
                raise OSError("closed")


def test_pages_for_the_site(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    operator = site.ca.issue("operator")
    assert site.get("/health?x=1", operator) == (503, b'{"state": "unhealthy"}\n')
    assert site.get("/nothing", operator)[0] == 404
    assert site.get("/metrics", operator, "POST")[0] == 501
    assert site.get("/broken", operator) == (500, b'{"reason": "see the guards\' log"}\n')
    assert "a mistake" in caplog.text


def test_a_scrape(site: Site) -> None:
    status, body = site.get("/metrics", site.ca.issue("control"))
    assert status == 200
    samples = {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(body.decode())
        for sample in family.samples
    }
    assert samples["fleet_guard_temperature_celsius", "thermal", "soc"] == 83.5
    assert ("fleet_guard_temperature_celsius", "thermal", "gpu") not in samples  # unknown is absent, never a number
    assert not [key for key in samples if "zone" in key[0] or "step" in key[0]]
    assert samples["fleet_guard_supported", "thermal", "npu"] == 0
    assert samples["fleet_guard_state_flag", "thermal", "degraded"] == 1
    assert samples["fleet_guard_state_flag", "clock", "initialising"] == 1
    assert samples["fleet_guard_events_total", "thermal", "done"] == 1
    assert samples["fleet_guard_events_total", "clock", "crash"] == 0  # there from the start
    assert samples["fleet_guard_rounds_total", "clock"] == 0
    assert samples["fleet_guard_age_seconds", "thermal"] == 1.5
    assert samples["fleet_guard_budget_left_number", "restart-stage"] == 3
    assert samples["fleet_guard_store_trouble_flag",] == 1
    assert samples["fleet_guard_store_write_seconds",] == 7.5


def test_silent_strangers_keep_nobody_out(site: Site) -> None:
    strangers = [socket.create_connection(("127.0.0.1", site.server.port), 10) for _ in range(3 * CONNECTIONS_AT_ONCE)]
    try:
        assert site.get("/health", site.ca.issue("operator"))[0] == 503
        end, closed = time.monotonic() + 10, 0
        while closed < CONNECTIONS_AT_ONCE:
            assert time.monotonic() < end, f"{closed} of {len(strangers)} closed"
            closed = sum(_ended(stranger) for stranger in strangers)
    finally:
        for stranger in strangers:
            stranger.close()


def _ended(connection: socket.socket) -> bool:
    connection.setblocking(False)
    try:
        return connection.recv(1) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True


@pytest.mark.parametrize("data", [b"\x16\x03\x01" + b"\xff" * 400, b"GET / HTTP/1.1\r\n\r\n", b""])
def test_what_is_no_tls_ends_its_connection_only(site: Site, data: bytes) -> None:
    with socket.create_connection(("127.0.0.1", site.server.port), 10) as connection:
        connection.sendall(data)
        with contextlib.suppress(OSError):  # the server may have ended the connection already
            connection.shutdown(socket.SHUT_WR)
            while connection.recv(1000):
                pass
    assert site.get("/livez", None)[0] == 200


def test_the_status_document_is_json_with_all_that_is_known() -> None:
    board = a_board()
    document = json.loads(
        json.dumps(
            status_document(
                site="site",
                box="box1",
                observe=True,
                settings=GuardSettings(),
                standings=board.standings(),
                events=board.events(),
                budgets_left={"restart-stage": 3},
                trouble="",
                monotonic_seconds=53.0,
            )
        )
    )
    assert document["schema"] == 1
    assert document["settings"]["thermal"]["high_celsius"] == 80.0
    assert document["guards"]["thermal"]["age_seconds"] == 3.0
    assert document["guards"]["clock"] == {
        "state": "initialising",
        "rounds": 0,
        "round_seconds": 0.0,
        "age_seconds": None,
        "findings": [],
    }
    assert document["guards"]["thermal"]["findings"][1]["evidence"] == {"temperature_celsius": None}
    assert document["events"][-1]["text"] == "limit-batch stage: 4 sequences (83 °C)"
