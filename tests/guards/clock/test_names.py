from __future__ import annotations

import socket
import threading

import pytest

from guards.clock.names import Endpoint, Names


def test_addresses_need_no_lookup() -> None:
    found = Names(123, 600).endpoints(["192.0.2.1", "2001:db8::1"], 5)
    assert found["192.0.2.1"] == Endpoint(socket.AF_INET, ("192.0.2.1", 123))
    assert found["2001:db8::1"] == Endpoint(socket.AF_INET6, ("2001:db8::1", 123, 0, 0))


def test_a_name() -> None:
    found = Names(123, 600).endpoints(["localhost"], 5)["localhost"]
    assert isinstance(found, Endpoint) and found.address[0] in ("127.0.0.1", "::1")


@pytest.mark.parametrize("host", ["no.such.name.invalid", "x" * 70 + ".example", "a..b", "zeit.übung"])
def test_names_without_an_address(host: str) -> None:
    assert "its name can't be looked up" in str(Names(123, 600).endpoints([host], 5)[host])


def test_a_lookup_that_hangs_is_not_waited_for_and_not_begun_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    released = threading.Event()
    begun: list[bytes] = []
    real = socket.getaddrinfo

    def hanging(host: bytes, port: int, type: int, flags: int) -> object:
        if flags:
            return real(host, port, type=type, flags=flags)
        begun.append(host)
        released.wait(30)
        return real("192.0.2.7", port, type=type)

    monkeypatch.setattr(socket, "getaddrinfo", hanging)
    names = Names(123, 600)
    assert names.endpoints(["ntp.example", "192.0.2.1"], 0.05)["ntp.example"] == "its name takes too long to look up"
    assert isinstance(names.endpoints(["ntp.example"], 0.05)["ntp.example"], str)
    released.set()
    assert names.endpoints(["ntp.example"], 5)["ntp.example"] == Endpoint(socket.AF_INET, ("192.0.2.7", 123))
    assert begun == [b"ntp.example"]


def test_an_endpoint_is_kept_when_its_name_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds, answers = [0.0], [("192.0.2.7", 123)]
    real = socket.getaddrinfo

    def lookup(host: bytes, port: int, type: int, flags: int) -> object:
        if flags:
            return real(host, port, type=type, flags=flags)
        if not answers:
            raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")
        return [(socket.AF_INET, socket.SOCK_DGRAM, 17, "", answers.pop())]

    monkeypatch.setattr(socket, "getaddrinfo", lookup)
    names = Names(123, 600, monotonic=lambda: seconds[0])
    known = names.endpoints(["ntp.example"], 5)["ntp.example"]
    seconds[0] = 700.0
    assert names.endpoints(["ntp.example"], 5)["ntp.example"] == known == Endpoint(socket.AF_INET, ("192.0.2.7", 123))
