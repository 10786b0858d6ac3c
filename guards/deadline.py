"""Asks sensors, each with a deadline: a read that never comes back costs one thread and one sensor, not the guard."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

AnswerT = TypeVar("AnswerT")

MOST_HUNG_THREADS = 16
MOST_HANGS_A_ROUND = 3
"""Together with the deadline this bounds a round: the others of a box full of hanging sensors wait for the next one."""
MOST_FILE_BYTES = 4096


class Unreadable(Exception):
    """A sensor did not answer, or with an error; the message is one line for people."""


def read_file(path: Path) -> str:
    """The text of a small file of the kernel.

    Raises:
        OSError: as ever.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.read(descriptor, MOST_FILE_BYTES).decode("utf-8", "replace")
    finally:
        os.close(descriptor)


@dataclass(frozen=True)
class _Answer:
    value: Any
    error: Exception | None


@dataclass(frozen=True)
class _Hung:
    thread: threading.Thread
    since_seconds: float


_Job = tuple[Callable[[], Any], "SimpleQueue[_Answer]"]


class DeadlineReader:
    """One thread asks all sensors in turn. When one hangs, the thread is left to it and another takes over.

    A sensor that hung is left alone for the quarantine, and in any case while its thread still hangs, so there is one
    such thread a sensor at most, and `MOST_HUNG_THREADS` in all: then nothing is read any more, which the guard
    reports. The kernel offers no way to end a thread that waits inside a driver.

    Used by one thread at a time.
    """

    def __init__(self, deadline_seconds: float, quarantine_seconds: float) -> None:
        self._deadline_seconds = deadline_seconds
        self._quarantine_seconds = quarantine_seconds
        self._jobs: SimpleQueue[_Job | None] | None = None
        self._thread: threading.Thread | None = None
        self._hung: dict[str, _Hung] = {}
        self._hangs_left = MOST_HANGS_A_ROUND

    @property
    def hung(self) -> tuple[str, ...]:
        """Sensors that are in quarantine."""
        return tuple(self._hung)

    def begin_round(self) -> None:
        """To be called before the first `ask` of a round."""
        self._hangs_left = MOST_HANGS_A_ROUND

    def close(self) -> None:
        """Let the idle thread end; one that hangs ends as soon as that lets go."""
        if self._jobs is not None:
            self._jobs.put(None)
        self._jobs = self._thread = None

    def text(self, path: Path) -> str:
        """What a kernel file says.

        Raises:
            Unreadable: see `ask`.
        """
        return self.ask(str(path), lambda: read_file(path))

    def ask(self, name: str, question: Callable[[], AnswerT]) -> AnswerT:
        """What `question` returns.

        Args:
            name: of the sensor; it goes into quarantine if the question hangs.

        Raises:
            Unreadable: no answer in time, an error for an answer, or in quarantine.
        """
        self._admit(name)
        jobs = self._worker()
        answers: SimpleQueue[_Answer] = SimpleQueue()
        jobs.put((question, answers))
        try:
            answer = answers.get(timeout=self._deadline_seconds)
        except Empty:
            self._abandon(name)
            raise Unreadable(f"no answer within {self._deadline_seconds:g} s") from None
        if answer.error is not None:
            raise Unreadable(_describe(answer.error)) from None
        value: AnswerT = answer.value
        return value

    def _admit(self, name: str) -> None:
        """Unless it is in quarantine."""
        hung = self._hung.get(name)
        if hung is not None:
            since = time.monotonic() - hung.since_seconds
            if hung.thread.is_alive() or since < self._quarantine_seconds:
                raise Unreadable(f"hung {since:.0f} s ago, left alone")
            del self._hung[name]
        if self._hangs_left <= 0:
            raise Unreadable("left out of this round, as others hang")

    def _worker(self) -> SimpleQueue[_Job | None]:
        if self._jobs is None:
            if sum(hung.thread.is_alive() for hung in self._hung.values()) >= MOST_HUNG_THREADS:
                raise Unreadable(f"{MOST_HUNG_THREADS} sensors hang, no more are asked")
            jobs: SimpleQueue[_Job | None] = SimpleQueue()
            thread = threading.Thread(target=_serve, args=(jobs,), name="sensors", daemon=True)
            try:
                thread.start()
            except RuntimeError as error:  # the box is out of threads
                raise Unreadable(str(error)) from None
            self._jobs, self._thread = jobs, thread
        return self._jobs

    def _abandon(self, name: str) -> None:
        """Leave the thread to what it hangs in; it ends as soon as that lets go."""
        if self._thread is not None:
            self._hung[name] = _Hung(self._thread, time.monotonic())
        self.close()
        self._hangs_left -= 1


def _serve(jobs: SimpleQueue[_Job | None]) -> None:
    while (job := jobs.get()) is not None:
        question, answers = job
        try:
            answers.put(_Answer(question(), None))
        except Exception as error:  # whatever a sensor's driver or library does wrong is this sensor's fault alone
            answers.put(_Answer(None, error))


def _describe(error: Exception) -> str:
    if isinstance(error, OSError) and error.errno is not None:
        return f"{error.strerror} ({errno.errorcode.get(error.errno, error.errno)})"
    return f"{type(error).__name__}: {error}"[:200]
