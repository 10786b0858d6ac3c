"""How a stage's work goes: steps finished, how long they take now and usually. Source of the heartbeat."""

from __future__ import annotations

import random
import time
from collections import deque
from statistics import median

RECENT_STEPS = 32
# A sample of all steps since the start, each as likely to be in it as any other (reservoir sampling).
USUAL_STEPS = 256
# The share of time spent computing is taken over at least so long.
SHARE_SECONDS = 1.0


class WorkMeter:
    """Counts micro-batches. The event loop calls everything.

    Attributes:
        finished: micro-batches since the process started.
    """

    def __init__(self) -> None:
        self.finished = 0
        self._recent: deque[float] = deque(maxlen=RECENT_STEPS)
        self._usual: list[float] = []
        self._share_since = (time.monotonic(), 0.0)
        self._share = 0.0

    def end(self, seconds: float | None) -> None:
        """A micro-batch is computed.

        Args:
            seconds: that computing took; None if it was not computed to its end.
        """
        if seconds is None:
            return
        self.finished += 1
        self._recent.append(seconds)
        if len(self._usual) < USUAL_STEPS:
            self._usual.append(seconds)
        elif (place := random.randrange(self.finished)) < USUAL_STEPS:  # noqa: S311 - a sample, no secret
            self._usual[place] = seconds

    @property
    def step_seconds(self) -> float | None:
        """Median of the last micro-batches; None before the first."""
        return median(self._recent) if self._recent else None

    @property
    def usual_step_seconds(self) -> float | None:
        """Median over all micro-batches since the start, from a sample; None before the first."""
        return median(self._usual) if self._usual else None

    def busy_share(self, busy_seconds: float) -> float:
        """Share of time spent computing lately, 0…1.

        Args:
            busy_seconds: spent computing since the process started.
        """
        now = time.monotonic()
        since, busy_then = self._share_since
        if now - since >= SHARE_SECONDS:
            self._share = min(1.0, (busy_seconds - busy_then) / (now - since))
            self._share_since = (now, busy_seconds)
        return self._share
