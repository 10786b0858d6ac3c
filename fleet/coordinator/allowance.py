"""How often something may happen: a stock that refills. Pure; times are seconds of one monotonic clock."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Allowance:
    """A stock of `burst`, refilled at `per_second`.

    Attributes:
        left: of the stock, when it was last taken from, at `at`.
    """

    burst: float
    per_second: float
    left: float
    at: float

    @classmethod
    def full(cls, burst: float, per_second: float, now: float) -> Allowance:
        """Nothing has been taken yet."""
        return cls(burst, per_second, burst, now)

    def take(self, now: float) -> bool:
        """Take one; False if there is none left."""
        self.left = min(self.burst, self.left + (now - self.at) * self.per_second)
        self.at = now
        if self.left < 1:
            return False
        self.left -= 1
        return True
