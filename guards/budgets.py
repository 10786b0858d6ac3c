"""How often an action may be done. Pure; the running clock makes it hold over any number of crashes and reboots."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Budget:
    """At most `most` times within any `window_seconds`, and never sooner than `apart_seconds` after the last time."""

    most: int
    window_seconds: float
    apart_seconds: float = 0.0


@dataclass(frozen=True)
class Ledger:
    """What was spent.

    Attributes:
        spent: name of a budget → running-clock seconds of what it paid for, oldest first.
    """

    spent: Mapping[str, tuple[float, ...]]

    def left(self, name: str, budget: Budget, now_seconds: float) -> int:
        """How many more it would pay for within this window, were they far enough apart."""
        kept = self._kept(name, budget, now_seconds)
        return max(0, budget.most - sum(now_seconds - each < budget.window_seconds for each in kept))

    def charged(self, name: str, budget: Budget, now_seconds: float) -> Ledger:
        """The ledger after one more.

        Raises:
            ValueError: it does not pay now; ask `next_seconds` first.
        """
        if self.next_seconds(name, budget, now_seconds) > 0:
            raise ValueError(f"budget {name} does not pay now")
        kept = self._kept(name, budget, now_seconds)
        return Ledger({**self.spent, name: (*kept, now_seconds)})

    def next_seconds(self, name: str, budget: Budget, now_seconds: float) -> float:
        """How long until it pays again; 0 if it would now. Infinite for a budget of nothing."""
        if budget.most < 1:
            return float("inf")
        kept = self._kept(name, budget, now_seconds)
        waits = [0.0]
        if len(kept) >= budget.most:
            waits.append(budget.window_seconds - (now_seconds - kept[-budget.most]))  # as `left` counts, bit by bit
        if kept:
            waits.append(budget.apart_seconds - (now_seconds - kept[-1]))
        return max(waits)

    def to_json(self) -> dict[str, list[float]]:
        """For the store."""
        return {name: list(times) for name, times in self.spent.items()}

    @staticmethod
    def from_json(data: Mapping[str, Sequence[float]]) -> Ledger:
        """From the store.

        Raises:
            ValueError, TypeError: not what `to_json` writes.
        """
        return Ledger({str(name): tuple(sorted(float(each) for each in times)) for name, times in data.items()})

    def _kept(self, name: str, budget: Budget, now_seconds: float) -> tuple[float, ...]:
        """Times that still count."""
        longest = max(budget.window_seconds, budget.apart_seconds)
        return tuple(each for each in self.spent.get(name, ()) if now_seconds - each < longest)
