"""Budgets, memories and the running clock together, for all threads of the guards; writes them down in time."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from guards.budgets import Budget, Ledger
from guards.running_clock import RunningClock
from guards.store import DamagedStore, Kept, Store

log = logging.getLogger(__name__)

# Memories change often and matter little: an SD card is written once so often at most. What a budget pays for is
# written before it is done.
SAVE_SECONDS = 60.0
# A box that changes nothing is written so often all the same, for the running clock.
IDLE_SAVE_SECONDS = 600.0


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
        self._budgets = dict(budgets)
        self._monotonic = monotonic
        self._lock = threading.Lock()
        self.trouble = ""  # why nothing can be written down, for the status page
        kept = self._load()
        self.clock = RunningClock(kept.running_seconds, monotonic)
        self._ledger = kept.ledger
        self._memories = dict(kept.memories)
        self._saved_at = monotonic()
        self._changed = False

    def memory(self, guard: str) -> Mapping[str, Any] | None:
        """What a guard gave the last time, or None."""
        with self._lock:
            return self._memories.get(guard)

    def remember(self, guard: str, memory: Mapping[str, Any]) -> None:
        """Take a guard's memory; written down within `SAVE_SECONDS` if it is another one."""
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
        """Pay for an action before it is done; durable when this returns, so no crash and no reboot forgets it.

        Args:
            although_unwritten: go on where the disk refuses to take it, as the action is what makes room.

        Raises:
            BudgetSpent: nothing is left, or it can't be written down. KeyError: no such budget.
        """
        budget, now = self._budgets[name], self.clock.now_seconds()
        with self._lock:
            self._check(name, now)
            self._ledger = self._ledger.charged(name, budget, now)  # stays charged in memory even if the disk refuses
            self._save()
            if self.trouble and not although_unwritten:
                raise BudgetSpent(f"budget {name}: {self.trouble}")

    def save_in_time(self) -> None:
        """Write down what has changed, if it is time; called about once a second."""
        with self._lock:
            age = self._monotonic() - self._saved_at
            if age >= (SAVE_SECONDS if self._changed or self.trouble else IDLE_SAVE_SECONDS):
                self._save()

    def close(self) -> None:
        """Write all down."""
        with self._lock:
            self._save()

    def _check(self, name: str, now_seconds: float) -> None:
        budget = self._budgets[name]
        wait = self._ledger.next_seconds(name, budget, now_seconds)
        if wait <= 0:
            return
        if self._ledger.left(name, budget, now_seconds) > 0:
            raise BudgetSpent(f"budget {name}: {budget.apart_seconds:g} s from one to the next")
        hours = budget.window_seconds / 3600
        raise BudgetSpent(f"budget {name} is spent, {budget.most} in {hours:g} h: a person is needed")

    def _save(self) -> None:
        if self._store is None:
            return
        self._saved_at = self._monotonic()
        try:
            self._store.save(Kept(self.clock.now_seconds(), self._ledger, self._memories))
        except OSError as error:
            self.trouble = f"{self._store.path}: cannot be written: {error.strerror or error}"
            log.error("%s", self.trouble)
            return
        self.trouble = ""
        self._changed = False

    def _load(self) -> Kept:
        """The store's contents. A damaged one leaves one of each budget: nobody gains restarts by damaging it."""
        nothing = Kept(0.0, Ledger({}), {})
        if self._store is None:
            return nothing
        try:
            return self._store.load() or nothing
        except OSError as error:
            self.trouble = f"{self._store.path}: cannot be read: {error.strerror or error}"
        except DamagedStore as error:
            self.trouble = str(error)
            try:
                self.trouble += f"; set aside as {self._store.set_aside().name}"
            except OSError as failure:
                self.trouble += f"; it can't be set aside: {failure.strerror or failure}"
        log.error("%s", self.trouble)
        spent = {name: (0.0,) * (budget.most - 1) for name, budget in self._budgets.items()}
        return Kept(0.0, Ledger(spent), {})
