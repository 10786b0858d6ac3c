"""A program's admin socket: one JSON object a line in, one a line out. No answer can hurt whoever asks."""

from __future__ import annotations

import contextlib
import json
import math
import socket
import struct
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ANSWER_SECONDS = 5.0
LEAST_WAIT_SECONDS = 0.001  # 0 would mean not to wait at all
MOST_ANSWER_BYTES = 1024 * 1024
LARGEST_NUMBER = 2**63  # of bytes, tokens or anything else that a program counts
PEER_CREDENTIALS = struct.Struct("iII")  # struct ucred of unix(7): process, user, group


class Silent(Exception):
    """The program did not answer, or not sensibly; the message says why."""


class AdminSocket:
    """Asks a program. Every call opens a connection of its own, so a restart of the program needs no care.

    Args:
        path: of the socket.
        answer_seconds: the whole answer must have come by then, however it is dripped.
    """

    def __init__(self, path: Path, answer_seconds: float = ANSWER_SECONDS) -> None:
        self._path, self._answer_seconds = path, answer_seconds

    def pid(self) -> int | None:
        """Of the process that listens there, None if none does; the kernel tells, so one that hangs is found too."""
        try:
            with contextlib.closing(self._connect()) as connection:
                return _peer(connection) or None
        except OSError:
            return None

    def ask(self, request: Mapping[str, Any], pid: int | None = None) -> Mapping[str, Any]:
        """One request, one answer. Numbers in it that are none (NaN, infinite) or beyond 2^63 are None.

        Args:
            pid: only this process may answer; None: any.

        Raises:
            Silent: see there.
        """
        try:
            data = self._exchange(request, pid)
            answer = json.loads(data, parse_constant=_real, parse_float=_real, parse_int=_whole)
        except OSError as error:
            raise Silent(f"{self._path.name}: {error.strerror or error}") from None
        except (ValueError, RecursionError) as error:
            raise Silent(f"{self._path.name}: {error}") from None
        if not isinstance(answer, dict):
            raise Silent(f"{self._path.name}: the answer is no JSON object")
        return answer

    def _exchange(self, request: Mapping[str, Any], pid: int | None) -> bytes:
        end = time.monotonic() + self._answer_seconds
        data = bytearray()
        with contextlib.closing(self._connect()) as connection:
            if pid is not None and (answering := _peer(connection)) != pid:
                # one that a program left behind says nothing about the one that supervisord started
                raise ValueError(f"process {answering} answers instead of {pid}")
            connection.sendall(json.dumps(request).encode() + b"\n")
            while not data.endswith(b"\n"):
                connection.settimeout(max(LEAST_WAIT_SECONDS, end - time.monotonic()))
                part = connection.recv(65536)
                if not part:
                    break
                data += part
                if len(data) > MOST_ANSWER_BYTES:
                    raise ValueError(f"the answer is longer than {MOST_ANSWER_BYTES} bytes")
                if time.monotonic() > end:
                    raise TimeoutError("timed out")
        return bytes(data)

    def _connect(self) -> socket.socket:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connection.settimeout(self._answer_seconds)
            connection.connect(str(self._path))
        except BaseException:
            connection.close()
            raise
        return connection


def _peer(connection: socket.socket) -> int:
    """The process at the other end; 0 if it is in another namespace."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, PEER_CREDENTIALS.size)
    return int(PEER_CREDENTIALS.unpack(credentials)[0])


def _real(text: str) -> float | None:
    number = float(text)
    return number if math.isfinite(number) else None


def _whole(text: str) -> int | None:
    number = int(text)  # a ValueError beyond 4300 digits: then the whole answer is nonsense
    return number if abs(number) <= LARGEST_NUMBER else None
