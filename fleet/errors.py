"""Errors a user can act on, and the exit codes that scripts rely on."""

from __future__ import annotations

from enum import IntEnum


class ExitCode(IntEnum):
    """Exit codes of every verb; the contract stands in the README."""

    OK = 0
    FAILED = 1  # a check or a host failed; a plan does not fit
    USAGE = 2  # wrong flags or arguments
    UNREACHABLE = 3  # only unreachable hosts stood in the way
    LOCKED = 4  # someone else holds the lock
    ROLLED_BACK = 5  # the health gate failed and the previous release is active again
    INVALID_INVENTORY = 78  # sysexits.h EX_CONFIG
    INTERRUPTED = 130  # 128 + SIGINT, what a shell reports


class FleetError(Exception):
    """A failure with a cause the user can mend.

    Args:
        message: what happened, with file:line, or box and step, and what was expected.
        hint: the command to run or the change to make next.
        exit_code: what the process exits with when nobody handles the error.
    """

    def __init__(self, message: str, *, hint: str = "", exit_code: ExitCode = ExitCode.FAILED) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.exit_code = exit_code
