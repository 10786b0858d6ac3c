"""Watches the site's wall clocks: what `clocks.py` finds becomes numbers for pages, metrics, and an event for each
clock that goes wrong or right."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Protocol

from prometheus_client import Gauge

from fleet.coordinator.clocks import ClockSamples, Comparison, Offset, compare

# How often clocks are compared.
COMPARE_SECONDS = 2.0


class Tell(Protocol):
    """`Context.event`."""

    def __call__(self, kind: str, text: str, *, box: str) -> None:
        """Something happened."""


class ClockWatch:
    """The boxes' clocks and the coordinator's own.

    Args:
        own: the coordinator's box. boxes: those whose heartbeats come.
        offsets, tell: metric and events.
        wall, monotonic: seconds.

    Attributes:
        off: clocks that are off now.
    """

    def __init__(
        self,
        own: str,
        boxes: Iterable[str],
        offsets: Gauge,
        tell: Tell,
        *,
        wall: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._own, self._offsets, self._tell = own, offsets, tell
        self._wall, self._monotonic = wall, monotonic
        self._samples = {box: ClockSamples() for box in boxes}
        self._shown: set[str] = set()  # boxes that the metric has a series of
        self._compare_at = monotonic() + COMPARE_SECONDS
        self.off: frozenset[str] = frozenset()

    def heard(self, box: str, wall_unix_seconds: float) -> None:
        """A heartbeat came just now, made when the box's clock showed this."""
        self._samples[box].add(wall_unix_seconds, self._monotonic())

    def forget(self, box: str) -> None:
        """Its link has ended: what it said ages."""
        self._samples[box] = ClockSamples()

    def offset(self, box: str) -> Offset | None:
        """A box's clock against the coordinator's; None while it is not known."""
        return self._samples[box].offset(self._wall(), self._monotonic())

    def check(self) -> None:
        """Compare, if it is time; called often."""
        if self._monotonic() >= self._compare_at:
            self._compare_at = self._monotonic() + COMPARE_SECONDS
            self._check()

    def _check(self) -> None:
        known = {box: offset for box in self._samples if (offset := self.offset(box)) is not None}
        for box in self._shown - known.keys():
            self._offsets.remove(box)  # an old number is none
        for box, offset in known.items():
            self._offsets.labels(box).set(offset.seconds)
        self._shown = set(known)
        # a stage on the coordinator's own box reads the same clock, which must not count twice
        clocks = {name: offset for name, offset in known.items() if name != self._own} | {self._own: Offset(0.0, 0.0)}
        found = compare(clocks, self._own, self.off)
        for box in sorted(found.off.keys() - self.off):
            self._tell("box-clock-off", _off_text(box, self._own, found), box=box)
        right = (self.off - found.off.keys()) & clocks.keys()
        for box in sorted(right):
            self._tell("box-clock-right", f"{box}: its clock agrees with the others again", box=box)
        self.off = (self.off | found.off.keys()) - right


def _off_text(box: str, own: str, found: Comparison) -> str:
    offset = found.off[box]
    ahead = "ahead of" if offset.seconds > 0 else "behind"
    text = f"{box}: its clock is {abs(offset.seconds):.1f} s (± {offset.uncertainty_seconds:.3f} s) {ahead}"
    if found.agree:
        return f"{text} the others'"
    return f"{text} that of {own}; no majority of the clocks agrees, so either may be wrong"
