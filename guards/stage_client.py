"""The stage of this box, over its admin socket: how it stands, and the limits that guards set."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from guards.admin_socket import ANSWER_SECONDS, AdminSocket, Silent
from guards.guard import ActionFailed


class StageClient:
    """Asks a stage.

    Args:
        path: its admin socket.
        answer_seconds: it must have answered by then.
    """

    def __init__(self, path: Path, answer_seconds: float = ANSWER_SECONDS) -> None:
        self._socket = AdminSocket(path, answer_seconds)

    def health(self) -> Mapping[str, Any] | None:
        """Its health document; None if it does not answer."""
        try:
            return self._socket.ask({"op": "health"})
        except Silent:
            return None

    def pid(self) -> int | None:
        """See `AdminSocket.pid`."""
        return self._socket.pid()

    def limit_batch(self, sequences: int) -> None:
        """Sequences that it allows in one micro-batch; ActionFailed if it does not obey."""
        self._order({"op": "batch-limit", "sequences": sequences})

    def limit_duty(self, percent: float) -> None:
        """Share of the time that it computes at most; ActionFailed if it does not obey."""
        self._order({"op": "duty-limit", "percent": percent})

    def trim(self) -> int:
        """Give freed memory back to the kernel; the bytes that became free. ActionFailed if it does not obey."""
        freed = self._order({"op": "trim"}).get("freed_bytes")
        if not isinstance(freed, int):
            raise ActionFailed(f"the stage trimmed, but tells no bytes: {str(freed)[:80]!r}")
        return freed

    def shed_sequences(self, shedding: bool) -> None:
        """Take no new sequences, or take them again; ActionFailed if it does not obey."""
        self._order({"op": "shed", "shedding": shedding})

    def tell(self, state: str, temperature_celsius: float | None) -> None:
        """How the box stands, for the stage's heartbeats; ActionFailed if it does not take it."""
        self._order({"op": "guards", "state": state, "temperature_celsius": temperature_celsius})

    def _order(self, request: Mapping[str, Any]) -> Mapping[str, Any]:
        try:
            answer = self._socket.ask(request)
        except Silent as error:
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
