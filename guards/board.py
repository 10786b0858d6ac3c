"""What the guards last found and did, for the status page, metrics and `--observe`. Thread-safe; holds no history
but the last events."""

from __future__ import annotations

import logging
import re
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from guards.findings import Action, Finding, State, Value

log = logging.getLogger(__name__)

MOST_EVENTS = 200
# The same thing again within it is counted, and no event of its own: a refused restart is decided anew every round.
REPEAT_SECONDS = 600.0

# Of these kinds, texts that differ in figures alone ("for 61 s", "for 63 s") are the same thing again.
SAME_BUT_FOR_FIGURES = frozenset({"refused", "failed", "would", "crash", "hang"})
_FIGURES = re.compile(r"\d+(\.\d+)?")
LARGEST_FIGURE = 2**63  # what is larger no sensor has measured

Kind = Literal["state", "done", "failed", "refused", "would", "crash", "hang", "store"]
KINDS: tuple[Kind, ...] = ("state", "done", "failed", "refused", "would", "crash", "hang", "store")


@dataclass(frozen=True)
class Event:
    """Something that happened.

    Attributes:
        unix_seconds: by the box's wall clock, which may be wrong. running_seconds: by the guards' own clock.
        times: how often within `REPEAT_SECONDS` of the first time.
    """

    unix_seconds: float
    running_seconds: float
    guard: str
    kind: Kind
    text: str
    times: int = 1


@dataclass(frozen=True)
class Standing:
    """How a guard itself stands.

    Attributes:
        findings: of its last round, in its order.
        rounds: finished. round_seconds: the last one's length.
        at_seconds: monotonic, when the last round ended; None before the first.
    """

    findings: tuple[Finding, ...] = ()
    rounds: int = 0
    round_seconds: float = 0.0
    at_seconds: float | None = None

    @property
    def state(self) -> State:
        """The worst of its parts; initialising before the first round."""
        if self.at_seconds is None:
            return State.INITIALISING
        return max((finding.state for finding in self.findings), key=lambda s: s.severity, default=State.UNSUPPORTED)


class Board:
    """Written by the guards' threads, read by everyone.

    Args:
        guards: their names, in the order of the page.
        running_seconds: of the running clock.
        wall, monotonic: seconds.
    """

    def __init__(
        self,
        guards: Iterable[str],
        running_seconds: Callable[[], float],
        wall: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._running_seconds, self._wall, self._monotonic = running_seconds, wall, monotonic
        self._lock = threading.Lock()
        self._standings = {name: Standing() for name in guards}
        self._events: deque[Event] = deque(maxlen=MOST_EVENTS)
        self._counts = Counter({(name, kind): 0 for name in self._standings for kind in KINDS})

    def round_ended(self, guard: str, findings: tuple[Finding, ...], round_seconds: float) -> None:
        """A guard has looked and judged; parts whose state is another one now make an event."""
        findings = tuple(presentable(finding) for finding in findings)
        with self._lock:
            before = self._standings[guard]
            self._standings[guard] = Standing(findings, before.rounds + 1, round_seconds, self._monotonic())
        old = {finding.part: finding.state for finding in before.findings}
        for finding in findings:
            was = old.get(finding.part, State.HEALTHY if before.at_seconds else State.INITIALISING)
            if finding.state is not was and not (before.at_seconds is None and finding.state.severity <= 1):
                reason = f": {finding.reason}" if finding.reason else ""
                self.event(guard, "state", f"{finding.part}: {was.value} → {finding.state.value}{reason}")

    def acted(self, guard: str, kind: Kind, action: Action, text: str) -> None:
        """An action was done, failed, was refused, or would have been done."""
        self.event(guard, kind, f"{action.repair.value} {action.target}: {text} ({action.because})")

    def event(self, guard: str, kind: Kind, text: str) -> None:
        """Take down what happened: log line, counter and event."""
        now, text = self._running_seconds(), _encodable(text)
        with self._lock:
            self._counts[guard, kind] += 1
            for place in range(len(self._events) - 1, -1, -1):
                known = self._events[place]
                if now - known.running_seconds >= REPEAT_SECONDS:
                    break
                if (known.guard, known.kind) == (guard, kind) and _same(kind, known.text, text):
                    self._events[place] = replace(known, times=known.times + 1)
                    return
            self._events.append(Event(self._wall(), now, guard, kind, text))
        log.log(logging.INFO if kind in ("state", "done", "would") else logging.WARNING, "%s %s: %s", guard, kind, text)

    def standings(self) -> Mapping[str, Standing]:
        """How every guard stands now."""
        with self._lock:
            return dict(self._standings)

    def events(self) -> tuple[Event, ...]:
        """The last ones, oldest first."""
        with self._lock:
            return tuple(self._events)

    def counts(self) -> Mapping[tuple[str, Kind], int]:
        """(guard, kind) → how often, since the start of the process; every pair is there from the start."""
        with self._lock:
            return dict(self._counts)


def presentable(finding: Finding) -> Finding:
    """A finding that every page can show: names of files and links may be bytes that are no text, and figures that are
    none (NaN, infinite, larger than anything measured) are unknown. Pure."""
    evidence = {key: _figure(value) for key, value in finding.evidence.items()}
    return replace(finding, part=_encodable(finding.part), reason=_encodable(finding.reason), evidence=evidence)


def _figure(value: Value) -> Value:
    if isinstance(value, str):
        return _encodable(value)
    if value is None or isinstance(value, bool):
        return value
    return value if -LARGEST_FIGURE <= value <= LARGEST_FIGURE else None  # NaN is in no interval


def _encodable(text: str) -> str:
    return text.encode("utf-8", "replace").decode("utf-8")


def _same(kind: Kind, one: str, other: str) -> bool:
    if kind not in SAME_BUT_FOR_FIGURES:
        return one == other
    return _FIGURES.sub("#", one) == _FIGURES.sub("#", other)
