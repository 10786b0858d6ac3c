"""The stage of this box, over its admin socket: how it stands, and the limits that guards set."""

from __future__ import annotations

import contextlib
import json
import socket
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from guards.guard import ActionFailed

MOST_ANSWER_BYTES = 1024 * 1024
ANSWER_SECONDS = 5.0
PEER_CREDENTIALS = struct.Struct("iII")  # struct ucred of unix(7): process, user, group


class StageSilent(Exception):
    """The stage did not answer, or not sensibly; the message says why."""


class StageClient:
    """Asks a stage. Every call opens a connection of its own, so a restart of the stage needs no care.

    Args:
        path: its admin socket.
        answer_seconds: it must have answered by then.
    """

    def __init__(self, path: Path, answer_seconds: float = ANSWER_SECONDS) -> None:
        self._path = path
        self._answer_seconds = answer_seconds

    def health(self) -> Mapping[str, Any] | None:
        """Its health document; None if it does not answer."""
        try:
            return self.ask({"op": "health"})
        except StageSilent:
            return None

    def pid(self) -> int | None:
        """Of the process that listens there, None if none does; the kernel tells, so one that hangs is found too."""
        try:
            with contextlib.closing(self._connect()) as connection:
                credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, PEER_CREDENTIALS.size)
        except OSError:
            return None
        return int(PEER_CREDENTIALS.unpack(credentials)[0]) or None

    def limit_batch(self, sequences: int) -> None:
        """Sequences that it allows in one micro-batch; ActionFailed if it does not obey."""
        self._order({"op": "batch-limit", "sequences": sequences})

    def limit_duty(self, percent: float) -> None:
        """Share of the time that it computes at most; ActionFailed if it does not obey."""
        self._order({"op": "duty-limit", "percent": percent})

    def trim(self) -> int:
        """Give freed memory back to the kernel; the bytes that became free. ActionFailed if it does not obey."""
        return int(self._order({"op": "trim"}).get("freed_bytes", 0))

    def shed_sequences(self, shedding: bool) -> None:
        """Take no new sequences, or take them again; ActionFailed if it does not obey."""
        self._order({"op": "shed", "shedding": shedding})

    def tell(self, state: str, temperature_celsius: float | None) -> None:
        """How the box stands, for the stage's heartbeats; ActionFailed if it does not take it."""
        self._order({"op": "guards", "state": state, "temperature_celsius": temperature_celsius})

    def ask(self, request: Mapping[str, Any]) -> Mapping[str, Any]:
        """One request, one answer.

        Raises:
            StageSilent: see there.
        """
        data = b""
        try:
            with contextlib.closing(self._connect()) as connection:
                connection.sendall(json.dumps(request).encode() + b"\n")
                while not data.endswith(b"\n"):
                    part = connection.recv(65536)
                    if not part or len(data) > MOST_ANSWER_BYTES:
                        break
                    data += part
            answer = json.loads(data)
        except OSError as error:
            raise StageSilent(f"{self._path.name}: {error.strerror or error}") from None
        except (ValueError, RecursionError) as error:
            raise StageSilent(f"{self._path.name}: {error}") from None
        if not isinstance(answer, dict):
            raise StageSilent(f"{self._path.name}: the answer is no JSON object")
        return answer

    def _connect(self) -> socket.socket:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connection.settimeout(self._answer_seconds)
            connection.connect(str(self._path))
        except BaseException:
            connection.close()
            raise
        return connection

    def _order(self, request: Mapping[str, Any]) -> Mapping[str, Any]:
        try:
            answer = self.ask(request)
        except StageSilent as error:
            raise ActionFailed(str(error)) from None
        if "error" in answer:
            raise ActionFailed(f"the stage refuses {request['op']}: {str(answer['error'])[:200]}")
        return answer


class NoStage:
    """On a box without a stage: there is nothing to ask and nobody to obey."""

    def health(self) -> Mapping[str, Any] | None:
        """None."""
        return None

    def pid(self) -> int | None:
        """None."""
        return None

    def limit_batch(self, sequences: int) -> None:
        """ActionFailed."""
        raise ActionFailed(f"no stage runs here that could compute {sequences} sequences at once")

    def limit_duty(self, percent: float) -> None:
        """ActionFailed."""
        raise ActionFailed(f"no stage runs here that could compute {percent:g} % of the time")

    def trim(self) -> int:
        """ActionFailed."""
        raise ActionFailed("no stage runs here that could give memory back")

    def shed_sequences(self, shedding: bool) -> None:
        """ActionFailed."""
        raise ActionFailed(f"no stage runs here that could {'refuse' if shedding else 'take'} sequences")
