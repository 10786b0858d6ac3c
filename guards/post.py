"""One guard at its post: its thread runs rounds; a round that crashes or hangs costs no other guard anything."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from guards.board import Board
from guards.findings import Action, Finding, Repair, State
from guards.guard import Guard
from guards.keeper import Keeper

log = logging.getLogger(__name__)

# After a crash the guard waits twice as long as the time before, so a broken one costs next to nothing.
FIRST_PAUSE_SECONDS = 1.0
LONGEST_PAUSE_SECONDS = 300.0
# A guard that crashes so often in a row may do so because of what it remembers.
CRASHES_UNTIL_FORGOTTEN = 3
# Threads that hang in the kernel can't be ended. With so many of them, no new one is begun until one comes back.
MOST_HUNG_THREADS = 3

OWN_PART = "guard"  # the part of a finding about the guard itself

Perform = Callable[[str, Guard[Any, Any], Action], None]


@dataclass
class _Turn:
    """What one thread works on. A thread that was given up finds that its turn is not the post's any more, and ends."""

    busy_since: float | None = None  # monotonic


class Post:
    """Runs a guard.

    Args:
        guard: whose methods are called by one thread at a time, unless that thread hangs and is given up.
        perform: does an action of the guard, and never raises.
        monotonic: seconds that never go back.
    """

    def __init__(
        self,
        guard: Guard[Any, Any],
        keeper: Keeper,
        board: Board,
        perform: Perform,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self.guard = guard
        self._keeper, self._board, self._perform, self._monotonic = keeper, board, perform, monotonic
        self._lock = threading.Lock()  # of _turn and of what belongs to it
        self._stopping = threading.Event()
        self._memory = self._remembered()
        self._turn = _Turn()
        self._threads: list[threading.Thread] = []
        self._worker: threading.Thread | None = None  # of the present turn
        self._crashes = 0
        self._hangs = 0

    def start(self) -> None:
        """Begin with a thread of its own.

        Raises:
            RuntimeError: the system gives no thread; `watch` tries again.
        """
        turn = self._turn
        thread = threading.Thread(target=self._work, args=(turn,), name=f"guard-{self.guard.name}", daemon=True)
        thread.start()
        self._threads.append(thread)
        self._worker = thread

    def stop(self) -> None:
        """Begin no further round."""
        self._stopping.set()

    def watch(self) -> None:
        """Called about once a second: give up a thread that hangs, and begin another; begin one where there is none.

        Raises:
            RuntimeError: the system gives no thread; the next call tries again.
        """
        if self._worker is None or not self._worker.is_alive():
            self.start()
            return
        with self._lock:
            since = self._turn.busy_since
            waited = 0.0 if since is None else self._monotonic() - since
            if waited <= self.guard.deadline_seconds:
                return
            self._threads = [thread for thread in self._threads if thread.is_alive()]
            if len(self._threads) >= MOST_HUNG_THREADS:
                return
            self._turn, self._worker = _Turn(), None
            self._hangs += 1
        reason = f"a round did not end within {self.guard.deadline_seconds:g} s"
        self._board.event(self.guard.name, "hang", reason)
        self._report_itself(reason, waited)
        self.start()

    def one_round(self, turn: _Turn | None = None) -> None:
        """Sense, decide, act, once."""
        turn = turn or self._turn
        began = self._monotonic()
        turn.busy_since = began
        reading = self.guard.sense()
        decision = self.guard.decide(reading, self._memory, self._keeper.clock.now_seconds())
        with self._lock:
            if turn is not self._turn:  # given up meanwhile: another thread has this post now
                return
            self._memory = decision.memory
        self._keeper.remember(self.guard.name, self.guard.memory_to_json(decision.memory))
        self._board.round_ended(self.guard.name, decision.findings, self._monotonic() - began)
        for action in decision.actions:
            if turn is not self._turn or self._stopping.is_set():
                return
            self._perform(self.guard.name, self.guard, action)

    def _work(self, turn: _Turn) -> None:
        due = self._monotonic()
        while turn is self._turn and not self._stopping.wait(max(0.0, due - self._monotonic())):
            due = self._monotonic() + self.guard.period_seconds
            try:
                self.one_round(turn)
                self._crashes = 0
            except Exception as error:  # whatever a guard's mistake is, it goes on, and says so
                due = self._monotonic() + self._crashed(error, turn)
            finally:
                turn.busy_since = None

    def _crashed(self, error: Exception, turn: _Turn) -> float:
        """Report it; how long to wait."""
        if turn is not self._turn:
            return 0.0
        self._crashes += 1
        pause = min(FIRST_PAUSE_SECONDS * 2.0 ** min(self._crashes - 1, 20), LONGEST_PAUSE_SECONDS)
        log.error("guard %s crashed", self.guard.name, exc_info=error)
        reason = f"crashed: {type(error).__name__}: {str(error)[:200]}"
        self._board.event(self.guard.name, "crash", reason)
        self._report_itself(f"{reason}; next try in {pause:g} s", 0.0)
        if self._crashes == CRASHES_UNTIL_FORGOTTEN:
            self._memory = self.guard.first_memory()
        return max(pause, float(self.guard.period_seconds))

    def _report_itself(self, reason: str, round_seconds: float) -> None:
        evidence = {"crashes_in_a_row": self._crashes, "hangs": self._hangs}
        finding = Finding(OWN_PART, State.DEGRADED, reason, evidence, Repair.CHECK_PROGRAM)
        self._board.round_ended(self.guard.name, (finding,), round_seconds)

    def _remembered(self) -> Any:
        kept = self._keeper.memory(self.guard.name)
        if kept is None:
            return self.guard.first_memory()
        try:
            return self.guard.memory_from_json(kept)
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
            reason = f"what it remembered can't be read: {type(error).__name__}: {str(error)[:200]}"
            self._board.event(self.guard.name, "store", reason)
            return self.guard.first_memory()
