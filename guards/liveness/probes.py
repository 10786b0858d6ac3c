"""How programs are asked whether they live: over an admin socket, or by HTTP."""

from __future__ import annotations

import contextlib
import re
import socket
import ssl
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from guards.admin_socket import ANSWER_SECONDS, AdminSocket, Silent

OK = 200
REQUEST = b"GET /livez HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
STATUS_LINE = re.compile(rb"HTTP/1\.[01] (\d{3})[ \r\n]")  # RFC 9112, section 4
MOST_LINE_BYTES = 4096


class AdminSocketProbe:
    """A stage's admin socket; its health document tells state, work and progress.

    Args:
        path: of the socket.
        answer_seconds: the whole answer must have come by then.
    """

    def __init__(self, path: Path, answer_seconds: float = ANSWER_SECONDS) -> None:
        self._socket = AdminSocket(path, answer_seconds)

    def ask(self, pid: int) -> Mapping[str, Any]:
        """See `guards.liveness.looks.Probe`."""
        try:
            return self._socket.ask({"op": "health"}, pid)
        except Silent as error:
            return {"error": str(error)}


class HttpProbe:
    """`GET /livez` of a coordinator, gateway or other program; 200 is an answer, whatever it says.

    Args:
        host, port: on this box. tls: it speaks HTTPS. Its certificate is not judged: no secret is sent, the box asks
            itself, and a certificate that has expired must not look like a hang.
        answer_seconds: connection, handshake and first line of the answer must each have come by then, however it is
            dripped.
    """

    def __init__(self, host: str, port: int, *, tls: bool, answer_seconds: float) -> None:
        self._host, self._port, self._answer_seconds = host, port, answer_seconds
        self._context: ssl.SSLContext | None = None
        if tls:
            self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            self._context.check_hostname = False
            self._context.verify_mode = ssl.CERT_NONE

    def ask(self, pid: int) -> Mapping[str, Any]:
        """See `guards.liveness.looks.Probe`. Whose port it is can't be told over TCP; only one process can have it."""
        del pid
        try:
            line = self._first_line()
        except OSError as error:  # an ssl.SSLError is one
            return {"error": f"port {self._port}: {error.strerror or error or type(error).__name__}"}
        match = STATUS_LINE.match(line)
        if match is None:
            return {"error": f"port {self._port}: the answer is no HTTP"}
        return (
            {} if int(match.group(1)) == OK else {"error": f"port {self._port}: /livez answers {int(match.group(1))}"}
        )

    def _first_line(self) -> bytes:
        data = bytearray()
        with contextlib.ExitStack() as opened:
            connection: socket.socket = socket.create_connection((self._host, self._port), self._answer_seconds)
            opened.callback(connection.close)
            if self._context is not None:
                connection = self._context.wrap_socket(connection)
                opened.callback(connection.close)
            end = time.monotonic() + self._answer_seconds
            connection.sendall(REQUEST)
            while b"\n" not in data and len(data) < MOST_LINE_BYTES:
                left = end - time.monotonic()
                if left <= 0:
                    raise TimeoutError("timed out")
                connection.settimeout(left)
                part = connection.recv(MOST_LINE_BYTES)
                if not part:
                    break
                data += part
        return bytes(data)
