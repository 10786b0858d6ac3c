"""Waits between attempts to connect."""

from __future__ import annotations

import random


class Backoff:
    """Doubling waits with jitter, so that boxes that lost the same peer do not dial it in step.

    Args:
        first_seconds: the first wait.
        most_seconds: no wait is longer.
        at_once: the very first wait, and the first after a success, takes no time: a link that was there a moment ago
            is most likely to be there again.
    """

    def __init__(self, first_seconds: float, most_seconds: float, *, at_once: bool = False) -> None:
        self._first = first_seconds
        self._at_once = at_once
        self._fresh = True
        self._most = most_seconds
        self._next = first_seconds

    def reset(self) -> None:
        """An attempt succeeded: begin with the first wait again."""
        self._next = self._first
        self._fresh = True

    def next_seconds(self) -> float:
        """How long to wait now: between half and all of the current step."""
        fresh, self._fresh = self._fresh, False
        if fresh and self._at_once:
            return 0.0
        step = min(self._next, self._most)
        self._next = min(self._next * 2, self._most)
        return step * random.uniform(0.5, 1.0)  # noqa: S311 - jitter, no secret
