"""Over real sockets."""

from __future__ import annotations

import socket
import time
from dataclasses import replace

import pytest

from guards.clock.sntp import TimeServers
from guards.settings import ClockSettings
from tests.guards.clock.helpers import BUILT, LIMITS, Reply, TimeServer, honest, serving

SETTINGS = replace(ClockSettings(), query_seconds=0.4)
PATIENT = replace(ClockSettings(), query_seconds=5.0)


@pytest.fixture(autouse=True)
def _the_clock_of_this_machine_is_within_the_limits() -> None:
    assert LIMITS.sane(time.time())


def test_two_servers_at_once() -> None:
    one, two = TimeServer("127.0.0.1", honest()), TimeServer("127.0.0.2", honest(5.0))
    with serving(one, two) as port:
        reading = TimeServers(["127.0.0.1", "127.0.0.2"], PATIENT, LIMITS, port=port).ask()
    assert reading.failures == ()
    offsets = {answer.server: answer for answer in reading.answers}
    assert abs(offsets["127.0.0.1"].offset_seconds) <= offsets["127.0.0.1"].uncertainty_seconds + 1e-5
    behind = offsets["127.0.0.2"]
    assert abs(behind.offset_seconds + 5.0) <= behind.uncertainty_seconds + 1e-5
    assert len(one.requests) == len(two.requests) == 1


def test_a_silent_server_costs_its_own_deadline_only() -> None:
    with serving(TimeServer("127.0.0.1", honest()), TimeServer("127.0.0.2", lambda _: [])) as port:
        reading = TimeServers(["127.0.0.2", "127.0.0.1"], SETTINGS, LIMITS, port=port).ask()
    assert [answer.server for answer in reading.answers] == ["127.0.0.1"]
    assert reading.failures == (("127.0.0.2", "did not answer within 0.4 s"),)


def test_nobody_at_the_port_is_told_at_once() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
    reading = TimeServers(["127.0.0.1"], PATIENT, LIMITS, port=port).ask()
    assert reading.answers == () and reading.failures[0][1] == "can't be reached: Connection refused"


def test_forged_and_old_answers_are_passed_over() -> None:
    def answer(request: bytes) -> list[bytes]:
        now = time.time()
        forged = Reply(now + 3600, now + 3600)
        return [b"", b"short", forged.packed(b"8 others"), *honest()(request), forged.packed(request[40:48])]

    with serving(TimeServer("127.0.0.1", answer)) as port:
        reading = TimeServers(["127.0.0.1"], PATIENT, LIMITS, port=port).ask()
    assert len(reading.answers) == 1 and abs(reading.answers[0].offset_seconds) < 1


def test_a_server_that_asks_to_be_left_alone_is_for_so_long() -> None:
    seconds = [1000.0]
    server = TimeServer("127.0.0.1", honest(stratum=0, leap=3, reference=b"RATE"))
    with serving(server) as port:
        servers = TimeServers(["127.0.0.1"], PATIENT, LIMITS, port=port, monotonic=lambda: seconds[0])
        first = servers.ask()
        server.answer = honest()
        second = servers.ask()
        seconds[0] += PATIENT.kiss_seconds
        third = servers.ask()
    assert first == second and first.failures == (("127.0.0.1", "asks to be left alone (RATE)"),)
    assert len(server.requests) == 2 and len(third.answers) == 1 and not third.failures


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (honest(leap=3), "not synchronised"),
        (honest(stratum=16), "not synchronised"),
        (honest(root_dispersion=100.0), "may be off by"),
        (lambda request: [Reply(0, 0).packed(request[40:48])], "without timestamps"),
        (honest(BUILT - 2 * time.time()), "time that can't be"),
    ],
)
def test_servers_that_do_not_know_the_time(answer: object, reason: str) -> None:
    with serving(TimeServer("127.0.0.1", answer)) as port:  # type: ignore[arg-type]
        reading = TimeServers(["127.0.0.1"], PATIENT, LIMITS, port=port).ask()
    assert reading.answers == () and reason in reading.failures[0][1]


def test_a_name_and_a_repeated_server() -> None:
    server = TimeServer("127.0.0.1", honest())
    with serving(server) as port:
        reading = TimeServers(["127.0.0.1", "127.0.0.1", "no.such.name.invalid"], PATIENT, LIMITS, port=port).ask()
    assert len(reading.answers) == len(server.requests) == 1
    assert reading.failures[0][0] == "no.such.name.invalid" and "name" in reading.failures[0][1]


def test_a_box_in_1970_finds_out_how_far_it_is_behind() -> None:
    with serving(TimeServer("127.0.0.1", honest())) as port:
        reading = TimeServers(["127.0.0.1"], PATIENT, LIMITS, port=port, wall=lambda: 12.0).ask()
    assert reading.answers[0].offset_seconds == pytest.approx(12.0 - time.time(), abs=60)


def test_without_file_descriptors_left_nothing_is_raised() -> None:
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with serving(TimeServer("127.0.0.1", honest())) as port:
        servers = TimeServers(["127.0.0.1"], PATIENT, LIMITS, port=port)
        assert len(servers.ask().answers) == 1
        resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
        try:
            reading = servers.ask()
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert reading.answers == () and "Too many open files" in reading.failures[0][1]


def test_no_sockets_are_left_open() -> None:
    import psutil

    process = psutil.Process()
    before = process.num_fds()
    with serving(TimeServer("127.0.0.1", lambda _: []), TimeServer("127.0.0.2", honest())) as port:
        servers = TimeServers(["127.0.0.1", "127.0.0.2"], replace(SETTINGS, query_seconds=0.05), LIMITS, port=port)
        for _ in range(5):
            servers.ask()
    assert process.num_fds() == before
