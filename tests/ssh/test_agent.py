"""The agent over a real ssh connection: one connection, one command; silence ends it."""

from __future__ import annotations

import signal
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from fleet.inventory.model import Timing
from fleet.provision.desired import DesiredState
from fleet.provision.diff import diff
from fleet.provision.session import BoxSession, open_session
from fleet.provision.step_lines import StepLines
from fleet.provision.transport import LocalProcess
from fleet.ssh.deadlines import Deadlines
from fleet.ssh.results import BoxError, BoxUnreachable
from fleet.ssh.site import SshSite

from ..provision_agent.conftest import Authority, LocalBox, box  # noqa: F401 - a fixture
from .conftest import Sshd, needs_root, site_file


@pytest.fixture
def over_ssh(sshd: Sshd, box: LocalBox, lines: list[str]) -> Callable[..., BoxSession]:  # noqa: F811
    """Open a session with the agent over ssh."""
    file = site_file(box.prefix.parent, sshd.port, sshd.identity)

    def start(**deadlines: float) -> BoxSession:
        ssh = SshSite.of(file, report=lines.append)
        ssh = replace(ssh, deadlines=replace(ssh.deadlines, **deadlines))
        return open_session(file, "box1", ssh, StepLines(lines.append))

    return start


def provision(session: BoxSession, desired: DesiredState) -> int:
    changes = diff(desired, session.facts(desired))
    if changes:
        session.apply(desired, changes, sign=Authority().sign)
    return len(changes)


@needs_root
def test_each_run_is_one_connection_and_one_command(
    sshd: Sshd,
    box: LocalBox,  # noqa: F811
    over_ssh: Callable[..., BoxSession],
) -> None:
    desired = box.desired(model=bytes(range(256)) * 20_000)
    with over_ssh() as session:
        assert provision(session, desired) > 0
    with over_ssh() as session:
        assert provision(session, desired) == 0
    assert sshd.log.count("Accepted publickey") == 2
    assert sshd.log.count("Starting session: command") == 2
    assert sshd.log.count("Starting session") == 2
    model = desired.trees[0].files[1]
    assert Path(model.path).read_bytes() == model.content.data


@needs_root
@pytest.mark.parametrize("stopped", ["sshd", "python3"])
def test_silent_box_is_closed_from_outside(
    sshd: Sshd,
    box: LocalBox,  # noqa: F811
    over_ssh: Callable[..., BoxSession],
    stopped: str,
) -> None:
    """An unplugged box (its sshd stops reading), and a zombie whose sshd still answers keepalives."""
    with over_ssh(quiet_seconds=1.0) as session:
        session.facts(box.desired(), hold_lock=False)
        processes = sshd.children(stopped)
        assert processes
        for child in processes:
            child.send_signal(signal.SIGSTOP)
        try:
            with pytest.raises(BoxUnreachable, match="the box was silent for 1 s") as caught:
                session.facts(box.desired(), hold_lock=False)
        finally:
            for child in processes:  # nobody else would: a stopped process outlives its parent
                with suppress(psutil.NoSuchProcess):
                    child.kill()
        assert caught.value.message.startswith("box1: facts: ")


@needs_root
def test_step_deadline_ends_a_step_that_only_waits(
    sshd: Sshd,
    box: LocalBox,  # noqa: F811
    over_ssh: Callable[..., BoxSession],
) -> None:
    desired = replace(box.desired(state="loading"), health_gate_seconds=5.0)
    with over_ssh(step_seconds=2.0) as session:
        changes = diff(desired, session.facts(desired))
        agents = sshd.children("python3")
        assert agents
        with pytest.raises(BoxUnreachable, match=r"box1: health gate: the step did not end for 2 s"):
            session.apply(desired, changes, sign=Authority().sign)
    for agent in agents:
        agent.wait(60)  # it finishes what it began, then ends


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        ("echo 'sudo: a password is required' >&2; exit 1", "sudo asks for a password"),
        ("echo 'sh: 1: python3: not found' >&2; exit 127", "no python3 on the box"),
        ("echo Welcome to the board; exec cat >/dev/null", "something else than the agent answers"),
        ("echo 'Traceback: odd' >&2; exit 2", "the agent ended with 2: Traceback: odd"),
    ],
)
def test_agent_that_does_not_start_says_why(box: LocalBox, script: str, expected: str) -> None:  # noqa: F811
    stack = ExitStack()
    transport = stack.enter_context(LocalProcess(["sh", "-c", script]))
    with (
        pytest.raises(BoxError, match=expected),
        BoxSession("box1", transport, Deadlines.of(Timing()), StepLines(print), stack) as session,
    ):
        session.facts(box.desired())
