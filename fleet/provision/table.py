"""What a provisioning run shows, and the exit code that it makes. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from fleet.errors import ExitCode
from fleet.provision.diff import Change
from fleet.ssh.results import HostResult, HostStatus, exit_code

LOG_LINES = 8  # of a failed program without -v
COLUMNS = ("box", "result", "changes", "seconds", "what failed")


class Gate(Enum):
    """How the site's readiness gate ended."""

    READY = "ready"
    NOT_READY = "not ready"
    SKIPPED = "skipped"


@dataclass(frozen=True)
class BoxReport:
    """One box of a run.

    Attributes:
        result: outcome; CHANGED with `--check` means that there are changes to make.
        changes: made or, with `--check`, pending.
        seconds: wall time spent on the box.
    """

    result: HostResult
    changes: tuple[Change, ...]
    seconds: float


@dataclass(frozen=True)
class RunReport:
    """A whole run.

    Attributes:
        boxes: in inventory order.
        check: nothing was changed.
        gate: how the readiness gate ended. gate_message: one line about it.
    """

    boxes: tuple[BoxReport, ...]
    check: bool
    gate: Gate
    gate_message: str


def run_exit_code(report: RunReport, *, fail_on_changes: bool) -> ExitCode:
    """The exit code of a run: 5 before 1 (and 4) before 3; a site that is not ready, and with `fail_on_changes`
    a changed box, is a failure (1), also beside unreachable boxes."""
    code = exit_code([box.result for box in report.boxes])
    changed = any(box.result.status is HostStatus.CHANGED for box in report.boxes)
    failed = report.gate is Gate.NOT_READY or (fail_on_changes and changed)
    return ExitCode.FAILED if failed and code in (ExitCode.OK, ExitCode.UNREACHABLE) else code


def table_rows(report: RunReport) -> list[tuple[str, ...]]:
    """One row a box under COLUMNS."""
    return [
        (
            box.result.box,
            "to change" if report.check and box.result.status is HostStatus.CHANGED else box.result.status.value,
            str(len(box.changes)),
            f"{box.seconds:.1f}",
            box.result.message,
        )
        for box in report.boxes
    ]


def summary_line(report: RunReport) -> str:
    """`3 boxes: 0 changed, 3 ok, 0 failed, 0 unreachable`."""
    count = Counter(box.result.status for box in report.boxes)
    number = len(report.boxes)
    changed = "to change" if report.check else "changed"
    return (
        f"{number} {'box' if number == 1 else 'boxes'}: {count[HostStatus.CHANGED]} {changed}, "
        f"{count[HostStatus.OK]} ok, {count[HostStatus.FAILED]} failed, {count[HostStatus.UNREACHABLE]} unreachable"
    )


def failure_lines(results: Iterable[HostResult], *, verbose: bool) -> list[str]:
    """What failed, the end of its logs (with `verbose` all that was collected), and the next command to type."""
    lines: list[str] = []
    for result in results:
        if result.status in (HostStatus.OK, HostStatus.CHANGED):
            continue
        lines.append(f"{result.status.value}: {result.message}")
        shown = result.detail.splitlines() if verbose else result.detail.splitlines()[-LOG_LINES:]
        lines += [f"  | {line}" for line in shown]
        if result.hint:
            lines.append(f"  next: {result.hint}")
    return lines


def change_lines(changes: Sequence[Change], box: str, *, diff: bool, check: bool) -> list[str]:
    """Every change of a box on a line, below it the text's diff if asked for. Secrets show as their path alone."""
    lines: list[str] = []
    for change in changes:
        note = ""
        if change.kind == "identity" and check:
            key = "a key would be made on the box and a" if change.why == "missing" else "a"
            note = f": {key} certificate would be issued"
        lines.append(f"{box}: {change.describe()}{note}")
        if diff and change.text_diff and not change.secret:
            lines += [f"    {line}" for line in change.text_diff.splitlines()]
    return lines


def json_report(report: RunReport, *, code: ExitCode, diff: bool) -> dict[str, Any]:
    """The run as data for `-o json`."""
    return {
        "check": report.check,
        "exit_code": int(code),
        "summary": summary_line(report),
        "gate": {"result": report.gate.value, "message": report.gate_message},
        "boxes": [_json_box(box, diff=diff) for box in report.boxes],
    }


def _json_box(box: BoxReport, *, diff: bool) -> dict[str, Any]:
    return {
        "box": box.result.box,
        "result": box.result.status.value,
        "seconds": round(box.seconds, 3),
        "message": box.result.message,
        "next": box.result.hint,
        "detail": box.result.detail,
        "changes": [
            {
                "kind": change.kind,
                "path": change.path,
                "why": change.why,
                **({"diff": change.text_diff} if diff and not change.secret else {}),
            }
            for change in box.changes
        ],
    }
