"""What users notice when a box of a real site dies: three lab boxes, four open streams, kills and silent deaths.

    python -m benchmarks.failover [--n N] [--kinds kill power-cut link-cut stop] [--boxes box1 box2 box3] [--fresh]

Needs root (the lab). A kill closes the box's connections, so its neighbours know at once; after a power cut (a capture
shows that no FIN and no RST left the box), a pulled cable or a SIGSTOP there is only silence. Every round waits for a
whole site, kills one box under load, lets it come back, and measures by the clock of this machine, which boxes share.
They share its cores too: a box that starts (systemd, `import torch`) slows the others down as no neighbour on a site
does, so the time until its planned switch begins is a row of its own.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import yaml

from benchmarks.measure import RESULTS, Rounds, Values, machine_lines, table
from fleet.inventory.loader import load_site
from fleet.inventory.sitefile import SiteFile
from tests.lab.lab import Lab
from tests.site import faults
from tests.site.commands import fleet
from tests.site.conftest import LAB_INVENTORY, STAGE_BOXES
from tests.site.faults import Kind
from tests.site.healing import Healing
from tests.site.judge import Comparison
from tests.site.streams import PROMPTS, Run
from tests.site.watch import Event

ROUNDS = 20
OPEN_STREAMS = (PROMPTS[0], PROMPTS[3], PROMPTS[4], PROMPTS[6])
"""Two greedy and two seeded ones."""
MAX_TOKENS = 128
TOKENS_BEFORE = 16
RATE_WINDOW_SECONDS = 3.0
POSITIONS = dict(zip(STAGE_BOXES, ("first", "middle", "last"), strict=True))
KINDS: dict[str, Kind] = {
    kind.name: kind for kind in (faults.KILL, faults.SILENT_POWER_CUT, faults.LINK_CUT, faults.STOP)
}
TIMES = {
    **{"settle_seconds": 1.0, "hold_down_seconds": 1.0, "hold_down_max_seconds": 1.0},
    "ring_silence_least_seconds": 0.3,
}
"""A box that dies every minute would be held down ever longer; that is not what is measured. Three pings of the lab's
0.1 s are missed before a link counts as silent, which wired boxes allow; `wrongly_dead` counts where they did not."""

ROWS = {
    "detect": "noticed, ms after the fault",
    "plan": "planned, ms",
    "prepare": "layers ready (votes), ms",
    "commit": "committed, ms",
    "rebuild": "first new token after commit, ms",
    "next_token": "longest pause of any open stream, ms",
    "start_pause": "longest pause while the box starts, ms",
    "return_pause": "longest pause in the planned switch back, ms",
    "before": "tokens/s before",
    "degraded": "tokens/s with two boxes",
    "after": "tokens/s after its return",
}
COUNTS = ("failed", "lost", "repeated", "changed", "near_ties", "wrongly_dead")


def benchmark_site() -> SiteFile:
    """The lab's inventory with short hold-down, written below build/, its paths made absolute."""
    data: dict[str, Any] = yaml.safe_load(LAB_INVENTORY.read_text(encoding="utf-8"))
    data["timing"] |= TIMES
    for section, name in ((data, "state_dir"), (data, "bundle_dir"), (data["box_defaults"], "identity_file")):
        section[name] = str((LAB_INVENTORY.parent / section[name]).resolve())
    RESULTS.mkdir(parents=True, exist_ok=True)
    path = RESULTS / "failover.yaml"
    path.write_text(yaml.safe_dump(data, sort_keys=False), encoding="utf-8")
    return load_site(path, resolve_secrets=False)


@contextmanager
def running_site() -> Iterator[Healing]:
    """Fresh boxes, provisioned, with the answers of an undisturbed run; everything is gone afterwards."""
    site, lab = benchmark_site(), Lab()
    lab.down()
    try:
        for box in lab.up(len(STAGE_BOXES)):
            box.wait_until_booted()
        fleet("bundle", site.file)
        fleet("provision", site.file)
        yield Healing(site, lab, prompts=OPEN_STREAMS, max_tokens=MAX_TOKENS)
    finally:
        lab.down()


class Death:
    """One round: a box dies under load and comes back.

    Args:
        heal: the site, whole. kind: how the box dies. name: which.
    """

    def __init__(self, heal: Healing, kind: Kind, name: str) -> None:
        self._heal = heal
        self._kind = kind
        self._box = heal.box(name)
        self._whole_at = 0.0

    def measure(self) -> Values:
        """Milliseconds, tokens a second, and counts of tokens."""
        before = self._heal.watch.last_event_id()
        wall = time.time() - time.monotonic()
        run = self._heal.stream(fault=self._die_and_return, until=self._measured_whole, after_tokens=TOKENS_BEFORE)
        events = self._heal.watch.events(before)
        dead = next(event for event in events if event["kind"] == "box-dead" and event["box"] == self._box.name)
        first, *_ = [event for event in events if event["kind"] == "plan-committed"]
        serving = next(event for event in events if event["kind"] == "plan-serving")
        died, back = run.fault_result
        committed = first["unix_seconds"] - wall
        planned = [event["unix_seconds"] - wall for event in events if ", planned, " in event["text"]]
        switching = min(moment for moment in planned if moment > back)
        return {
            "detect": (dead["unix_seconds"] - wall - died) * 1e3,
            **{phase: float(serving["milliseconds"][phase]) for phase in ("plan", "prepare", "commit")},
            "rebuild": (_next_token(run, committed) - committed) * 1e3,
            "next_token": _longest_pause(run, died, back) * 1e3,
            "start_pause": _longest_pause(run, back, switching) * 1e3,
            "return_pause": _longest_pause(run, switching, self._whole_at) * 1e3,
            **self._rates(run, died, back),
            **_counts(self._heal.compare(run)),
            "wrongly_dead": float(sum(self._is_wrong(event) for event in events)),
        }

    def _is_wrong(self, event: Event) -> bool:
        """A box was called dead that nobody had touched."""
        return event["kind"] in ("box-dead", "box-hung") and event["box"] != self._box.name

    def _die_and_return(self) -> tuple[float, float]:
        """(moment of the fault, moment from which it may come back)."""
        after = self._heal.watch.last_event_id()
        died = self._kind.put(self._box)
        self._heal.watch.wait_for_event("plan-serving", after)
        time.sleep(RATE_WINDOW_SECONDS)
        back = time.monotonic()
        self._kind.take_back(self._box)
        return died, back

    def _measured_whole(self) -> bool:
        """Whole, and streams have run for a while since."""
        if not self._whole_at and self._heal.watch.is_whole():
            self._whole_at = time.monotonic()
        return bool(self._whole_at) and time.monotonic() - self._whole_at > RATE_WINDOW_SECONDS

    def _rates(self, run: Run, died: float, back: float) -> Values:
        flowing = max(stream.times[0] for stream in run.streams[: len(OPEN_STREAMS)])
        end = self._whole_at + RATE_WINDOW_SECONDS
        return {
            "before": run.tokens_per_second(flowing, died),
            "degraded": run.tokens_per_second(back - RATE_WINDOW_SECONDS, back),
            "after": run.tokens_per_second(self._whole_at, end),
        }


def _next_token(run: Run, moment: float) -> float:
    return min(when for stream in run.streams for when in stream.times if when > moment)


def _longest_pause(run: Run, begin: float, end: float) -> float:
    """Longest time between two tokens of one stream that reaches into a span of time."""
    pauses = [
        later - earlier
        for stream in run.streams
        for earlier, later in zip(stream.times, stream.times[1:], strict=False)
        if later > begin and earlier < end
    ]
    return max(pauses, default=0.0)


def _counts(result: Comparison) -> Values:
    return {
        "failed": float(len(result.failed)),
        "lost": float(result.lost),
        "repeated": float(result.repeated),
        "changed": float(result.changed),
        "near_ties": float(len(result.near_ties)),
    }


def run_rounds(rounds: Rounds, wanted: int, kinds: Sequence[str], boxes: Sequence[str]) -> None:
    """Measure what is missing: all kinds and boxes in turn, so that the machine's moods hit all alike."""
    missing = [
        (kind, box)
        for number in range(wanted)
        for kind in kinds
        for box in boxes
        if number >= _finished(rounds, kind, box)
    ]
    if not missing:
        return
    with running_site() as heal:
        for number, (kind, box) in enumerate(missing, start=1):
            print(f"round {number} of {len(missing)}: {kind} of {box} …", file=sys.stderr, flush=True)
            heal.watch.wait_whole()
            load = os.getloadavg()[0]
            values = Death(heal, KINDS[kind], box).measure()
            rounds.add({f"{kind}.{box}.{name}": value for name, value in values.items()}, load)


def _finished(rounds: Rounds, kind: str, box: str) -> int:
    return sum(f"{kind}.{box}.detect" in values for values in rounds.finished)


def collected(rounds: Rounds, kinds: Sequence[str], boxes: Sequence[str], name: str) -> list[float]:
    """A row's values of some kinds of death and boxes."""
    keys = {f"{kind}.{box}.{name}" for kind in kinds for box in boxes}
    return sorted(value for values in rounds.finished for key, value in values.items() if key in keys)


def percentile(values: Sequence[float], percent: int) -> float:
    """Of at least one value."""
    return values[0] if len(values) == 1 else statistics.quantiles(values, n=100, method="inclusive")[percent - 1]


def cell(values: Sequence[float]) -> str:
    """Like `41.0 [38.2-47.1] p95 60.3`: median, quartiles, 95th percentile."""
    if not values:
        return ""
    low, median, high, most = (percentile(values, percent) for percent in (25, 50, 75, 95))
    return f"{median:.1f} [{low:.1f}-{high:.1f}] p95 {most:.1f}"


def report(rounds: Rounds) -> str:
    """Closed and silent deaths side by side, then each kind by the box's place in the ring, then the goals."""
    silent = [name for name, kind in KINDS.items() if kind.silent]
    columns = {"closed: kill -9": ["kill"], "silent: all": silent, **{f"silent: {name}": [name] for name in silent}}
    parts = [_table(rounds, {name: (kinds, STAGE_BOXES) for name, kinds in columns.items()})]
    for kind in KINDS:
        parts.append(_table(rounds, {f"{kind}, {place} box": ([kind], [box]) for box, place in POSITIONS.items()}))
    return "\n\n".join([*parts, _goals(rounds, silent), f"rounds: {rounds.path}"])


def _table(rounds: Rounds, columns: dict[str, tuple[Sequence[str], Sequence[str]]]) -> str:
    rows = [[text, *(cell(collected(rounds, *of, name)) for of in columns.values())] for name, text in ROWS.items()]
    sums = [str(int(sum(collected(rounds, *of, name)))) for name in COUNTS for of in columns.values()]
    width = len(columns)
    rows += [[f"{name}, all rounds", *sums[at * width : (at + 1) * width]] for at, name in enumerate(COUNTS)]
    rows.append(["n", *(str(len(collected(rounds, *of, "detect"))) for of in columns.values())])
    return table(["", *columns], rows)


def _goals(rounds: Rounds, silent: Sequence[str]) -> str:
    """Measured ÷ goal; above 1 the goal is missed."""
    goals = (
        ("closed: noticed, p50 < 50 ms", ["kill"], "detect", 50, 50.0),
        ("closed: next token on every stream, p50 < 700 ms", ["kill"], "next_token", 50, 700.0),
        ("silent: next token on every stream, p50 < 1000 ms", silent, "next_token", 50, 1000.0),
        ("silent: next token on every stream, p95 < 2000 ms", silent, "next_token", 95, 2000.0),
        ("planned switch: no stream pauses > 300 ms (p95)", list(KINDS), "return_pause", 95, 300.0),
    )
    rows = []
    for text, kinds, name, percent, goal in goals:
        values = collected(rounds, kinds, STAGE_BOXES, name)
        if values:
            measured = percentile(values, percent)
            rows.append([text, f"{measured:.0f}", f"{measured / goal:.2f}"])
    return table(["goal", "measured, ms", "÷ goal"], rows)


def main(argv: list[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--n", type=int, default=ROUNDS, help=f"rounds of each kind and box, default {ROUNDS}")
    parser.add_argument("--kinds", nargs="+", choices=list(KINDS), default=list(KINDS))
    parser.add_argument("--boxes", nargs="+", choices=STAGE_BOXES, default=list(STAGE_BOXES))
    parser.add_argument("--fresh", action="store_true", help="measure again what an earlier run has finished")
    arguments = parser.parse_args(argv)
    print("\n".join(machine_lines()), flush=True)
    print("times that differ from inventory/lab.yaml:", ", ".join(f"{name} {value:g}" for name, value in TIMES.items()))
    settings: dict[str, object] = {"tokens": MAX_TOKENS, "streams": len(OPEN_STREAMS), "timing": TIMES}
    rounds = Rounds("failover", settings, fresh=arguments.fresh)
    run_rounds(rounds, arguments.n, arguments.kinds, arguments.boxes)
    print(report(rounds))


if __name__ == "__main__":
    main()
