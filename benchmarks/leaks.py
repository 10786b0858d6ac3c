"""How well leaks are told from everything else that memory does: simulated stages, the guard's own estimator.

    python -m benchmarks.leaks [--seed N] [--days D] [--cases N] [--ranges] [recorded.jsonl …]

Every case draws its parameters anew from the ranges of `tests/guards/memory/shapes.py`, which `--ranges` prints. Leaks:
how many are found within twelve hours, and how long after the onset, at 20 MB/h and at drawn rates. No leak: false
alarms per simulated day. Resolution: what the estimator says that it can't see below after a day. Recorded traces
(`tests/guards/memory/record.py`) are judged as they are, and again with a leak of 20 MB/h added.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from guards.memory.leak import Leak, found_leak, resolution
from guards.memory.windows import MEGABYTE, Run, Sample, observe
from guards.settings import MemorySettings
from tests.guards.memory.record import read_trace
from tests.guards.memory.shapes import DAY, HOUR, LEAK, NO_LEAK, RANGES, Shape, draw, trace

GOAL_MB_PER_HOUR = 20.0
GOAL_MINUTES = 60.0
LEAK_HOURS = 12.0
SETTINGS = MemorySettings()


def watch(samples: Iterable[Sample]) -> Iterator[tuple[Run, Sample, Leak | None]]:
    """Every sample with what the estimator makes of it; after a leak it begins anew, as after a restart."""
    run = None
    for sample in samples:
        run = observe(run, sample, SETTINGS)
        leak = found_leak(run, SETTINGS)
        yield run, sample, leak
        if leak is not None:
            run = None


def find(samples: Iterable[Sample], onset_seconds: float) -> tuple[float | None, int]:
    """Seconds from the onset until the leak is found (None: not), and alarms before the onset."""
    false_alarms = 0
    for _, sample, leak in watch(samples):
        if leak is not None and sample.seconds < onset_seconds:
            false_alarms += 1
        elif leak is not None:
            return sample.seconds - onset_seconds, false_alarms
    return None, false_alarms


def leaking_row(shape: Shape, seed: int, cases: int, rate: float | None) -> str:
    """Detection of one shape."""
    found: list[float] = []
    early = 0
    for case in range(cases):
        rng = random.Random(f"{seed}/{shape.name}/{rate}/{case}")  # noqa: S311
        drawn = draw(rng, "leak_mb_per_hour") if rate is None else rate
        onset = 0.0 if shape.from_start else draw(rng, "onset_hours") * HOUR
        seconds, false_alarms = find(trace(shape, rng, onset + LEAK_HOURS * HOUR, drawn, onset), onset)
        early += false_alarms
        found += [] if seconds is None else [seconds / 60.0]
    within = sum(minutes <= GOAL_MINUTES for minutes in found)
    times = f"{statistics.median(found):6.0f} {max(found):6.0f}" if found else "     -      -"
    rates = "drawn" if rate is None else f"{rate:g}"
    return f"{shape.name:<24} {rates:>6} {len(found):>5}/{cases:<5} {within:>5}/{cases:<5} {times} {early:>6}"


def quiet_row(shape: Shape, seed: int, days: float, cases: int) -> tuple[str, int]:
    """False alarms of one shape, over as many days split into as many processes."""
    alarms = 0
    resolutions = []
    for case in range(cases):
        rng = random.Random(f"{seed}/{shape.name}/quiet/{case}")  # noqa: S311
        run = None
        for seen, _, leak in watch(trace(shape, rng, days / cases * DAY)):
            run = seen
            alarms += leak is not None
        said = resolution(run, SETTINGS).resolution_mb_per_day if run is not None else None
        resolutions += [] if said is None else [said]
    middle = f"{statistics.median(resolutions):.0f}" if resolutions else "-"
    return f"{shape.name:<24} {days:>6.1f} {cases:>9} {alarms:>12} {alarms / days:>10.3f} {middle:>14}", alarms


def recorded_rows(path: Path) -> list[str]:
    """A recorded trace as it is, and with a leak from its first sample on."""
    samples = read_trace(path)
    first, hours = samples[0].seconds, (samples[-1].seconds - samples[0].seconds) / HOUR
    last = None
    alarms = 0
    for run, _, leak in watch(samples):
        last = run
        alarms += leak is not None
    assert last is not None
    leaking = [
        replace(
            each, retained_bytes=each.retained_bytes + int((each.seconds - first) / HOUR * GOAL_MB_PER_HOUR * MEGABYTE)
        )
        for each in samples
    ]
    seconds, _ = find(leaking, first)
    found = "not found" if seconds is None else f"found after {seconds / 60.0:.0f} min"
    said = resolution(last, SETTINGS).text
    return [f"{path.name}: {hours:.1f} h, {alarms} alarms; {said}; with {GOAL_MB_PER_HOUR:g} MB/h added: {found}"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the tables; 1 if there was a false alarm."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=None, help="of the cases; fresh if not given")
    parser.add_argument("--days", type=float, default=100.0, help="simulated without a leak, over all shapes")
    parser.add_argument("--cases", type=int, default=20, help="of each shape and rate; processes of each quiet shape")
    parser.add_argument("--ranges", action="store_true", help="print the ranges of all parameters")
    parser.add_argument("recorded", nargs="*", type=Path, help="recorded traces, judged as well")
    options = parser.parse_args(arguments)
    seed = random.SystemRandom().randrange(2**31) if options.seed is None else options.seed
    began = time.monotonic()
    print(f"seed {seed}; bound {SETTINGS.leak_mb_per_hour:g} MB/h")
    if options.ranges:
        for name, (low, high, meaning) in RANGES.items():
            print(f"  {name:<20} {low:>8g} to {high:<8g} {meaning}")
    print(f"\n{'leak':<24} {'MB/h':>6} {'found':>11} {'in 60 min':>11} {'median':>6} {'worst':>6} {'early':>6}")
    for rate in (GOAL_MB_PER_HOUR, None):
        for shape in LEAK:
            print(leaking_row(shape, seed, options.cases, rate), flush=True)
    header = f"{'false alarms':>12} {'per day':>10} {'can’t see below':>14}"
    print(f"\n{'no leak':<24} {'days':>6} {'processes':>9} {header} (MB/day, median)")
    total = 0
    for shape in NO_LEAK:
        row, alarms = quiet_row(shape, seed, options.days / len(NO_LEAK), options.cases)
        total += alarms
        print(row, flush=True)
    print(f"{'all':<24} {options.days:>6.1f} {'':>9} {total:>12} {total / options.days:>10.3f}")
    for path in options.recorded:
        print("\n".join(recorded_rows(path)))
    print(f"\n{time.monotonic() - began:.0f} s")
    return 1 if total else 0


if __name__ == "__main__":
    sys.exit(main())
