"""First come, first served places of a pipeline: as many sequences as it computes at once, a bounded queue behind."""

from __future__ import annotations

import asyncio
from collections import deque


class QueueFullError(Exception):
    """More sequences wait than may."""


class Ticket:
    """A claim to one place. Release it in any case, granted or not; releasing twice is harmless."""

    def __init__(self, queue: AdmissionQueue) -> None:
        self._queue = queue
        self.granted = asyncio.Event()
        self.released = False

    async def wait(self) -> None:
        """Return when the place is ours."""
        await self.granted.wait()

    def release(self) -> None:
        """Give the place, or the claim to it, back."""
        if not self.released:
            self.released = True
            self._queue.leave(self)


class AdmissionQueue:
    """Places of one pipeline.

    Args:
        places: sequences computed at once, ≥ 1.
        max_waiting: sequences that may wait for a place.
    """

    def __init__(self, places: int, max_waiting: int) -> None:
        self._places = places
        self._max_waiting = max_waiting
        self._waiting: deque[Ticket] = deque()
        self.active = 0

    @property
    def waiting(self) -> int:
        """Sequences that wait for a place."""
        return len(self._waiting)

    def enter(self, sequences: int) -> list[Ticket]:
        """Claim places for all sequences of a request, or for none.

        Raises:
            QueueFullError: too many would have to wait.
        """
        free = self._places - self.active
        if len(self._waiting) + max(0, sequences - free) > self._max_waiting:
            raise QueueFullError
        return self.enter_again(sequences)

    def enter_again(self, sequences: int) -> list[Ticket]:
        """Claim places, however many wait, for a request that had been let in before the gateway restarted."""
        tickets = [Ticket(self) for _ in range(sequences)]
        self._waiting.extend(tickets)
        self._grant()
        return tickets

    def leave(self, ticket: Ticket) -> None:
        """Called by `Ticket.release`."""
        if ticket.granted.is_set():
            self.active -= 1
            self._grant()
        else:
            self._waiting.remove(ticket)

    def _grant(self) -> None:
        while self._waiting and self.active < self._places:
            self.active += 1
            self._waiting.popleft().granted.set()
