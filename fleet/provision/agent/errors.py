"""What stops the agent."""

from __future__ import annotations

from typing import Literal

Kind = Literal["failed", "locked", "rolled-back"]


class AgentError(Exception):
    """A step that failed for a reason outside our code.

    Args:
        step: what was being done. message: what happened and what was expected. hint: the next command.
        kind: decides the exit code at the operator. detail: logs, shown apart.
    """

    def __init__(self, step: str, message: str, *, hint: str = "", kind: Kind = "failed", detail: str = "") -> None:
        super().__init__(message)
        self.step = step
        self.message = message
        self.hint = hint
        self.kind = kind
        self.detail = detail
