"""What successive measurements of one server say: the best offset, its jitter, the clock's drift. Pure."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

KEPT = 32  # measurements
FILTERED = 8  # newest of them that the offset is taken from (RFC 5905 § 10, clock filter)
TOLERANCE_PPM = 15.0  # by which a measurement loses worth with age (RFC 5905, PHI)
LEAST_FOR_DRIFT = 5
LEAST_SPAN_SECONDS = 64.0


@dataclass(frozen=True)
class Sample:
    """One measurement.

    Attributes:
        boot_seconds: when, since boot.
        offset_seconds: of the box's clock, positive: ahead; true to `uncertainty_seconds`.
    """

    server: str
    boot_seconds: float
    offset_seconds: float
    uncertainty_seconds: float


@dataclass(frozen=True)
class Drift:
    """How fast the clock runs away from the server.

    Attributes:
        ppm: 1e-6 seconds a second, positive: it runs fast.
        resolution_ppm: what the measurements' uncertainty may make up.
    """

    ppm: float
    resolution_ppm: float


def kept(samples: Sequence[Sample], new: Sample) -> tuple[Sample, ...]:
    """With one more; those of another server and of an earlier boot go."""
    old = [each for each in samples if each.server == new.server and each.boot_seconds < new.boot_seconds]
    return (*old[-KEPT + 1 :], new)


def best_sample(samples: Sequence[Sample]) -> Sample:
    """The one to believe: the surest of the newest, unless the newest one shows that things have changed since.

    Raises:
        ValueError: there are none.
    """
    if not samples:
        raise ValueError("no samples")
    newest = samples[-1]

    def doubt_seconds(sample: Sample) -> float:
        return sample.uncertainty_seconds + TOLERANCE_PPM * 1e-6 * (newest.boot_seconds - sample.boot_seconds)

    surest = min(samples[-FILTERED:], key=doubt_seconds)
    apart_seconds = abs(surest.offset_seconds - newest.offset_seconds)
    return surest if apart_seconds <= doubt_seconds(surest) + newest.uncertainty_seconds else newest


def jitter_seconds(samples: Sequence[Sample]) -> float | None:
    """Root mean square of the newest offsets about the best one (RFC 5905 § 10); None: too few."""
    newest = samples[-FILTERED:]
    if len(newest) < 2:
        return None
    best = best_sample(newest)
    return math.sqrt(sum((each.offset_seconds - best.offset_seconds) ** 2 for each in newest) / (len(newest) - 1))


def drift(samples: Sequence[Sample]) -> Drift | None:
    """Median of the slopes between all pairs (Theil–Sen), which a few late answers do not bend; None: too few, or
    over too short a time."""
    if len(samples) < LEAST_FOR_DRIFT or samples[-1].boot_seconds - samples[0].boot_seconds < LEAST_SPAN_SECONDS:
        return None
    slopes = [
        (late.offset_seconds - early.offset_seconds) / (late.boot_seconds - early.boot_seconds)
        for early, late in combinations(samples, 2)
    ]
    span_seconds = samples[-1].boot_seconds - samples[0].boot_seconds
    unsure_seconds = 2 * statistics.median(each.uncertainty_seconds for each in samples)
    return Drift(statistics.median(slopes) * 1e6, unsure_seconds / span_seconds * 1e6)
