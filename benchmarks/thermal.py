"""What boxes that run hot keep of their throughput: no guard, the seeds' restart loop, a bare latch, ours, an oracle.

    python -m benchmarks.thermal [--plants N] [--hours H] [--seed S]

Half the plants have fixed seeds (0, 1, 2 …), the other half fresh ones from `--seed`, printed, so that any run can be
repeated. The plants are in `benchmarks/thermal_plants.py`; the latch under test is the guard's own `step` with its
default settings. Load is saturated all the time, which is the hardest case for heat.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from benchmarks.measure import table
from benchmarks.thermal_plants import (
    AMBIENT_CELSIUS,
    HOT_CELSIUS,
    HOUR_SECONDS,
    MAX_BATCHES,
    RANGES,
    STEP_SECONDS,
    Plant,
    Running,
    draw_plant,
    oracle_produced,
)
from guards.settings import ThermalSettings
from guards.thermal.latch import Latch, step
from guards.thermal.levels import Level, ladder

PLANTS = 200
HOURS = 72.0
OURS = ThermalSettings()
BARE = replace(OURS, lead_seconds=0.0, rise_celsius=-1000.0, urgent_celsius=1000.0)
"""80/70, a step a dwell, nothing else."""

SEED_PERIOD_SECONDS = 10.0
SEED_HOT_CELSIUS, SEED_COOL_CELSIUS = 80, 70
SEED_BATCH, SEED_HOT_BATCH = 4, 1

MIDDLE_CELSIUS = (OURS.low_celsius + OURS.high_celsius) / 2

GOAL_MEDIAN_PERCENT, GOAL_P5_PERCENT = 95, 85
PROGRESS_SECONDS = 5.0


@dataclass(frozen=True)
class Outcome:
    """What a controller made of a plant.

    Attributes:
        kept_percent: throughput, of the oracle's. hot_minutes: above 80 °C. throttle_events: of the hardware.
        switches: changes of the limits, or restarts.
    """

    kept_percent: float
    hot_minutes: float
    throttle_events: int
    switches: int


def no_guard(plant: Plant, hours: float) -> tuple[Running, int]:
    """Full batch whatever comes."""
    box = Running(plant)
    for _ in times(hours):
        box.advance(plant.load_rise_celsius, 1.0)
    return box, 0


def restart_loop(plant: Plant, hours: float, *, as_written: bool) -> tuple[Running, int]:
    """The loop of the seeds: every 10 s, above 80 batch 1 and a restart, below 70 the old batch and a restart.

    Args:
        as_written: it restarts in every round below 70 °C and above 80 °C, as the script does. Otherwise only if the
            batch changes, which its author surely meant.
    """
    box = Running(plant)
    batch, restarts, next_look, down_until = plant.max_batch, 0, 0.0, 0.0
    low = max(1, plant.max_batch * SEED_HOT_BATCH // SEED_BATCH)
    for now in times(hours):
        if now >= next_look:
            next_look = now + SEED_PERIOD_SECONDS
            seen = int(box.read())
            wanted = low if seen > SEED_HOT_CELSIUS else plant.max_batch if seen < SEED_COOL_CELSIUS else batch
            asks = seen > SEED_HOT_CELSIUS or seen < SEED_COOL_CELSIUS
            if wanted != batch or (as_written and asks):
                batch, down_until = wanted, now + plant.restart_seconds
                restarts += 1
        if now < down_until:
            box.advance(0.0, 0.0)
        else:
            box.advance(plant.load_rise(batch, 1.0), plant.throughput(batch, 1.0))
    return box, restarts


def latch_guard(plant: Plant, hours: float, settings: ThermalSettings, rungs: Sequence[Level]) -> tuple[Running, int]:
    """The guard's latch on a ladder."""
    box = Running(plant)
    rises = [plant.load_rise(rung.sequences, rung.duty_percent / 100) for rung in rungs]
    throughputs = [plant.throughput(rung.sequences, rung.duty_percent / 100) for rung in rungs]
    latch, bottom, switches = Latch(), len(rungs) - 1, 0
    for now in times(hours):
        level = latch.level
        latch = step(latch, box.read(), throttled=box.throttling, bottom=bottom, now_seconds=now, settings=settings)
        switches += latch.level != level
        box.advance(rises[latch.level], throughputs[latch.level])
    return box, switches


def our_ladder(plant: Plant) -> Sequence[Level]:
    """The guard's own: batch limit and duty cycle together."""
    return ladder(plant.max_batch, OURS.least_duty_percent, OURS.step_percent)


def batch_first(plant: Plant) -> Sequence[Level]:
    """The plainer order, for comparison: the batch limit down to 1, and only then the duty cycle."""
    rungs = our_ladder(plant)
    batches = sorted({rung.sequences for rung in rungs}, reverse=True)
    duties = sorted({rung.duty_percent for rung in rungs}, reverse=True)[1:]
    return [*(Level(batch, 100.0) for batch in batches), *(Level(1, duty) for duty in duties)]


def times(hours: float) -> Iterator[float]:
    """Of all steps."""
    return (index * STEP_SECONDS for index in range(int(hours * HOUR_SECONDS / STEP_SECONDS)))


Controller = Callable[[Plant, float], tuple[Running, int]]
CONTROLLERS: dict[str, Controller] = {
    "no guard": no_guard,
    "restart loop of the seeds, as written": lambda plant, hours: restart_loop(plant, hours, as_written=True),
    "restart loop, restarts on a change only": lambda plant, hours: restart_loop(plant, hours, as_written=False),
    "bare 80/70 latch": lambda plant, hours: latch_guard(plant, hours, BARE, our_ladder(plant)),
    "our latch, batch first, then duty": lambda plant, hours: latch_guard(plant, hours, OURS, batch_first(plant)),
    "our latch": lambda plant, hours: latch_guard(plant, hours, OURS, our_ladder(plant)),
}


def outcome(controller: Controller, plant: Plant, hours: float, oracle: float) -> Outcome:
    """Let a controller run a plant."""
    box, switches = controller(plant, hours)
    return Outcome(100 * box.produced / oracle, box.hot_seconds / 60, box.throttle_events, switches)


def middle_percent(plant: Plant, hours: float) -> float:
    """What an oracle in the middle of the band keeps of one at its upper end."""
    return 100 * oracle_produced(plant, hours, MIDDLE_CELSIUS) / oracle_produced(plant, hours)


def percentile(values: Sequence[float], percent: float) -> float:
    """Of at least one value, the nearest of them."""
    return sorted(values)[round((len(values) - 1) * percent / 100)]


def row(name: str, outcomes: Sequence[Outcome]) -> list[str]:
    """Of the table: throughput from its median to its worst, then what should be small."""
    kept = [each.kept_percent for each in outcomes]
    hot = [each.hot_minutes for each in outcomes]
    events = [each.throttle_events for each in outcomes]
    switches = [each.switches for each in outcomes]
    return [
        name,
        *(f"{value:.1f}" for value in (statistics.median(kept), percentile(kept, 5), min(kept))),
        *(f"{value:.1f}" for value in (statistics.median(hot), percentile(hot, 95), max(hot))),
        *(f"{value:.0f}" for value in (statistics.median(events), percentile(events, 95), max(events))),
        f"{sum(each > 0 for each in events)}",
        *(f"{value:.0f}" for value in (statistics.median(switches), percentile(switches, 95), max(switches))),
    ]


HEADER = [
    *("controller", "kept, % of the oracle", "p5", "worst", "min above 80 °C", "p95", "worst"),
    *("throttle events", "p95", "worst", "throttled plants", "switches", "p95", "worst"),
]


def seeds_of(plants: int, fresh: int) -> list[int]:
    """The first half fixed, the others fresh."""
    dice = random.Random(fresh)  # noqa: S311  # a simulation, no secret
    fixed = list(range((plants + 1) // 2))
    return fixed + [dice.randrange(10**6, 10**9) for _ in range(plants - len(fixed))]


def simulate(seeds: Sequence[int], hours: float) -> dict[str, list[Outcome]]:
    """All controllers on all plants, with progress on stderr."""
    outcomes: dict[str, list[Outcome]] = {name: [] for name in CONTROLLERS}
    began = told = time.monotonic()
    for done, seed in enumerate(seeds):
        plant = draw_plant(seed, hours)
        oracle = oracle_produced(plant, hours)
        for name, controller in CONTROLLERS.items():
            outcomes[name].append(outcome(controller, plant, hours, oracle))
        if time.monotonic() - told > PROGRESS_SECONDS:
            told = time.monotonic()
            left = (told - began) / (done + 1) * (len(seeds) - done - 1)
            print(f"{done + 1} of {len(seeds)} plants, {left:.0f} s left", file=sys.stderr, flush=True)
    return outcomes


def main() -> int:
    """Print ranges, table and goals; 1 if a goal is missed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--plants", type=int, default=PLANTS, help=f"how many boxes (default {PLANTS})")
    parser.add_argument("--hours", type=float, default=HOURS, help=f"simulated hours of each (default {HOURS:g})")
    parser.add_argument("--seed", type=int, default=None, help="of the fresh plants (default: drawn, and printed)")
    arguments = parser.parse_args()
    fresh = random.SystemRandom().randrange(10**6) if arguments.seed is None else arguments.seed
    print(f"{arguments.plants} plants, {arguments.hours:g} simulated hours each; half of them fresh: --seed {fresh}")
    print("drawn from (uniform, unless said otherwise):")
    for name, (low, high) in RANGES.items():
        print(f"  {name}: {low:g} to {high:g}")
    print(f"  batch limit: one of {', '.join(map(str, MAX_BATCHES))}; ambient never outside {AMBIENT_CELSIUS} °C")
    print("\nmedian, p5 or p95 and worst over all plants:")
    seeds = seeds_of(arguments.plants, fresh)
    outcomes = simulate(seeds, arguments.hours)
    middle = [middle_percent(draw_plant(seed, arguments.hours), arguments.hours) for seed in seeds]
    print(table(HEADER, [row(name, each) for name, each in outcomes.items()]))
    ours = outcomes["our latch"]
    kept = [each.kept_percent for each in ours]
    reached = {
        f"0 throttle events: {sum(each.throttle_events for each in ours)}": not any(o.throttle_events for o in ours),
        f"≥ {GOAL_MEDIAN_PERCENT} % at the median: {statistics.median(kept):.1f} %": (
            statistics.median(kept) >= GOAL_MEDIAN_PERCENT
        ),
        f"≥ {GOAL_P5_PERCENT} % at p5: {percentile(kept, 5):.1f} %": percentile(kept, 5) >= GOAL_P5_PERCENT,
    }
    print(
        f"for comparison, the oracle that holds {MIDDLE_CELSIUS:g} °C, the middle of the latch's band, instead of "
        f"{HOT_CELSIUS:g} °C: {statistics.median(middle):.1f} % at the median, {percentile(middle, 5):.1f} % at p5"
    )
    print()
    for goal, met in reached.items():
        print(f"goal {'reached' if met else 'MISSED '}  {goal}")
    return 0 if all(reached.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
