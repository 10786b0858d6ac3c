"""Many boxes at once: bounded, limited in starts, each with its own result, all ended by one interrupt."""

from __future__ import annotations

import os
import signal
import threading
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleet.errors import ExitCode, FleetError
from fleet.inventory.model import Timing
from fleet.provision.session import BoxSession
from fleet.provision.transport import LocalProcess
from fleet.ssh.deadlines import Deadlines
from fleet.ssh.pool import Cancellation, StartLimiter, run_on_boxes
from fleet.ssh.results import BoxError, BoxUnreachable, HostResult, HostStatus, exit_code

from ..provision_agent.conftest import LocalBox, box  # noqa: F401 - a fixture


@given(st.floats(0.1, 100), st.lists(st.floats(0, 10), min_size=1, max_size=30))
def test_starts_are_spaced_evenly(per_second: float, gaps: list[float]) -> None:
    limiter, now, starts = StartLimiter(per_second), 0.0, []
    for gap in gaps:
        now += gap
        starts.append(now + limiter.reserve(now))
    spaces = [after - before for before, after in pairwise(starts)]
    assert all(space >= 1 / per_second - 1e-9 for space in spaces)
    assert StartLimiter(per_second).reserve(5.0) == 0.0


def test_one_box_never_stops_the_others() -> None:
    def work(name: str) -> HostResult:
        if name == "gone":
            raise BoxUnreachable(name, "connect", "no answer")
        if name == "bad":
            raise BoxError(name, "apply", "disk full", hint="df -h")
        if name == "plain":
            raise FleetError("no bundle", hint="fleet bundle")
        if name == "bug":
            raise KeyError("surprise")
        return HostResult(name, HostStatus.CHANGED, changes=2)

    boxes = ["gone", "bad", "plain", "bug", "good"]
    results = run_on_boxes(boxes, work, forks=2, cancellation=Cancellation())
    assert [result.box for result in results] == boxes
    assert [result.status.value for result in results] == ["unreachable", "failed", "failed", "failed", "changed"]
    assert results[1].message == "bad: apply: disk full"
    assert results[2].hint == "fleet bundle"
    bug_file = Path(results[3].hint.split()[1])
    assert "KeyError: 'surprise'" in bug_file.read_text()
    bug_file.unlink()


def test_forks_bound_what_runs_at_once() -> None:
    lock, running, most = threading.Lock(), 0, 0
    barrier = threading.Barrier(3)

    def work(name: str) -> HostResult:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        barrier.wait(10)  # three must be inside together, or this breaks
        with lock:
            running -= 1
        return HostResult(name, HostStatus.OK)

    results = run_on_boxes([str(number) for number in range(9)], work, forks=3, cancellation=Cancellation())
    assert all(result.status is HostStatus.OK for result in results)
    assert most == 3


@pytest.mark.parametrize(
    ("codes", "expected"),
    [
        ([], ExitCode.OK),
        ([None, None], ExitCode.OK),
        ([None, ExitCode.UNREACHABLE], ExitCode.UNREACHABLE),
        ([ExitCode.FAILED, ExitCode.UNREACHABLE], ExitCode.FAILED),
        ([ExitCode.LOCKED, None], ExitCode.LOCKED),
        ([ExitCode.LOCKED, ExitCode.FAILED], ExitCode.FAILED),
        ([ExitCode.ROLLED_BACK, ExitCode.FAILED, ExitCode.UNREACHABLE], ExitCode.ROLLED_BACK),
    ],
)
def test_exit_code_of_a_run(codes: list[ExitCode | None], expected: ExitCode) -> None:
    results = []
    for code in codes:
        status = HostStatus.OK if code is None else HostStatus.FAILED
        status = HostStatus.UNREACHABLE if code is ExitCode.UNREACHABLE else status
        results.append(HostResult("box", status, code=code or ExitCode.OK))
    assert exit_code(results) is expected


def test_interrupt_closes_every_connection(box: LocalBox) -> None:  # noqa: F811
    cancellation, waiting = Cancellation(), threading.Barrier(3)

    def work(name: str) -> HostResult:
        with ExitStack() as stack:
            transport = stack.enter_context(LocalProcess(["sleep", "1000"]))  # a box that never answers
            stack.enter_context(cancellation.closing(transport.abort))
            session = BoxSession(name, transport, Deadlines.of(Timing()), print, stack.pop_all())
        with session:
            waiting.wait(10)
            session.facts(box.desired())
        return HostResult(name, HostStatus.OK)

    def interrupt() -> None:
        waiting.wait(10)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        run_on_boxes(["one", "two"], work, forks=2, cancellation=cancellation)
    thread.join()
    assert cancellation.cancelled
