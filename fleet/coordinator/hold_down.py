"""A box that keeps dying is taken back later each time. Pure; times are seconds of one monotonic clock."""

from __future__ import annotations

from dataclasses import dataclass

# 2^n times the first hold-down; far above the longest one of any inventory, and no float overflow
MOST_DOUBLINGS = 64


@dataclass
class HoldDown:
    """The hold-down of one box.

    Attributes:
        first_seconds: after the first death. most_seconds: it doubles up to this. forget_seconds: a box that has
            lived for so long after its last hold-down starts again with the first one.
        deaths: that count. until: when the box may be taken back; `-inf` without a death.
    """

    first_seconds: float
    most_seconds: float
    forget_seconds: float
    deaths: int = 0
    until: float = float("-inf")

    def died(self, now: float) -> None:
        """A death: hold the box down, longer than the last time."""
        self._forget(now)
        self.deaths += 1
        doubled = self.first_seconds * 2 ** min(self.deaths - 1, MOST_DOUBLINGS)
        self.until = max(self.until, now + min(doubled, self.most_seconds))

    def remaining(self, now: float) -> float:
        """Seconds that it lasts still; 0 when it is over."""
        return min(max(0.0, self.until - now), self.most_seconds)

    def restore(self, now: float, deaths: int, remaining: float) -> None:
        """Take up what an earlier process had kept: monotonic clocks do not outlive their machine's boot."""
        self.deaths, self.until = deaths, now + remaining if deaths else float("-inf")

    def _forget(self, now: float) -> None:
        if self.deaths and now - self.until >= self.forget_seconds:
            self.deaths, self.until = 0, float("-inf")
