"""How far a box's clock is off the operator's, from exchanges with it; and what is to be done. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

NANOSECONDS = 1_000_000_000


@dataclass(frozen=True)
class Exchange:
    """One question and its answer.

    Attributes:
        sent_unix_nanoseconds: the operator's clock as the question left.
        round_trip_nanoseconds: until the answer was there, by the monotonic clock.
        box_unix_nanoseconds: the box's clock in between.
    """

    sent_unix_nanoseconds: int
    round_trip_nanoseconds: int
    box_unix_nanoseconds: int


@dataclass(frozen=True)
class Offset:
    """A box's clock minus the operator's. The truth lies within ± uncertainty, whatever the way there and back take."""

    nanoseconds: int
    uncertainty_nanoseconds: int

    @property
    def seconds(self) -> float:
        """Positive: the box is ahead."""
        return self.nanoseconds / NANOSECONDS

    @property
    def uncertainty_seconds(self) -> float:
        """Half the round trip."""
        return self.uncertainty_nanoseconds / NANOSECONDS

    @property
    def known(self) -> bool:
        """It is larger than what the measurement leaves open."""
        return abs(self.nanoseconds) > self.uncertainty_nanoseconds

    def __str__(self) -> str:
        return f"{self.seconds:+.6f} ± {self.uncertainty_seconds:.6f} s"


def estimate(exchanges: Sequence[Exchange]) -> Offset:
    """From the exchange with the shortest round trip: its bounds are the tightest.

    Raises:
        ValueError: there is none.
    """
    best = min(exchanges, key=lambda one: one.round_trip_nanoseconds)
    half = (best.round_trip_nanoseconds + 1) // 2
    return Offset(best.box_unix_nanoseconds - best.sent_unix_nanoseconds - half, half)


class Verdict(str, Enum):
    """What `fleet time push` makes of a box."""

    SET = "set"
    RIGHT = "right"
    KEPT = "kept"


def decide(offset: Offset, keeper: str) -> Verdict:
    """What to do.

    Args:
        keeper: what keeps the clock to a source, e.g. "chronyd follows 10.0.0.1"; empty: nothing does.
    """
    if not offset.known:
        return Verdict.RIGHT
    return Verdict.KEPT if keeper else Verdict.SET
