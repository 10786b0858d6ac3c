"""The one shape of all guards: sense → decide → act, each apart from the others."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, TypeVar

from guards.findings import Action, Decision

ReadingT = TypeVar("ReadingT")
MemoryT = TypeVar("MemoryT")


class Guard(Protocol[ReadingT, MemoryT]):
    """What the runner needs of a guard. A guard is used by one thread at a time.

    Attributes:
        name: unique, in events, metrics and on the status page.
        period_seconds: from the start of one round to the start of the next.
        deadline_seconds: a round that takes longer hangs: its thread is given up, and a new one starts.
    """

    name: str
    period_seconds: float
    deadline_seconds: float

    def sense(self) -> ReadingT:
        """Look. Everything that can fail alone fails alone: as None in the reading, with the reason beside it."""

    def decide(self, reading: ReadingT, memory: MemoryT, now_seconds: float) -> Decision[MemoryT]:
        """Judge. Pure: the same arguments give the same decision, and nothing is touched.

        Args:
            now_seconds: of the running clock (`guards/running_clock.py`): it goes on over restarts and reboots, never
                jumps, and stands while the box is off.
        """

    def act(self, action: Action) -> str:
        """Do it, and say in one line what was done.

        Raises:
            ActionFailed: it could not be done; the next round decides again.
        """

    def first_memory(self) -> MemoryT:
        """What `decide` is given the first time ever."""

    def memory_to_json(self, memory: MemoryT) -> Mapping[str, Any]:
        """The part of the memory that must outlive a reboot: latches, dwell times, cool-downs."""

    def memory_from_json(self, data: Mapping[str, Any]) -> MemoryT:
        """The reverse.

        Raises:
            ValueError, KeyError, TypeError: not what `memory_to_json` writes; then `first_memory` is taken.
        """


class ActionFailed(Exception):
    """An action could not be done; the message is one line for people."""
