"""What the lab says when something is missing or fails."""

from __future__ import annotations

import os


class LabError(Exception):
    """A fault of the lab itself (not of the fleet under test).

    Args:
        message: which box and step, what was seen, what was expected.
        hint: what to run or change next; may be empty.
    """

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(f"{message} ({hint})" if hint else message)
        self.message = message
        self.hint = hint

    def for_terminal(self) -> str:
        """Message and hint on lines of their own."""
        return f"lab: {self.message}" + (f"\n     {self.hint}" if self.hint else "")


class LabTimeoutError(LabError):
    """A named deadline of the lab passed."""


def require_root(what: str) -> None:
    """Raise a LabError unless we are root; `what` names the work, e.g. "starting boxes"."""
    if os.geteuid() != 0:
        raise LabError(
            f"{what} needs root: the lab makes network namespaces, mounts and containers",
            hint="run the same command with sudo; everything else in `make test` runs without root",
        )
