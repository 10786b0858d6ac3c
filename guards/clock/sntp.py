"""The site's time servers, asked by SNTP. All at once, each with its own socket and deadline."""

from __future__ import annotations

import os
import selectors
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from guards.clock.limits import TimeLimits
from guards.clock.names import Endpoint, Names
from guards.clock.packet import (
    Answer,
    Exchange,
    KissOfDeath,
    ServerUnusable,
    is_answer,
    judge_answer,
    request_bytes,
)
from guards.settings import ClockSettings

NTP_PORT = 123
NONCE_BYTES = 8
MOST_ANSWER_BYTES = 1024


@dataclass(frozen=True)
class SntpReading:
    """One look at all servers.

    Attributes:
        answers: of those that said something of use.
        failures: server → why it did not.
    """

    answers: tuple[Answer, ...] = ()
    failures: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class _Asked:
    """A request on its way."""

    server: str
    connection: socket.socket
    nonce: bytes
    sent_unix_seconds: float
    sent_seconds: float  # monotonic


class TimeServers:
    """Asks; remembers which server asked to be left alone. Used by one thread at a time.

    Args:
        servers: addresses or names.
        limits: between which times the world must be.
        port: of all servers.
        wall: unix seconds.
        monotonic: seconds that never go back.
    """

    def __init__(
        self,
        servers: Sequence[str],
        settings: ClockSettings,
        limits: TimeLimits,
        *,
        port: int = NTP_PORT,
        wall: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._servers, self._settings, self._limits = tuple(dict.fromkeys(servers)), settings, limits
        self._wall, self._monotonic = wall, monotonic
        self._names = Names(port, settings.name_seconds, monotonic)
        self._left_alone: dict[str, tuple[float, str]] = {}

    def ask(self) -> SntpReading:
        """Ask every server once. Never raises, and takes at most twice `query_seconds`: for names, then for answers."""
        failures: dict[str, str] = {}
        asked = [server for server in self._servers if not self._is_left_alone(server, failures)]
        answers: list[Answer] = []
        endpoints = self._names.endpoints(asked, self._settings.query_seconds)
        try:
            with selectors.DefaultSelector() as selector:
                self._ask(selector, endpoints, answers, failures)
        except OSError as error:  # no file descriptors left
            failures |= dict.fromkeys(asked, _words(error))
        return SntpReading(tuple(answers), tuple(failures.items()))

    def _ask(
        self,
        selector: selectors.BaseSelector,
        endpoints: Mapping[str, Endpoint | str],
        answers: list[Answer],
        failures: dict[str, str],
    ) -> None:
        for server, endpoint in endpoints.items():
            if isinstance(endpoint, str):
                failures[server] = endpoint
            else:
                self._send(selector, server, endpoint, failures)
        try:
            self._collect(selector, answers, failures)
        finally:
            for silent in _under_way(selector):
                failures[silent.server] = f"did not answer within {self._settings.query_seconds:g} s"
                silent.connection.close()

    def _is_left_alone(self, server: str, failures: dict[str, str]) -> bool:
        until, reason = self._left_alone.get(server, (0.0, ""))
        if self._monotonic() < until:
            failures[server] = reason
            return True
        return False

    def _send(
        self, selector: selectors.BaseSelector, server: str, endpoint: Endpoint, failures: dict[str, str]
    ) -> None:
        nonce = os.urandom(NONCE_BYTES)
        request = request_bytes(nonce)
        try:
            connection = socket.socket(endpoint.family, socket.SOCK_DGRAM)
        except OSError as error:
            failures[server] = _words(error)
            return
        try:
            connection.setblocking(False)
            connection.connect(endpoint.address)  # so that the kernel drops what others send
            asked = _Asked(server, connection, nonce, self._wall(), self._monotonic())
            connection.send(request)
            selector.register(connection, selectors.EVENT_READ, asked)
        except OSError as error:
            failures[server] = _words(error)
            connection.close()

    def _collect(self, selector: selectors.BaseSelector, answers: list[Answer], failures: dict[str, str]) -> None:
        """Until all have answered or their deadlines are over."""
        while under_way := _under_way(selector):
            latest = max(asked.sent_seconds for asked in under_way)
            left_seconds = latest + self._settings.query_seconds - self._monotonic()
            if left_seconds <= 0:
                return
            for key, _ in selector.select(left_seconds):
                asked: _Asked = key.data
                if self._receive(asked, self._monotonic(), answers, failures):
                    selector.unregister(asked.connection)
                    asked.connection.close()

    def _receive(self, asked: _Asked, received_seconds: float, answers: list[Answer], failures: dict[str, str]) -> bool:
        """Whether the server is done with."""
        server = asked.server
        try:
            data = asked.connection.recv(MOST_ANSWER_BYTES)
            if not is_answer(data, asked.nonce):
                return False
            exchange = Exchange(server, asked.sent_unix_seconds, received_seconds - asked.sent_seconds)
            answers.append(judge_answer(data, exchange, self._limits, self._settings))
        except KissOfDeath as error:
            self._left_alone[server] = (received_seconds + self._settings.kiss_seconds, str(error))
            failures[server] = str(error)
        except ServerUnusable as error:
            failures[server] = str(error)
        except BlockingIOError:  # what had arrived was dropped, e.g. for its checksum
            return False
        except OSError as error:
            failures[server] = _words(error)
        return True


def _under_way(selector: selectors.BaseSelector) -> tuple[_Asked, ...]:
    return tuple(key.data for key in selector.get_map().values())


def _words(error: OSError) -> str:
    return f"can't be reached: {error.strerror or error}"
