"""The exit-code contract as a table, and what a run shows."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fleet.errors import ExitCode
from fleet.provision.diff import Change
from fleet.provision.table import (
    BoxReport,
    Gate,
    RunReport,
    change_lines,
    failure_lines,
    json_report,
    run_exit_code,
    summary_line,
    table_rows,
)
from fleet.ssh.results import HostResult, HostStatus

OK = HostResult("a", HostStatus.OK)
CHANGED = HostResult("b", HostStatus.CHANGED, changes=2)
UNREACHABLE = HostResult("c", HostStatus.UNREACHABLE, "c: connect: timed out", "ping c", ExitCode.UNREACHABLE)
FAILED = HostResult("d", HostStatus.FAILED, "d: apply: no space", "df", ExitCode.FAILED, detail="line 1\nline 2")
LOCKED = HostResult("e", HostStatus.FAILED, "e: locked", "wait", ExitCode.LOCKED)
ROLLED_BACK = HostResult("f", HostStatus.FAILED, "f: rolled back", "look", ExitCode.ROLLED_BACK)


def run(*results: HostResult, gate: Gate = Gate.SKIPPED, check: bool = False) -> RunReport:
    return RunReport(tuple(BoxReport(result, (), 1.25) for result in results), check, gate, "gate")


@pytest.mark.parametrize(
    ("report", "fail_on_changes", "code"),
    [
        (run(OK), False, 0),
        (run(OK, gate=Gate.READY), True, 0),
        (run(OK, CHANGED), False, 0),
        (run(OK, CHANGED), True, 1),
        (run(CHANGED, check=True), False, 0),
        (run(CHANGED, check=True), True, 1),
        (run(OK, UNREACHABLE), False, 3),
        (run(CHANGED, UNREACHABLE), False, 3),
        (run(CHANGED, UNREACHABLE), True, 1),
        (run(UNREACHABLE, UNREACHABLE), True, 3),
        (run(OK, FAILED), False, 1),
        (run(FAILED, UNREACHABLE), False, 1),
        (run(OK, LOCKED), False, 4),
        (run(LOCKED, FAILED), False, 1),
        (run(OK, ROLLED_BACK), False, 5),
        (run(FAILED, ROLLED_BACK, UNREACHABLE), True, 5),
        (run(OK, gate=Gate.NOT_READY), False, 1),
        (run(UNREACHABLE, gate=Gate.NOT_READY), False, 1),
        (run(ROLLED_BACK, gate=Gate.NOT_READY), False, 5),
    ],
)
def test_exit_codes(report: RunReport, fail_on_changes: bool, code: int) -> None:
    assert run_exit_code(report, fail_on_changes=fail_on_changes) == code


def test_summary() -> None:
    assert summary_line(run(OK, OK, OK)) == "3 boxes: 0 changed, 3 ok, 0 failed, 0 unreachable"
    assert summary_line(run(CHANGED, check=True)) == "1 box: 1 to change, 0 ok, 0 failed, 0 unreachable"
    assert summary_line(run(FAILED, UNREACHABLE)) == "2 boxes: 0 changed, 0 ok, 1 failed, 1 unreachable"


def test_rows() -> None:
    assert [row[1] for row in table_rows(run(OK, CHANGED, check=True))] == ["ok", "to change"]
    assert table_rows(run(OK, UNREACHABLE)) == [
        ("a", "ok", "0", "1.2", ""),
        ("c", "unreachable", "0", "1.2", "c: connect: timed out"),
    ]


def test_failures_show_the_end_of_the_logs_and_the_next_command() -> None:
    log = [f"line {number}" for number in range(20)]
    failed = replace(FAILED, detail="\n".join(log))
    short = failure_lines((OK, failed), verbose=False)
    assert short == ["failed: d: apply: no space", *(f"  | {line}" for line in log[-8:]), "  next: df"]
    assert failure_lines((failed,), verbose=True)[1:-1] == [f"  | {line}" for line in log]


def test_changes_show_diffs_but_never_a_secret() -> None:
    changes = (
        Change("file", "/etc/x", "content", text_diff="-a\n+b\n"),
        Change("file", "/keys", "content", secret=True, text_diff="-LEAK\n"),
        Change("identity", "/pki/box.key", "missing", secret=True),
    )
    lines = change_lines(changes, "a", diff=True, check=True)
    assert lines == [
        "a: file /etc/x (content)",
        "    -a",
        "    +b",
        "a: file /keys (content)",
        "a: identity /pki/box.key (missing): a key would be made on the box and a certificate would be issued",
    ]
    assert change_lines(changes[:1], "a", diff=False, check=False) == ["a: file /etc/x (content)"]
    report = RunReport((BoxReport(CHANGED, changes, 0.5),), True, Gate.SKIPPED, "")
    data = json_report(report, code=ExitCode.OK, diff=True)
    assert "LEAK" not in str(data)
    assert data["boxes"][0]["changes"][0]["diff"] == "-a\n+b\n"
