"""How far wall clocks are apart, from the times in heartbeats: a second opinion beside each box's own. Pure.

A heartbeat comes later than it was sent, never earlier, so of several the one that shows the box's clock farthest ahead
was delayed least. What that one's delay was, nobody can tell: a box whose every heartbeat takes a second looks a second
late. Samples are held against the monotonic clock here, so a jump of this wall clock moves all boxes at once, as it
should. Nothing but clocks is judged by it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import median

# A clock that was set back shows once the samples from before are gone: 10 s at four heartbeats a second.
SAMPLES = 40
# Fewer say nothing: a single one may have waited for anything.
LEAST_SAMPLES = 5
# Making, sending and reading a heartbeat, on a small box that is busy.
LEAST_UNCERTAINTY_SECONDS = 0.005
# Beyond it, and the uncertainty, a clock is said to be off; certificates, logs and users' time-outs bear less.
OFF_SECONDS = 1.0
# Below it, and the uncertainty, it is said to be right again; between the two nothing new is said.
RIGHT_SECONDS = 0.5


@dataclass(frozen=True)
class Offset:
    """A clock against another one.

    Attributes:
        seconds: ahead of it; negative: behind. uncertainty_seconds: how far the samples say that it may be wrong.
    """

    seconds: float
    uncertainty_seconds: float


@dataclass
class ClockSamples:
    """The last heartbeats of one box: its wall clock less the monotonic clock here when they came, in seconds."""

    _samples: deque[float] = field(default_factory=lambda: deque(maxlen=SAMPLES))

    def add(self, wall_unix_seconds: float, monotonic_seconds: float) -> None:
        """A heartbeat came."""
        self._samples.append(wall_unix_seconds - monotonic_seconds)

    def offset(self, wall_unix_seconds: float, monotonic_seconds: float) -> Offset | None:
        """Against the wall clock here, which shows this now; None as long as too few heartbeats came."""
        if len(self._samples) < LEAST_SAMPLES:
            return None
        least_delayed = max(self._samples)
        scatter = least_delayed - median(self._samples)
        seconds = least_delayed - (wall_unix_seconds - monotonic_seconds)
        return Offset(seconds, max(LEAST_UNCERTAINTY_SECONDS, scatter))


@dataclass(frozen=True)
class Comparison:
    """Clocks of a site beside each other.

    Attributes:
        agree: more than half of them agree, so whoever differs is wrong; else nobody can say who is.
        off: clock → how far it is from the others (or, where they don't agree, from the reference).
    """

    agree: bool
    off: Mapping[str, Offset]


def compare(offsets: Mapping[str, Offset], reference: str, off_before: frozenset[str]) -> Comparison:
    """Which clocks are off.

    Args:
        offsets: clock → against one and the same clock, `reference` (its own is 0). off_before: were off already.
    """
    middle = _largest_group(offsets)
    agree = 2 * len(middle) > len(offsets)
    true_seconds = median(offsets[name].seconds for name in middle) if agree else offsets[reference].seconds
    off = {}
    for name, offset in offsets.items():
        seconds = offset.seconds - true_seconds
        bound = (RIGHT_SECONDS if name in off_before else OFF_SECONDS) + offset.uncertainty_seconds
        if abs(seconds) > bound:
            off[name] = Offset(seconds, offset.uncertainty_seconds)
    return Comparison(agree, off)


def _largest_group(offsets: Mapping[str, Offset]) -> list[str]:
    """The most clocks that lie within `OFF_SECONDS`; of groups of one size the one that lies closest together."""
    names = sorted(offsets, key=lambda name: offsets[name].seconds)
    best: list[str] = []
    start = 0
    for end in range(len(names)):
        while offsets[names[end]].seconds - offsets[names[start]].seconds > OFF_SECONDS:
            start += 1
        group = names[start : end + 1]
        if (len(group), -_width(group, offsets)) > (len(best), -_width(best, offsets)):
            best = group
    return best


def _width(names: list[str], offsets: Mapping[str, Offset]) -> float:
    return offsets[names[-1]].seconds - offsets[names[0]].seconds if names else 0.0
