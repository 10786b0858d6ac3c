"""What a run over boxes yields: one result a box, and the exit code that all of them make together."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

from fleet.errors import ExitCode, FleetError


class HostStatus(str, Enum):
    """Host results of the contract."""

    OK = "ok"
    CHANGED = "changed"
    FAILED = "failed"
    UNREACHABLE = "unreachable"


@dataclass(frozen=True)
class HostResult:
    """The outcome of one box.

    Attributes:
        message: one line; for failures what happened, at which step, and what was expected.
        hint: the next command to type.
        code: why it failed, OK otherwise.
        changes: number of changes made, or pending with `--check`.
        detail: more lines for `-v`, e.g. logs of a failed program.
    """

    box: str
    status: HostStatus
    message: str = ""
    hint: str = ""
    code: ExitCode = ExitCode.OK
    changes: int = 0
    detail: str = ""


class BoxError(FleetError):
    """A box refused or failed a step.

    Args:
        box, step: where; both open the message.
        message: what happened and what was expected.
        detail: longer text (logs), shown apart.
    """

    status = HostStatus.FAILED

    def __init__(
        self,
        box: str,
        step: str,
        message: str,
        *,
        hint: str = "",
        exit_code: ExitCode = ExitCode.FAILED,
        detail: str = "",
    ) -> None:
        super().__init__(f"{box}: {step}: {message}", hint=hint, exit_code=exit_code)
        self.box = box
        self.step = step
        self.detail = detail


class BoxUnreachable(BoxError):
    """A box could not be reached, or went silent."""

    status = HostStatus.UNREACHABLE

    def __init__(self, box: str, step: str, message: str, *, hint: str = "") -> None:
        super().__init__(box, step, message, hint=hint, exit_code=ExitCode.UNREACHABLE)


def result_of(error: BoxError) -> HostResult:
    """The host result that a box's error makes."""
    return HostResult(error.box, error.status, error.message, error.hint, error.exit_code, detail=error.detail)


def exit_code(results: Iterable[HostResult]) -> ExitCode:
    """The exit code of a whole run.

    A box that rolled back makes 5, boxes that failed 1 (4 if every failure is a held lock), and 3 stands only when
    nothing but unreachable boxes was in the way.
    """
    results = tuple(results)
    failed = [result.code for result in results if result.status is HostStatus.FAILED]
    if ExitCode.ROLLED_BACK in failed:
        return ExitCode.ROLLED_BACK
    if failed:
        return ExitCode.LOCKED if all(code is ExitCode.LOCKED for code in failed) else ExitCode.FAILED
    if any(result.status is HostStatus.UNREACHABLE for result in results):
        return ExitCode.UNREACHABLE
    return ExitCode.OK
