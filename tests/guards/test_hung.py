"""Guards whose process lives while their rounds stand still: who notices, and what is done."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from fleet.provision.agent.errors import AgentError
from guards.beat import FILE_NAME, Beat, Beating, read_beat, write_beat
from guards.hung import KILLS, GuardsWatch, Suspicion, judge_guards

BEAT = Beat(pid=7, round_seconds=1000.0, allowed_seconds=120.0)
SUSPICION = Suspicion(BEAT, 1200.0)


@pytest.mark.parametrize(
    ("beat", "pid", "suspicion", "now_seconds", "expected"),
    [
        (None, 7, SUSPICION, 5000.0, (False, None)),  # no sign at all: an older release
        (BEAT, 8, SUSPICION, 5000.0, (False, None)),  # of the process before: this one has just started
        (BEAT, 0, SUSPICION, 5000.0, (False, None)),  # supervisord runs none
        (BEAT, 7, SUSPICION, 900.0, (False, None)),  # of another boot
        (BEAT, 7, None, 1120.0, (False, None)),
        (BEAT, 7, None, 1121.0, (False, Suspicion(BEAT, 1121.0))),  # a paused box may just have gone on
        (BEAT, 7, SUSPICION, 1229.0, (False, SUSPICION)),
        (BEAT, 7, SUSPICION, 1230.0, (True, SUSPICION)),
        (Beat(7, 1001.0, 120.0), 7, SUSPICION, 1230.0, (False, Suspicion(Beat(7, 1001.0, 120.0), 1230.0))),
    ],
)
def test_who_hangs(
    beat: Beat | None,
    pid: int,
    suspicion: Suspicion | None,
    now_seconds: float,
    expected: tuple[bool, Suspicion | None],
) -> None:
    assert judge_guards(beat, pid, suspicion, now_seconds) == expected


class Supervisord:
    """Kills nothing, and counts."""

    def __init__(self) -> None:
        self.killed: list[str] = []
        self.silent = False

    def programs(self) -> Mapping[str, Mapping[str, Any]]:
        if self.silent:
            raise AgentError("supervisor", "supervisord did not answer")
        return {"stage": {"pid": 6}, "guards": {"pid": 7}}

    def kill_group(self, group: str) -> None:
        self.killed.append(group)


def test_killed_at_most_so_often_and_nothing_else(tmp_path: Path) -> None:
    now, told, supervisord = [0.0], list[str](), Supervisord()
    watch = GuardsWatch(tmp_path / FILE_NAME, supervisord, told.append, lambda: now[0])
    watch.look()  # no file: nothing is said
    for round_seconds in range(1, 1000, 10):  # it hangs again after each kill
        write_beat(tmp_path / FILE_NAME, Beat(7, float(round_seconds), 2.0))
        for now[0] in (round_seconds + 3.0, round_seconds + 4.0, round_seconds + 5.0):
            watch.look()
    assert supervisord.killed == ["guards"] * KILLS.most
    assert told[0] == "no round of the guards (process 7) has ended for 4 s: killed, supervisord starts them again"
    assert told[KILLS.most].endswith("killed 5 times within a day already: a person is needed")
    supervisord.silent = True
    watch.look()
    assert told[-1] == "guards: supervisord did not answer"


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"\xff\xfe",
        b"[1]",
        b"null",
        b'{"pid": 7}',
        b'{"pid": -1, "round_seconds": 1, "allowed_seconds": 1}',
        b'{"pid": 7, "round_seconds": NaN, "allowed_seconds": 1}',
        b'{"pid": 7, "round_seconds": 1, "allowed_seconds": 0}',
        b'{"pid": 7, "round_seconds": 1, "allowed_seconds": 1e99}',
        b'{"pid": 7, "round_seconds": 1' + b"0" * 400 + b', "allowed_seconds": 1}',
        b" " * 10_000 + b"{}",
        b"[" * 4096,
    ],
)
def test_a_sign_that_is_none(tmp_path: Path, text: bytes) -> None:
    (tmp_path / FILE_NAME).write_bytes(text)
    assert read_beat(tmp_path / FILE_NAME) is None


def test_what_is_no_file_is_no_sign_and_is_not_waited_for(tmp_path: Path) -> None:
    assert read_beat(tmp_path / "none") is None
    os.mkfifo(tmp_path / "fifo")
    assert read_beat(tmp_path / "fifo") is None
    (tmp_path / "loop").symlink_to("loop")
    assert read_beat(tmp_path / "loop") is None
    assert read_beat(tmp_path) is None


def test_what_is_written_is_read(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    beating = Beating(tmp_path / FILE_NAME, lambda: 12.5, 120.0)
    os.mkfifo(tmp_path / "guards.new")  # in its way
    beating.beat()
    assert read_beat(tmp_path / FILE_NAME) == Beat(os.getpid(), 12.5, 120.0)
    assert (tmp_path / FILE_NAME).stat().st_mode & 0o777 == 0o600
    nowhere = Beating(tmp_path / "none" / FILE_NAME, lambda: 12.5, 120.0)
    nowhere.beat()
    nowhere.beat()
    (record,) = caplog.records
    assert record.message.endswith("No such file or directory; hung guards would not be noticed")
    assert json.loads((tmp_path / FILE_NAME).read_text())["pid"] == os.getpid()
