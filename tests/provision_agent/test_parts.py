"""Parts of the agent on their own: messages, the health judge, atomic writes."""

from __future__ import annotations

import io
import subprocess
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleet.provision.agent import health, wire
from fleet.provision.agent.paths import NEW_SUFFIX, Ownership, path_fact, write_aside
from fleet.provision.transport import BOOTSTRAP, agent_program

JSON = st.dictionaries(st.text(max_size=8), st.integers() | st.text(max_size=20) | st.none(), max_size=5)


@given(st.lists(st.tuples(JSON, st.binary(max_size=200)), max_size=5), st.integers(1, 7))
def test_messages_survive_any_splitting(messages: list[tuple[dict[str, Any], bytes]], piece: int) -> None:
    stream = io.BytesIO(b"".join(wire.encode(message, body) for message, body in messages))
    reader = wire.Reader(lambda count: stream.read(min(count, piece)))
    assert [reader.next() for _ in messages] == messages
    with pytest.raises(EOFError):
        reader.next()


@given(st.binary(min_size=8, max_size=60))
def test_noise_is_refused_or_ends(noise: bytes) -> None:
    """A banner or a shell's complaint in front of the agent must not make the operator allocate or hang."""
    reader = wire.Reader(io.BytesIO(noise).read)
    with pytest.raises((wire.WireError, EOFError)):
        for _ in range(len(noise)):
            reader.next()


PROGRAM = {"name": "stage", "health_states": ["loaded", "ready"]}


@pytest.mark.parametrize(
    ("info", "answer", "verdict"),
    [
        (None, None, "failed"),
        ({"statename": "FATAL", "spawnerr": ""}, None, "failed"),
        ({"statename": "BACKOFF", "spawnerr": ""}, None, "waiting"),
        ({"statename": "STARTING", "spawnerr": ""}, None, "waiting"),
        ({"statename": "RUNNING", "spawnerr": ""}, None, "healthy"),
        ({"statename": "RUNNING", "spawnerr": ""}, {"error": "refused"}, "waiting"),
        ({"statename": "RUNNING", "spawnerr": ""}, {"state": "loading"}, "waiting"),
        ({"statename": "RUNNING", "spawnerr": ""}, {"state": "loaded"}, "healthy"),
        ({"statename": "RUNNING", "spawnerr": ""}, {"state": "failed", "reason": "bad digest"}, "failed"),
        ({"statename": "RUNNING", "spawnerr": ""}, {}, "waiting"),
    ],
)
def test_health_verdicts(info: dict[str, Any] | None, answer: dict[str, Any] | None, verdict: str) -> None:
    found, text = health.judge(PROGRAM, info, answer)
    assert found == verdict
    if answer and answer.get("reason"):
        assert "bad digest" in text


def test_a_write_that_breaks_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("old")

    def chunks() -> Any:
        yield b"new"
        raise EOFError

    spec = {"mode": 0o640, "owner": "", "group": ""}
    with pytest.raises(EOFError):
        write_aside(str(path), chunks(), Ownership(False), spec, sync=True)
    assert path.read_text() == "old"
    write_aside(str(path), [b"new"], Ownership(False), spec, sync=True)
    assert path.read_text() == "new"
    assert path_fact(str(path))["mode"] == 0o640
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]
    assert not (tmp_path / f"file{NEW_SUFFIX}").exists()


def test_a_link_is_never_followed_by_a_write(tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.write_text("precious")
    for name in ("file", f"file{NEW_SUFFIX}"):
        (tmp_path / name).symlink_to(target)
    write_aside(str(tmp_path / "file"), [b"x"], Ownership(False), {"mode": 0o644, "owner": "", "group": ""}, sync=True)
    assert target.read_text() == "precious"
    assert not (tmp_path / "file").is_symlink()


def test_the_agent_is_standard_library_only_and_small() -> None:
    """It runs under the box's bare interpreter: no package of ours or others is importable there."""
    requests = agent_program() + wire.encode({"op": "nonsense"})
    argv = ["/usr/bin/python3", "-I", "-S", "-B", "-c", BOOTSTRAP]
    done = subprocess.run(argv, input=requests, capture_output=True, timeout=60, check=True)
    message, _ = wire.Reader(io.BytesIO(done.stdout).read).next()
    assert (message["op"], message["kind"]) == ("error", "bug")
    assert "unknown request nonsense" in message["detail"]
    assert "agent.answer(peer.next_request())" in message["detail"]  # tracebacks show source though no file exists
    assert len(agent_program()) < 64 * 1024  # fits into a pipe, so that sending it never blocks


def test_modes_are_never_set_through_a_link(tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.write_text("precious")
    target.chmod(0o600)
    (tmp_path / "link").symlink_to(target)
    with pytest.raises(OSError, match="symbolic links"):
        Ownership(False).set(str(tmp_path / "link"), 0o644, "", "")
    assert target.stat().st_mode & 0o777 == 0o600
