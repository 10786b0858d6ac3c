"""Guards that hang: their process lives, and no round ends. Who watches the watchers is the unit's small parent.

It touches the guards' program alone, by its name, through supervisord, and never another one. SIGKILL at once: guards
that hang hear nothing else, and what must not be lost they have written before they acted.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from fleet.provision.agent.errors import AgentError
from guards.beat import Beat, read_beat
from guards.budgets import Budget, Ledger
from guards.settings import DAY_SECONDS

PROGRAM = "guards"  # supervisord's name of them
# After a box that stood still (a paused machine, a frozen control group) goes on, guards need some seconds for their
# next sign; so they must still hang this share of `allowed_seconds` later.
CONFIRM_SHARE = 0.25
# Guards that hang again and again are a person's job: the box serves without them.
KILLS = Budget(most=5, window_seconds=DAY_SECONDS)
KILL_BUDGET = "kill-guards"


class Programs(Protocol):
    """What is needed of supervisord (`guards/parent.py`); raises AgentError."""

    def programs(self) -> Mapping[str, Mapping[str, Any]]:
        """Program name → ProcessInfo."""

    def kill_group(self, group: str) -> None:
        """SIGKILL to its processes; supervisord starts it again by itself."""


@dataclass(frozen=True)
class Suspicion:
    """Guards that seemed to hang. beat: their sign of life then. since_seconds: monotonic, when first too old."""

    beat: Beat
    since_seconds: float


def judge_guards(
    beat: Beat | None, pid: int, suspicion: Suspicion | None, now_seconds: float
) -> tuple[bool, Suspicion | None]:
    """Whether guards hang, and what to remember for the next look. Pure.

    Nothing can be said, so nothing is done, without a sign of life of this very process: an older release writes none,
    and one that has just started has not yet.

    Args:
        beat: the last sign of life. pid: of the guards that supervisord runs; 0: none.
        suspicion: what this gave the last time.
        now_seconds: monotonic.
    """
    if beat is None or pid <= 0 or beat.pid != pid:
        return False, None
    if beat.round_seconds > now_seconds or now_seconds - beat.round_seconds <= beat.allowed_seconds:
        return False, None  # in the future: of another boot
    if suspicion is None or suspicion.beat != beat:
        return False, Suspicion(beat, now_seconds)
    return now_seconds - suspicion.since_seconds >= CONFIRM_SHARE * beat.allowed_seconds, suspicion


class GuardsWatch:
    """Looks at the guards on a thread of its own, so that systemd's pings never wait for it.

    Args:
        path: of the sign of life.
        tell: told, in one line, what was done or why not.
    """

    def __init__(
        self,
        path: Path,
        supervisor: Programs,
        tell: Callable[[str], None] = lambda text: print(text, file=sys.stderr, flush=True),
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._path, self._supervisor, self._tell, self._monotonic = path, supervisor, tell, monotonic
        self._suspicion: Suspicion | None = None
        self._ledger = Ledger({})
        self._refused: Beat | None = None  # told already that the budget does not allow it
        self._thread: threading.Thread | None = None

    def begin(self) -> None:
        """Look once, unless the last look has not come back yet; never waits, raises nothing."""
        if self._thread is not None and self._thread.is_alive():
            return
        self._thread = threading.Thread(target=self.look, name="guards-watch", daemon=True)
        try:
            self._thread.start()
        except RuntimeError as error:  # no thread to be had: the next round tries again
            self._tell(f"guards are not watched: {error}")

    def look(self) -> None:
        """Look, and kill guards that hang."""
        beat = read_beat(self._path)
        if beat is None:
            self._suspicion = None
            return
        try:
            pid = int(self._supervisor.programs().get(PROGRAM, {}).get("pid", 0))
            hangs, self._suspicion = judge_guards(beat, pid, self._suspicion, self._monotonic())
            if hangs:
                self._kill(beat)
        except AgentError as error:
            self._tell(f"guards: {error}")

    def _kill(self, beat: Beat) -> None:
        now = self._monotonic()
        reason = f"no round of the guards (process {beat.pid}) has ended for {now - beat.round_seconds:.0f} s"
        if self._ledger.next_seconds(KILL_BUDGET, KILLS, now) > 0:
            if self._refused != beat:
                self._tell(f"{reason}; killed {KILLS.most} times within a day already: a person is needed")
            self._refused = beat
            return
        self._ledger = self._ledger.charged(KILL_BUDGET, KILLS, now)
        self._suspicion = None
        self._tell(f"{reason}: killed, supervisord starts them again")
        self._supervisor.kill_group(PROGRAM)
