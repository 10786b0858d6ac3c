"""Stops, kills and starts programs through supervisord: one at a time, paid by a budget, and for a program that still
serves only with a lease from the coordinator."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

from fleet.provision.agent.errors import AgentError
from guards.board import Board
from guards.findings import Action, Repair
from guards.guard import ActionFailed
from guards.keeper import BudgetSpent, Keeper

log = logging.getLogger(__name__)

LOOK_SECONDS = 0.5


class LeaseRefused(Exception):
    """The coordinator does not allow it now, or can't be asked; the message says why."""


class Leases(Protocol):
    """The coordinator's permission to take this box out for a while; one a pipeline (`docs/architecture.md`)."""

    def take(self, because: str) -> AbstractContextManager[None]:
        """Held inside the `with`, given back after it.

        Raises:
            LeaseRefused: see there.
        """


class Supervisor(Protocol):
    """What is needed of supervisord; `fleet.provision.agent.rpc.SupervisorRpc` has it. All raise AgentError."""

    def programs(self) -> Mapping[str, Mapping[str, Any]]:
        """Program name → ProcessInfo."""

    def stop_group(self, group: str) -> None:
        """Ask to stop; does not wait."""

    def start_group(self, group: str) -> None:
        """Ask to start; does not wait."""


@dataclass(frozen=True)
class RestartTiming:
    """How long steps may take.

    Attributes:
        stop_seconds: supervisord kills what has not stopped by then. ready_seconds: from the start until healthy.
    """

    stop_seconds: float
    ready_seconds: float


class Restarts:
    """Takes one program action at a time.

    Args:
        healthy: whether a program that runs is ready to serve, by its name.
        monotonic, sleep: seconds.
    """

    def __init__(
        self,
        supervisor: Supervisor,
        leases: Leases,
        keeper: Keeper,
        board: Board,
        *,
        timing: RestartTiming,
        healthy: Callable[[str], bool],
        monotonic: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._supervisor, self._leases, self._keeper, self._board = supervisor, leases, keeper, board
        self._timing, self._healthy, self._monotonic, self._sleep = timing, healthy, monotonic, sleep
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._target = ""

    def begin(self, guard: str, action: Action) -> None:
        """Take an action over; the same target's is dropped while one is under way, another's is refused."""
        with self._lock:
            if self._thread is not None and self._thread.is_alive():
                if self._target != action.target:
                    self._board.acted(guard, "refused", action, f"{self._target} is being restarted")
                return
            thread = threading.Thread(target=self.run, args=(guard, action), name="restarts", daemon=True)
            try:
                thread.start()
            except RuntimeError as error:  # no thread to be had, as at pids.max: the guard asks again
                self._board.acted(guard, "failed", action, str(error))
                return
            self._target, self._thread = action.target, thread

    def run(self, guard: str, action: Action) -> None:
        """Do it, and tell the board."""
        try:
            if action.budget:
                self._keeper.check(action.budget)  # before the coordinator is asked
            if action.arguments.get("needs_lease", True):
                with self._leases.take(action.because):
                    text = self._pay_and_do(action)
            else:
                text = self._pay_and_do(action)
        except (BudgetSpent, LeaseRefused) as error:
            self._board.acted(guard, "refused", action, str(error))
        except (ActionFailed, AgentError) as error:
            self._board.acted(guard, "failed", action, str(error))
        except Exception as error:  # a mistake here must not end without a word
            log.exception("guard %s: action %s", guard, action.repair.value)
            self._board.acted(guard, "failed", action, f"{type(error).__name__}: {str(error)[:200]}")
        else:
            self._board.acted(guard, "done", action, text)

    def _pay_and_do(self, action: Action) -> str:
        if action.budget:
            self._keeper.charge(action.budget)
        began, name = self._monotonic(), action.target
        before = self._info(name)
        if action.repair is Repair.KILL_PROGRAM:
            self._kill(before)
        elif action.repair is Repair.RESTART_PROGRAM:
            self._supervisor.stop_group(name)
            self._until(lambda: self._info(name)["pid"] == 0, self._timing.stop_seconds, f"{name} has stopped")
        if action.repair is not Repair.KILL_PROGRAM:  # supervisord starts by itself what was killed
            self._supervisor.start_group(name)

        def new_one_is_healthy() -> bool:
            info = self._info(name)
            return info["pid"] not in (0, before["pid"]) and self._healthy(name)

        self._until(new_one_is_healthy, self._timing.ready_seconds, f"{name} is healthy")
        return f"healthy again after {self._monotonic() - began:.1f} s"

    def _kill(self, info: Mapping[str, Any]) -> None:
        """SIGKILL: a process that is stopped or hangs hears nothing else."""
        if info["pid"] == 0:
            raise ActionFailed(f"{info['name']} does not run")
        try:
            os.kill(int(info["pid"]), signal.SIGKILL)
        except OSError as error:
            raise ActionFailed(f"process {info['pid']}: {error.strerror or error}") from None

    def _info(self, name: str) -> Mapping[str, Any]:
        programs = self._supervisor.programs()
        if name not in programs:
            raise ActionFailed(f"supervisord has no program {name}; it has {', '.join(sorted(programs)) or 'none'}")
        return programs[name]

    def _until(self, condition: Callable[[], bool], seconds: float, what: str) -> None:
        end = self._monotonic() + seconds
        while not condition():
            if self._monotonic() >= end:
                raise ActionFailed(f"not within {seconds:g} s: {what}")
            self._sleep(LOOK_SECONDS)
