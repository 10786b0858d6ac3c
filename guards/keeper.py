"""Budgets, memories and the running clock together, for all threads of the guards; has them written down in time.

The disk is waited for by one who wants to pay from a budget, for a bounded time, and by nobody else: the lock here is
never held meanwhile (`guards/writer.py`).
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from guards.budgets import Budget, Ledger
from guards.deadline import DeadlineReader, Unreadable
from guards.running_clock import RunningClock
from guards.store import DamagedStore, Kept, Store
from guards.writer import Writer

log = logging.getLogger(__name__)

# Memories change often and matter little: an SD card is written once so often at most. What a budget pays for is
# written before it is done.
SAVE_SECONDS = 60.0
# A box that changes nothing is written so often all the same, for the running clock.
IDLE_SAVE_SECONDS = 600.0
# What must be durable before an action waits so long for it; then the action is not done. No guard's deadline is less.
CHARGE_SECONDS = 5.0
# supervisord kills what has not ended ten seconds after SIGTERM; the last state is worth a few of them.
CLOSE_SECONDS = 3.0
# A disk that is slow at boot is waited for; one that hangs must not keep the guards from beginning.
LOAD_SECONDS = 10.0


class BudgetSpent(Exception):
    """Not now; the message says when again."""


class Keeper:
    """What all guards share and must not forget.

    Args:
        store: None keeps nothing, as when guards only observe.
        budgets: by name.
        monotonic: seconds that never go back.
    """

    def __init__(
        self, store: Store | None, budgets: Mapping[str, Budget], monotonic: Callable[[], float] = time.monotonic
    ) -> None:
        self._store = store
        self._writer = None if store is None else Writer(store)
        self._budgets = dict(budgets)
        self._monotonic = monotonic
        self._lock = threading.Lock()  # of what follows; nobody waits for anything while holding it
        kept, self._unread = self._load()
        self.clock = RunningClock(kept.running_seconds, monotonic)
        self._ledger = kept.ledger
        self._memories = dict(kept.memories)
        self._saved_at = monotonic()
        self._changed = False
        self._told = ""

    @property
    def trouble(self) -> str:
        """Why nothing can be written down, or why what was kept could not be read until something is written; for
        people. Empty if all is well."""
        if self._writer is None:
            return self._unread
        return self._writer.trouble or ("" if self._writer.written else self._unread)

    @property
    def write_seconds(self) -> float:
        """How long the write under way has taken so far; 0 if there is none."""
        return 0.0 if self._writer is None else self._writer.under_way_seconds

    def memory(self, guard: str) -> Mapping[str, Any] | None:
        """What a guard gave the last time, or None."""
        with self._lock:
            return self._memories.get(guard)

    def remember(self, guard: str, memory: Mapping[str, Any]) -> None:
        """Take a guard's memory; written down within `SAVE_SECONDS` if it is another one.

        Raises:
            ValueError, TypeError: it can't be written as JSON, e.g. for a NaN: that is this guard's fault, and must not
                keep the memories and budgets of all from being written.
        """
        json.dumps(memory, allow_nan=False)
        with self._lock:
            if self._memories.get(guard) != memory:
                self._memories[guard] = memory
                self._changed = True

    def left(self) -> dict[str, int]:
        """Name of each budget → how many more it pays for now."""
        now = self.clock.now_seconds()
        with self._lock:
            return {name: self._ledger.left(name, budget, now) for name, budget in self._budgets.items()}

    def check(self, name: str) -> None:
        """Whether a budget pays now; nothing is charged.

        Raises:
            BudgetSpent: it does not. KeyError: no such budget.
        """
        with self._lock:
            self._check(name, self.clock.now_seconds())

    def charge(self, name: str, *, although_unwritten: bool = False) -> None:
        """Pay for an action before it is done; durable when this returns, so no crash and no reboot forgets it. Takes
        `CHARGE_SECONDS` at most.

        Args:
            although_unwritten: go on where the disk refuses to take it, as the action is what makes room.

        Raises:
            BudgetSpent: nothing is left, or it can't be written down: then it stays charged all the same, as it may yet
                come to be written, unless the disk hung already. KeyError: no such budget.
        """
        budget, now = self._budgets[name], self.clock.now_seconds()
        hung = self._writer is not None and self._writer.hung
        if hung and not although_unwritten:
            raise BudgetSpent(f"budget {name}: {self.trouble}")
        with self._lock:
            self._check(name, now)
            self._ledger = self._ledger.charged(name, budget, now)
            number = self._offer()
        if self._writer is None or hung:
            return
        failure = self._writer.wait(number, CHARGE_SECONDS)
        if failure and not although_unwritten:
            raise BudgetSpent(f"budget {name}: {failure}")

    def save_in_time(self) -> None:
        """Have written down what has changed, if it is time; called about once a second. Never waits."""
        trouble = self.trouble
        with self._lock:
            age = self._monotonic() - self._saved_at
            if age >= (SAVE_SECONDS if self._changed or trouble else IDLE_SAVE_SECONDS):
                self._offer()
        if bool(trouble) != bool(self._told):
            log.log(logging.ERROR if trouble else logging.INFO, "%s", trouble or "the store is written again")
            self._told = trouble

    def close(self) -> None:
        """Have all written down; waits `CLOSE_SECONDS` at most."""
        with self._lock:
            number = self._offer()
        if self._writer is not None and (failure := self._writer.wait(number, CLOSE_SECONDS)):
            log.error("at the end: %s", failure)

    def _check(self, name: str, now_seconds: float) -> None:
        budget = self._budgets[name]
        wait = self._ledger.next_seconds(name, budget, now_seconds)
        if wait <= 0:
            return
        if self._ledger.left(name, budget, now_seconds) > 0:
            raise BudgetSpent(f"budget {name}: {budget.apart_seconds:g} s from one to the next")
        hours = budget.window_seconds / 3600
        raise BudgetSpent(f"budget {name} is spent, {budget.most} in {hours:g} h: a person is needed")

    def _offer(self) -> int:
        """Hand the present state to the writer; its number there. The lock is held."""
        if self._writer is None:
            return 0
        self._saved_at = self._monotonic()
        self._changed = False
        return self._writer.offer(Kept(self.clock.now_seconds(), self._ledger, dict(self._memories)))

    def _load(self) -> tuple[Kept, str]:
        """The store's contents, and why there are none. A damaged or unreadable one leaves one of each budget: nobody
        gains restarts by damaging it."""
        nothing = Kept(0.0, Ledger({}), {})
        store = self._store
        if store is None:
            return nothing, ""
        reader = DeadlineReader(LOAD_SECONDS, 0.0)
        try:
            kept, trouble = reader.ask("store", lambda: _contents(store))
        except Unreadable as error:
            kept, trouble = None, f"{store.path}: cannot be read: {error}"
        finally:
            reader.close()
        if not trouble:
            return kept or nothing, ""
        log.error("%s", trouble)
        spent = {name: (0.0,) * (budget.most - 1) for name, budget in self._budgets.items()}
        return Kept(0.0, Ledger(spent), {}), trouble


def _contents(store: Store) -> tuple[Kept | None, str]:
    """What a store holds, None if nothing was ever kept, and why it can't be read. A damaged one is set aside."""
    try:
        return store.load(), ""
    except OSError as error:
        return None, f"{store.path}: cannot be read: {error.strerror or error}"
    except DamagedStore as error:
        trouble = str(error)
        try:
            trouble += f"; set aside as {store.set_aside().name}"
        except OSError as failure:
            trouble += f"; it can't be set aside: {failure.strerror or failure}"
        return None, trouble
