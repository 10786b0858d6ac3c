"""Simulated memory of a stage: shapes with a leak and without, every parameter drawn from `RANGES`.

A trace is a list of parts that are added up, sample by sample. All traces share the parts of an honest stage: sequences
that come and go with the hour of the day, their KV caches in blocks whose last one is partly untouched, copies and
activations as peaks, sample noise, and a warm-up. `NO_LEAK` and `LEAK` name the shapes, `trace` makes one.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from guards.memory.windows import MEGABYTE, Sample

PERIOD_SECONDS = 10.0
HOUR = 3600.0
DAY = 86_400.0

RANGES: dict[str, tuple[float, float, str]] = {
    "base_mb": (150.0, 900.0, "memory that is neither weights nor KV"),
    "weights_mb": (200.0, 4000.0, "weights as declared"),
    "sequences": (2.0, 24.0, "most sequences at a time"),
    "arrivals_per_hour": (10.0, 300.0, "at the busiest hour; at the quietest a tenth"),
    "sequence_seconds": (20.0, 300.0, "mean length of a sequence"),
    "block_mb": (0.1, 2.0, "KV block of a sequence; on average half a block is declared, not touched"),
    "noise_mb": (0.02, 1.0, "standard deviation of the sample noise"),
    "peak_mb": (1.0, 40.0, "mean height of short peaks (copies, prefill); one sample in twenty"),
    "warm_up_mb": (5.0, 200.0, "growth after the start"),
    "warm_up_seconds": (10.0, 200.0, "its time constant"),
    "per_sequence_mb": (0.1, 3.0, "arena growth with each sequence more than ever at a time"),
    "plateau_mb": (5.0, 60.0, "plateau: growth until it is reached"),
    "plateau_hours": (0.3, 2.0, "plateau: time constant"),
    "arena_mb": (1.0, 24.0, "arenas: size of a step"),
    "arena_growth": (1.5, 4.0, "arenas: factor from the time of a step to the time of the next"),
    "arena_trimmed": (0.0, 0.9, "arenas: share of it that a trim of the idle stage gives back"),
    "tooth_mb": (2.0, 15.0, "saw-tooth: amplitude"),
    "tooth_minutes": (3.0, 25.0, "saw-tooth: period"),
    "merge_mb": (20.0, 800.0, "re-merge: weights gained or lost"),
    "merges_per_day": (0.5, 4.0, "re-merge: how often"),
    "merge_error_mb": (-20.0, 20.0, "re-merge: memory that moves, but is not declared"),
    "ramp_hours": (1.0, 4.0, "KV ramp: until the caches are full; then they are released"),
    "ramp_mb": (50.0, 1500.0, "KV ramp: KV bytes at its end"),
    "leak_mb_per_hour": (20.0, 200.0, "leak: mean rate (log-uniform)"),
    "onset_hours": (1.0, 5.0, "leak: hours after the start until it begins"),
    "step_minutes": (1.0, 20.0, "stepwise leak: from a step to the next"),
    "burst_minutes": (5.0, 60.0, "bursty leak: from a burst to the next"),
    "burst_share": (0.2, 0.7, "bursty leak: share of the time in which it leaks"),
}
LOGARITHMIC = {"leak_mb_per_hour", "noise_mb", "arrivals_per_hour", "ramp_mb", "merge_mb", "peak_mb"}
TRIM_SECONDS = 600.0

Part = Callable[[float], float]
"""Bytes that a part adds, by seconds since the start."""


def draw(rng: random.Random, name: str) -> float:
    """A parameter from its range."""
    low, high, _ = RANGES[name]
    if name in LOGARITHMIC:
        return math.exp(rng.uniform(math.log(low), math.log(high)))
    return rng.uniform(low, high)


@dataclass(frozen=True)
class Shape:
    """How a trace is made.

    Attributes:
        name: on the table.
        leaks: whether anything does.
        part: makes what is special about it, from the generator, the leak's rate in MB/h and its onset in seconds.
        merges, ramps, arenas: which extra parts the trace has.
        from_start: the leak begins with the process, before any plateau.
    """

    name: str
    leaks: bool
    part: Callable[[random.Random, float, float], Part]
    merges: bool = False
    ramps: bool = False
    arenas: bool = False
    from_start: bool = False


def nothing(_rng: random.Random, _rate: float, _onset: float) -> Part:
    """Nothing special."""
    return lambda _seconds: 0.0


def plateau(rng: random.Random, _rate: float, _onset: float) -> Part:
    """Pools that fill over hours, ever more slowly."""
    height, constant = draw(rng, "plateau_mb") * MEGABYTE, draw(rng, "plateau_hours") * HOUR
    return lambda seconds: height * (1.0 - math.exp(-seconds / constant))


def teeth(rng: random.Random, _rate: float, _onset: float) -> Part:
    """Grows, is collected, grows."""
    height, period = draw(rng, "tooth_mb") * MEGABYTE, draw(rng, "tooth_minutes") * 60.0
    phase = rng.uniform(0.0, period)
    return lambda seconds: height * ((seconds + phase) % period) / period


def linear(rng: random.Random, rate: float, onset: float) -> Part:
    """A leak that never pauses."""
    return lambda seconds: max(0.0, seconds - onset) * rate * MEGABYTE / HOUR


def stepwise(rng: random.Random, rate: float, onset: float) -> Part:
    """A leak in equal blocks."""
    step = draw(rng, "step_minutes") * 60.0
    return lambda seconds: max(0.0, (seconds - onset) // step) * step * rate * MEGABYTE / HOUR


def bursty(rng: random.Random, rate: float, onset: float) -> Part:
    """A leak that runs a part of the time only, at a rate that gives the mean."""
    cycle, share = draw(rng, "burst_minutes") * 60.0, draw(rng, "burst_share")

    def leaked(seconds: float) -> float:
        cycles, rest = divmod(max(0.0, seconds - onset), cycle)
        return (cycles + min(1.0, rest / cycle / share)) * cycle * rate * MEGABYTE / HOUR

    return leaked


def sawtooth(rng: random.Random, rate: float, onset: float) -> Part:
    """Teeth whose floor rises."""
    tooth, leak = teeth(rng, rate, onset), linear(rng, rate, onset)
    return lambda seconds: tooth(seconds) + leak(seconds)


NO_LEAK = (
    Shape("warm-up and noise", False, nothing),
    Shape("plateau after hours", False, plateau),
    Shape("allocator arenas", False, nothing, arenas=True),
    Shape("KV growth and release", False, nothing, ramps=True),
    Shape("saw-tooth", False, teeth),
    Shape("re-merge level shifts", False, nothing, merges=True),
    Shape("arenas, KV, re-merge", False, plateau, arenas=True, ramps=True, merges=True),
)
LEAK = (
    Shape("linear", True, linear),
    Shape("stepwise", True, stepwise),
    Shape("bursty", True, bursty),
    Shape("saw-tooth", True, sawtooth),
    Shape("hidden under KV growth", True, linear, ramps=True),
    Shape("linear, with arenas", True, linear, arenas=True),
    Shape("linear from the start", True, linear, from_start=True),
)


@dataclass
class Sequences:
    """Open sequences: Poisson arrivals by the hour of the day, exponential lengths, a cap."""

    rng: random.Random

    def __post_init__(self) -> None:
        self.most = round(draw(self.rng, "sequences"))
        self.rate = draw(self.rng, "arrivals_per_hour") / HOUR
        self.leave = PERIOD_SECONDS / draw(self.rng, "sequence_seconds")
        self.busiest = self.rng.uniform(0.0, DAY)
        self.ages: list[int] = []

    def step(self, seconds: float) -> list[int]:
        """Ages in periods of those that are open now."""
        day = 0.55 + 0.45 * math.cos(2.0 * math.pi * (seconds - self.busiest) / DAY)
        self.ages = [age + 1 for age in self.ages if self.rng.random() >= self.leave]
        if len(self.ages) < self.most and self.rng.random() < self.rate * day * PERIOD_SECONDS:
            self.ages.append(0)
        return self.ages


class Arenas:
    """Heap that grows with records: of open sequences, and by steps that become rarer; a trim gives a part back."""

    def __init__(self, rng: random.Random, steps: bool) -> None:
        self._rng = rng
        self._each = draw(rng, "per_sequence_mb") * MEGABYTE
        self._kept_share = 1.0 - draw(rng, "arena_trimmed")
        self._next_step = rng.uniform(120.0, 3600.0) if steps else math.inf
        self._steps = 0.0
        self._held = 0.0
        self._trimmed = -math.inf

    def step(self, seconds: float, sequences: int) -> float:
        """Bytes held now."""
        while seconds >= self._next_step:
            self._steps += draw(self._rng, "arena_mb") * MEGABYTE
            self._next_step *= draw(self._rng, "arena_growth")
        if sequences == 0 and seconds - self._trimmed >= TRIM_SECONDS:
            self._trimmed = seconds
            self._held *= self._kept_share
        elif sequences:
            self._held = max(self._held, self._each * sequences + self._steps)
        return self._held


class Weights:
    """Declared weights that jump, and what really moves: with an error, and loaded before it is declared."""

    def __init__(self, rng: random.Random, merges: bool) -> None:
        self._rng = rng
        self.declared = draw(rng, "weights_mb") * MEGABYTE
        self.held = self.declared
        self._rate = draw(rng, "merges_per_day") * PERIOD_SECONDS / DAY if merges else 0.0
        self._gained = 0.0
        self._loading = 0

    def step(self) -> None:
        """One period on."""
        if self._loading:
            self._loading -= 1
            if self._loading == 0:
                self.declared += self._gained
        elif self._rate and self._rng.random() < self._rate:
            size = draw(self._rng, "merge_mb") * MEGABYTE
            self._gained = -self._gained if self._gained else size  # what was taken over is given back later
            self.held += self._gained + draw(self._rng, "merge_error_mb") * MEGABYTE
            self._loading = self._rng.randint(1, 4)


def trace(
    shape: Shape, rng: random.Random, seconds: float, rate_mb_per_hour: float = 0.0, onset_seconds: float = 0.0
) -> Iterator[Sample]:
    """Samples of one process from its start on; the leak's rate and onset matter to leaking shapes only."""
    special = shape.part(rng, rate_mb_per_hour, onset_seconds)
    sequences, arenas, weights = Sequences(rng), Arenas(rng, shape.arenas), Weights(rng, shape.merges)
    base, block, noise = (draw(rng, name) * MEGABYTE for name in ("base_mb", "block_mb", "noise_mb"))
    peak, warm_up = draw(rng, "peak_mb") * MEGABYTE, draw(rng, "warm_up_mb") * MEGABYTE
    warm_up_seconds = draw(rng, "warm_up_seconds")
    ramp, ramp_seconds = draw(rng, "ramp_mb") * MEGABYTE, draw(rng, "ramp_hours") * HOUR
    grown_periods = rng.uniform(3.0, 12.0)  # for one more block of a sequence
    for index in range(int(seconds / PERIOD_SECONDS)):
        now = index * PERIOD_SECONDS
        ages = sequences.step(now)
        weights.step()
        blocks = [age / grown_periods for age in ages]
        declared = block * sum(math.floor(each) + 1 for each in blocks)
        touched = block * sum(blocks)
        if shape.ramps:
            long_one = ramp * ((now % ramp_seconds) / ramp_seconds)
            declared += math.ceil(long_one / block) * block
            touched += long_one
        held = base + weights.held + touched + arenas.step(now, len(ages)) + special(now)
        held += warm_up * (1.0 - math.exp(-now / warm_up_seconds)) + rng.gauss(0.0, noise)
        if rng.random() < 0.05:
            held += rng.expovariate(1.0 / peak)
        yield Sample(now, int(held), int(declared), int(weights.declared), len(ages))
