"""Does what guards decide, if their budgets allow; where they only observe, it says what it would do."""

from __future__ import annotations

import logging
from typing import Any, Protocol

from guards.board import Board
from guards.findings import Action, Repair
from guards.guard import ActionFailed, Guard
from guards.keeper import BudgetSpent, Keeper

log = logging.getLogger(__name__)

# They take as long as a drain: on a thread of their own, and with the coordinator's lease where users would notice.
PROGRAM_REPAIRS = frozenset({Repair.RESTART_PROGRAM, Repair.KILL_PROGRAM, Repair.START_PROGRAM})


class ProgramRepairs(Protocol):
    """Whoever stops and starts programs (`guards/restarts.py`)."""

    def begin(self, guard: str, action: Action) -> None:
        """Take an action over; what becomes of it is told to the board. Never blocks for long, never raises."""


class Performer:
    """Called by the guards' threads.

    Args:
        programs: for `PROGRAM_REPAIRS`; None: guards only observe, nothing at all is done.
    """

    def __init__(self, keeper: Keeper, board: Board, programs: ProgramRepairs | None) -> None:
        self._keeper, self._board, self._programs = keeper, board, programs

    def perform(self, name: str, guard: Guard[Any, Any], action: Action) -> None:
        """Do an action of a guard, and tell the board what became of it."""
        if self._programs is None:
            self._board.acted(name, "would", action, "not done, as guards only observe")
        elif action.repair in PROGRAM_REPAIRS:
            self._programs.begin(name, action)
        else:
            self._act(name, guard, action)

    def _act(self, name: str, guard: Guard[Any, Any], action: Action) -> None:
        try:
            if action.budget:
                # what makes room on a full disk can't wait for the disk to take a note of it
                self._keeper.charge(action.budget, although_unwritten=action.repair is Repair.DROP_OLD_LOGS)
            done = guard.act(action)
        except BudgetSpent as error:
            self._board.acted(name, "refused", action, str(error))
        except ActionFailed as error:
            self._board.acted(name, "failed", action, str(error))
        except Exception as error:  # a mistake in one action must not end the guard's round
            log.exception("guard %s: action %s", name, action.repair.value)
            self._board.acted(name, "failed", action, f"{type(error).__name__}: {str(error)[:200]}")
        else:
            self._board.acted(name, "done", action, done)
