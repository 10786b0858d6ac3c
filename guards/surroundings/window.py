"""A counter over a stretch of time: how much it grew within it. Pure."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Window:
    """Values of a counter that only grows; one that is smaller than before has begun anew (a reboot, another device).

    Attributes:
        samples: (running-clock seconds, value), oldest first, none older than was asked for but the first.
    """

    samples: tuple[tuple[float, float], ...] = ()

    def added(self, now_seconds: float, value: float, keep_seconds: float) -> Window:
        """With one more look at the counter."""
        samples = self.samples
        if samples and value < samples[-1][1]:
            samples = ()
        # one sample at or before the border stays, so that the window spans what was asked for
        first = max((i for i, (at, _) in enumerate(samples) if at <= now_seconds - keep_seconds), default=0)
        return Window((*samples[first:], (now_seconds, value)))

    @property
    def seconds(self) -> float:
        """How long a stretch is seen."""
        return self.samples[-1][0] - self.samples[0][0] if self.samples else 0.0

    @property
    def growth(self) -> float:
        """How much the counter grew in it."""
        return self.samples[-1][1] - self.samples[0][1] if self.samples else 0.0
