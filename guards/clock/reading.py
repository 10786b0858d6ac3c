"""What the clock guard looks at in one round."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from guards.clock.chrony import ChronyReading
from guards.clock.sntp import SntpReading
from guards.clock.wall import WallReading


@dataclass(frozen=True)
class PeerSkew:
    """This box's clock against another's, from heartbeats.

    Attributes:
        skew_seconds: positive: this box's is ahead.
        uncertainty_seconds: half of the round trip it was measured with.
    """

    skew_seconds: float
    uncertainty_seconds: float


class PeerClocks(Protocol):
    """Whoever compares this box's clock with those of other boxes."""

    def skews(self) -> Mapping[str, PeerSkew]:
        """Box → its skew, of late; empty while there is nothing to compare with. Never blocks for long."""


@dataclass(frozen=True)
class ClockReading:
    """One look.

    Attributes:
        sntp: None: the time servers were not asked, as chronyd knows better, or there are none.
        timesyncd_seconds_ago: when systemd-timesyncd last set the clock; None: it never did.
        kernel_synchronised: see `guards/clock/kernel.py`.
        skews: other boxes' opinions. skews_reason: why there are none.
    """

    wall: WallReading
    chrony: ChronyReading
    sntp: SntpReading | None = None
    timesyncd_seconds_ago: float | None = None
    kernel_synchronised: bool | None = None
    skews: Mapping[str, PeerSkew] = field(default_factory=dict)
    skews_reason: str = ""
