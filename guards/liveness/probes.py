"""How programs are asked whether they live: over an admin socket, or by HTTP."""

from __future__ import annotations

import http.client
import json
import socket
import ssl
import struct
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

OK = 200
REQUEST = b'{"op":"health"}\n'
ANSWER_SECONDS = 5.0
LEAST_WAIT_SECONDS = 0.001  # 0 would mean not to wait at all
MOST_ANSWER_BYTES = 1024 * 1024
PEER_CREDENTIALS = struct.Struct("iII")  # struct ucred of unix(7): process, user, group


class AdminSocketProbe:
    """A stage's admin socket; its health document tells state, work and progress.

    Args:
        path: of the socket.
        answer_seconds: the whole answer must have come by then.
    """

    def __init__(self, path: Path, answer_seconds: float = ANSWER_SECONDS) -> None:
        self._path, self._answer_seconds = path, answer_seconds

    def ask(self, pid: int) -> Mapping[str, Any]:
        """See `guards.liveness.looks.Probe`."""
        try:
            answer = json.loads(self._exchange(pid))
        except OSError as error:
            return {"error": f"{self._path.name}: {error.strerror or error}"}
        except (ValueError, RecursionError) as error:
            return {"error": f"{self._path.name}: {error}"}
        return answer if isinstance(answer, dict) else {"error": f"{self._path.name}: the answer is no JSON object"}

    def _exchange(self, pid: int) -> bytes:
        end = time.monotonic() + self._answer_seconds
        data = b""
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(self._answer_seconds)
            connection.connect(str(self._path))
            peer = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, PEER_CREDENTIALS.size)
            answering = PEER_CREDENTIALS.unpack(peer)[0]
            if answering != pid:
                # one that a program left behind says nothing about the one that supervisord started
                raise ValueError(f"process {answering} answers instead of {pid}")
            connection.sendall(REQUEST)
            while not data.endswith(b"\n") and len(data) < MOST_ANSWER_BYTES:
                connection.settimeout(max(LEAST_WAIT_SECONDS, end - time.monotonic()))
                part = connection.recv(65536)
                if not part:
                    break
                data += part
                if time.monotonic() > end:
                    raise TimeoutError("timed out")
        return data


class HttpProbe:
    """`GET /livez` of a coordinator, gateway or other program; 200 is an answer, whatever it says.

    Args:
        host, port: on this box. tls: it speaks HTTPS. Its certificate is not judged: no secret is sent, the box asks
            itself, and a certificate that has expired must not look like a hang.
        answer_seconds: each step of the answer must have come by then.
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
        connection = self._connection()
        try:
            connection.request("GET", "/livez", headers={"Connection": "close"})
            status = connection.getresponse().status
        except (OSError, http.client.HTTPException) as error:
            return {"error": f"port {self._port}: {getattr(error, 'strerror', None) or error or type(error).__name__}"}
        finally:
            connection.close()
        return {} if status == OK else {"error": f"port {self._port}: /livez answers {status}"}

    def _connection(self) -> http.client.HTTPConnection:
        if self._context is None:
            return http.client.HTTPConnection(self._host, self._port, timeout=self._answer_seconds)
        return http.client.HTTPSConnection(self._host, self._port, timeout=self._answer_seconds, context=self._context)
