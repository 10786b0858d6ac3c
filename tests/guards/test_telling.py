"""The stage is told how its box stands; one that is away costs nothing but a line."""

from __future__ import annotations

import json
import logging
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from guards.board import Board
from guards.findings import Finding, State
from guards.stage_client import StageClient
from guards.telling import MOST_CHARACTERS, Telling, summary, temperature_celsius

WAIT_SECONDS = 20.0


def a_board() -> Board:
    return Board(["thermal", "clock"], lambda: 0.0)


def hot(celsius: float | None) -> Finding:
    return Finding("temperature", State.HEALTHY, "", {"celsius": celsius})


@contextmanager
def stage(path: Path, answer: bytes = b"{}\n") -> Iterator[list[object]]:
    """A stage's admin socket; what it was told."""
    told: list[object] = []
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(path))
    listener.listen()

    def serve() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            with connection:
                told.append(json.loads(connection.makefile("rb").readline()))
                connection.sendall(answer)

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield told
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join()
        path.unlink()


def test_the_worst_state_and_who_is_in_it() -> None:
    board = a_board()
    assert summary(board.standings()) == "initialising"
    assert temperature_celsius(board.standings()) is None
    pmic = Finding("pmic/zone1", State.HEALTHY, "", {"celsius": 99.0})  # has limits of its own
    board.round_ended("thermal", (pmic, hot(61.5)), 0.1)
    board.round_ended("clock", (Finding("clock", State.UNSUPPORTED),), 0.1)
    assert summary(board.standings()) == "healthy"
    assert temperature_celsius(board.standings()) == 61.5
    board.round_ended("clock", (Finding("clock", State.UNHEALTHY), Finding("peers", State.DEGRADED)), 0.1)
    assert summary(board.standings()) == "unhealthy: clock/clock"
    board.round_ended("clock", tuple(Finding(f"part{n}", State.UNHEALTHY) for n in range(100)), 0.1)
    assert len(summary(board.standings())) == MOST_CHARACTERS


def test_a_stage_that_goes_and_comes_is_a_line_each(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "guards.telling")
    board, path = a_board(), tmp_path / "stage.sock"
    board.round_ended("thermal", (hot(None),), 0.1)
    telling = Telling(StageClient(path), board)
    with stage(path) as told:
        telling.tell()
    telling.tell()
    telling.tell()
    with stage(path, b'{"error": "unknown op"}\n'):
        telling.tell()
    with stage(path) as told_again:
        telling.tell()
    expected = [{"op": "guards", "state": "initialising", "temperature_celsius": None}]
    assert told == expected and told_again == expected
    away, back = [record.message for record in caplog.records]
    assert away == "the stage is not told how its box stands: stage.sock: No such file or directory"
    assert back == "the stage is told again how its box stands"


def test_the_thread_goes_on_after_a_mistake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("guards.telling.TELL_SECONDS", 0.01)
    board = Board(["clock"], lambda: 0.0)  # no thermal guard: a mistake
    telling = Telling(StageClient(tmp_path / "stage.sock"), board)
    with stage(tmp_path / "stage.sock") as told:
        telling.start()
        board._standings["thermal"] = a_board().standings()["thermal"]
        end = time.monotonic() + WAIT_SECONDS
        while len(told) < 2:
            assert time.monotonic() < end
            time.sleep(0.01)
        telling.stop()
