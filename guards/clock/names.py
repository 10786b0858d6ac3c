"""Addresses of time servers. The C library's resolver has no deadline, so names are looked up on threads that may hang
without the guard's waiting for them."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Endpoint:
    """Where a datagram is sent: what `socket.getaddrinfo` says."""

    family: int
    address: tuple[Any, ...]


@dataclass
class _Lookup:
    """One name. Written by its thread, read once that has ended."""

    thread: threading.Thread | None = None
    found: Endpoint | None = None
    complaint: str = ""
    at_seconds: float = 0.0


class Names:
    """Endpoints by host name, kept for a while.

    Args:
        port: of all endpoints.
        kept_seconds: how long an answer is used.
        monotonic: seconds that never go back.
    """

    def __init__(self, port: int, kept_seconds: float, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._port, self._kept_seconds, self._monotonic = port, kept_seconds, monotonic
        self._lookups: dict[str, _Lookup] = {}

    def endpoints(self, hosts: Sequence[str], deadline_seconds: float) -> dict[str, Endpoint | str]:
        """Host → its endpoint, or why there is none. All names together take no longer than the deadline; a name that
        takes longer is used the next time. An endpoint that was known goes on being used while its name can't be."""
        end = self._monotonic() + deadline_seconds
        for host in hosts:
            self._begin(host)
        answers: dict[str, Endpoint | str] = {}
        for host in hosts:
            lookup = self._lookups[host]
            if lookup.thread is not None and lookup.found is None:
                lookup.thread.join(max(0.0, end - self._monotonic()))
            hung = lookup.thread is not None and lookup.thread.is_alive()
            answers[host] = lookup.found or ("its name takes too long to look up" if hung else lookup.complaint)
        return answers

    def _begin(self, host: str) -> None:
        lookup = self._lookups.setdefault(host, _Lookup())
        if lookup.thread is not None and lookup.thread.is_alive():
            return
        if lookup.found is not None and self._monotonic() - lookup.at_seconds < self._kept_seconds:
            return
        try:
            lookup.found = _first(host, self._port, socket.AI_NUMERICHOST)
        except (OSError, UnicodeError):  # no address, so a name
            thread = threading.Thread(target=self._look_up, args=(host, lookup), name="clock-name", daemon=True)
            try:
                thread.start()
            except RuntimeError as error:  # no thread to be had, as at pids.max
                lookup.complaint = f"its name can't be looked up: {error}"
            else:
                lookup.thread = thread
        else:
            lookup.at_seconds = self._monotonic()

    def _look_up(self, host: str, lookup: _Lookup) -> None:
        try:
            lookup.found = _first(host, self._port, 0)
        except (OSError, UnicodeError) as error:
            lookup.complaint = f"its name can't be looked up: {getattr(error, 'strerror', None) or error}"
        lookup.at_seconds = self._monotonic()


def _first(host: str, port: int, flags: int) -> Endpoint:
    """The first one.

    Raises:
        OSError, UnicodeError: there is none.
    """
    # as bytes: for text, Python loads its tables of international names
    name = host.encode("ascii")
    family, _, _, _, address = socket.getaddrinfo(name, port, type=socket.SOCK_DGRAM, flags=flags)[0]
    return Endpoint(family, address)
