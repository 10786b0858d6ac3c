"""The agent through the local transport, with a real supervisord."""

from __future__ import annotations

import fcntl
import os
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import serialization

from fleet.errors import ExitCode
from fleet.provision.agent.rpc import SupervisorRpc, ask_health
from fleet.provision.diff import diff
from fleet.provision.session import open_session
from fleet.provision.step_lines import StepLines
from fleet.ssh.results import BoxError
from fleet.ssh.site import SshSite

from .conftest import LocalBox, Snapshot


def pids(box: LocalBox) -> dict[str, int]:
    return {name: info["pid"] for name, info in SupervisorRpc(f"{box.run}/supervisor.sock").programs().items()}


def runs(pid: int) -> bool:
    """True for a process that is there and no zombie (whose command line is empty)."""
    command = Path(f"/proc/{pid}/cmdline")
    return command.exists() and command.read_bytes() != b""


def check_identity(box: LocalBox) -> None:
    """The key is private and fits the certificate; one request with the right names was made."""
    key_path = box.prefix / "pki/box.key"
    assert key_path.stat().st_mode & 0o777 == 0o600
    key = serialization.load_pem_private_key(key_path.read_bytes(), None)
    certificate = x509.load_pem_x509_certificate((box.prefix / "pki/box.crt").read_bytes())
    encoding = (serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)
    assert certificate.public_key().public_bytes(*encoding) == key.public_key().public_bytes(*encoding)
    request = x509.load_pem_x509_csr(box.authority.requests[0].encode())
    names = request.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == ["one.test.fleet.internal"]
    assert len(box.authority.requests) == 1


def test_second_run_changes_nothing(box: LocalBox, snapshot: Callable[[Path], Snapshot]) -> None:
    desired = box.desired()
    changes, result = box.provision(desired)
    assert result is not None
    assert set(result.restarted) == {"answers", "sleeps"}
    assert {"tree", "link", "identity", "supervisor", "program", "directory", "file"} <= {one.kind for one in changes}
    answers = f"{box.run}/answers.sock"
    assert ask_health(answers, pids(box)["answers"])["state"] == "ready"
    before, running = snapshot(box.prefix), pids(box)
    again, nothing = box.provision(desired)
    assert again == ()
    assert nothing is None
    assert snapshot(box.prefix) == before
    assert pids(box) == running
    check_identity(box)
    assert "answers instead of 1" in ask_health(answers, 1)["error"]


def test_flipped_byte_is_found_and_mended_alone(box: LocalBox, snapshot: Callable[[Path], Snapshot]) -> None:
    desired = box.desired()
    box.provision(desired)
    before, running = snapshot(box.prefix), pids(box)
    victim = Path(desired.trees[0].files[1].path)
    data = bytearray(victim.read_bytes())
    data[7] ^= 1
    victim.write_bytes(data)
    changes, _ = box.provision(desired)
    assert [(one.kind, one.path, one.why) for one in changes] == [("tree-file", str(victim), "content")]
    after = snapshot(box.prefix)
    touched = {path for path in before if before[path] != after[path]}
    assert touched == {str(victim), str(victim.parent)}
    assert after[str(victim)][3] == before[str(victim)][3]
    assert pids(box) == running
    assert box.provision(desired)[0] == ()


def test_each_kind_of_damage_is_mended(box: LocalBox) -> None:
    desired = box.desired()
    box.provision(desired)
    model = Path(desired.trees[0].files[0].path)
    secrets, pki, current = box.prefix / "secrets", box.prefix / "pki", box.prefix / "current"
    cases: list[tuple[Callable[[], Any], tuple[str, str, str]]] = [
        (model.unlink, ("tree-file", str(model), "missing")),
        (lambda: model.chmod(0o600), ("tree-file", str(model), "mode")),
        (lambda: Path(f"{model}.old").write_text("x"), ("tree-file", f"{model}.old", "extra")),
        (lambda: secrets.chmod(0o755), ("directory", str(secrets), "mode")),
        (lambda: (secrets / "keys.json").write_text("other"), ("file", str(secrets / "keys.json"), "content")),
        ((pki / "box.crt").unlink, ("identity", str(pki / "box.crt"), "certificate")),
        (lambda: (pki / "box.key").write_text("other"), ("identity", str(pki / "box.key"), "content")),
        (lambda: (current.unlink(), current.symlink_to("/nonexistent")), ("link", str(current), "target")),
    ]
    for damage, expected in cases:
        damage()
        changes, _ = box.provision(desired)
        assert (changes[0].kind, changes[0].path, changes[0].why) == expected
        new_certificate = expected[0] == "identity"  # programs must read it
        assert {one.path for one in changes[1:]} == ({"answers", "sleeps"} if new_certificate else set())
    assert box.provision(desired)[0] == ()


def test_new_release_restarts_only_what_changed(box: LocalBox) -> None:
    box.provision(box.desired())
    before = pids(box)
    changes, result = box.provision(box.desired(marker="second"))
    assert result is not None
    assert result.restarted == ("answers",)
    assert [one.kind for one in changes] == ["tree", "link", "program"]
    assert '+ "marker": "second"' in changes[0].text_diff
    after = pids(box)
    assert after["sleeps"] == before["sleeps"]
    assert after["answers"] != before["answers"]


def test_failed_health_gate_rolls_back_after_collecting_logs(box: LocalBox) -> None:
    good = box.desired()
    box.provision(good)
    with pytest.raises(BoxError) as caught:
        box.provision(box.desired(state="failed"))
    error = caught.value
    assert error.exit_code is ExitCode.ROLLED_BACK
    assert "answers says failed, expected loaded or ready" in error.message
    assert "the previous release is active again" in error.message
    assert "program starts with state failed" in error.detail
    assert str((box.prefix / "current").readlink()) == good.links[0].target
    with box.session() as session:
        assert diff(good, session.facts(good)) == ()


def test_first_release_that_fails_says_that_there_is_no_way_back(box: LocalBox) -> None:
    with pytest.raises(BoxError) as caught:
        box.provision(box.desired(state="failed"))
    assert caught.value.exit_code is ExitCode.FAILED
    assert "no previous release" in caught.value.message
    changes, _ = box.provision(box.desired())
    assert {"link", "program"} <= {one.kind for one in changes}
    assert box.provision(box.desired())[0] == ()


def test_a_program_that_keeps_ending_fails_the_gate_before_its_deadline(box: LocalBox) -> None:
    good = box.desired()
    box.provision(good)
    with pytest.raises(BoxError) as caught:
        box.provision(replace(box.desired(state="exits"), health_gate_seconds=3600.0))
    assert caught.value.exit_code is ExitCode.ROLLED_BACK
    assert "answers ended 3 times (after " in caught.value.message
    assert "program starts with state exits" in caught.value.detail
    assert box.provision(good)[0] == ()


def test_what_a_killed_supervisord_left_behind_is_ended(box: LocalBox) -> None:
    desired = box.desired()
    box.provision(desired)
    orphan = pids(box)["answers"]
    os.kill(SupervisorRpc(f"{box.run}/supervisor.sock").process_id(), signal.SIGKILL)
    assert runs(orphan)
    changes, _ = box.provision(desired)
    assert {one.kind for one in changes} == {"supervisor", "program"}
    assert not runs(orphan)
    os.kill(SupervisorRpc(f"{box.run}/supervisor.sock").process_id(), signal.SIGKILL)
    with box.session() as session:
        assert session.stop(desired) == ("answers",)


def test_everything_arrives_before_a_box_waits_for_its_turn_and_nothing_runs_yet(box: LocalBox) -> None:
    box.provision(box.desired())
    desired, old, running = box.desired(marker="new"), (box.prefix / "current").readlink(), pids(box)

    def refuse() -> None:
        assert Path(desired.trees[1].path).is_dir()
        assert (box.prefix / "current").readlink() == old
        assert pids(box) == running
        raise BoxError("one", "turn", "not now")

    with box.session() as session:
        changes = diff(desired, session.facts(desired))
        with pytest.raises(BoxError, match="not now"):
            session.apply(desired, changes, sign=box.authority.sign, begin=refuse)
    assert (box.prefix / "current").readlink() == old
    assert pids(box) == running
    changes, result = box.provision(desired)
    assert [(one.kind, one.why) for one in changes] == [("link", "target"), ("program", "fingerprint")]
    assert result is not None
    assert pids(box)["answers"] != running["answers"]


def test_an_activation_that_was_interrupted_is_finished_by_the_box(box: LocalBox) -> None:
    desired = box.desired()
    ssh = SshSite.of(box.site_file, report=box.lines.append)

    def interrupt(line: str) -> None:
        if "health gate" in line:
            ssh.cancellation.cancel()

    with open_session(box.site_file, "one", ssh, StepLines(interrupt)) as session:
        changes = diff(desired, session.facts(desired))
        with pytest.raises(BoxError):
            session.apply(desired, changes, sign=box.authority.sign)
    lock = os.open(box.run / "provision.lock", os.O_RDWR)
    fcntl.flock(lock, fcntl.LOCK_EX)  # free once the agent has ended
    os.close(lock)
    assert box.provision(desired)[0] == ()


def test_a_killed_agent_is_no_unreachable_box(box: LocalBox) -> None:
    children = Path(f"/proc/self/task/{os.getpid()}/children")
    before = set(children.read_text().split())  # of other tests, ended and not waited for yet
    with box.session() as session:
        session.facts(box.desired())
        (agent,) = set(children.read_text().split()) - before
        os.kill(int(agent), signal.SIGKILL)
        with pytest.raises(BoxError, match="the agent was killed by signal 9") as caught:
            session.facts(box.desired())
    assert caught.value.exit_code is ExitCode.FAILED


def test_two_runs_at_once_the_second_names_the_first(box: LocalBox) -> None:
    desired = box.desired()
    with box.session() as first, box.session() as second:
        first.facts(desired)
        with pytest.raises(BoxError) as caught:
            second.facts(desired)
    assert caught.value.exit_code is ExitCode.LOCKED
    assert "another provisioning run holds the box" in caught.value.message
    assert box.provision(desired)[1] is not None


def test_check_writes_nothing(box: LocalBox, snapshot: Callable[[Path], Snapshot]) -> None:
    desired = box.desired()
    facts = box.facts(desired, texts=True)
    assert diff(desired, facts)
    assert not box.prefix.exists()
    assert list(box.run.iterdir()) == []
    box.provision(desired)
    before = snapshot(box.prefix)
    assert diff(box.desired(marker="other"), box.facts(box.desired(marker="other"), texts=True))
    assert snapshot(box.prefix) == before


def test_stop_ends_every_process(box: LocalBox) -> None:
    desired = box.desired()
    box.provision(desired)
    running = pids(box)
    with box.session() as session:
        assert set(session.stop(desired)) == {"answers", "sleeps"}
    assert not [pid for pid in running.values() if runs(pid)]
    with box.session() as session:
        assert session.stop(desired) == ()
    changes, result = box.provision(desired)
    assert result is not None
    assert {one.kind for one in changes} == {"supervisor", "program"}


def test_a_file_in_the_place_of_a_parent_directory_is_named_without_a_traceback(box: LocalBox) -> None:
    box.prefix.parent.write_text("in the way")
    with pytest.raises(BoxError, match=f"{box.prefix.parent}.*Not a directory") as caught:
        box.provision(box.desired())
    assert caught.value.detail == ""
    assert f"ls -ld {box.prefix}" in caught.value.hint or f"ls -ld {box.prefix.parent}" in caught.value.hint
