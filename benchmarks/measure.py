"""What every benchmark needs: resumable rounds, median and spread, whether the machine is quiet, a table.

A round measures every contender once, one after another, so a ratio is taken within a round, where noise of the machine
hits both sides alike; medians and quartiles are over rounds.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import statistics
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

RESULTS = Path(__file__).resolve().parents[1] / "build" / "benchmarks"
LOOK_AT_CPU_SECONDS = 1.0
QUIET_CPU_PERCENT = 5.0
QUIET_LOAD_PER_CORE = 0.25

Values = dict[str, float]


@dataclass(frozen=True)
class Spread:
    """Median and quartiles of n values."""

    n: int
    median: float
    low: float
    high: float

    @staticmethod
    def of(values: Sequence[float]) -> Spread:
        """Of at least one value."""
        if len(values) == 1:
            return Spread(1, values[0], values[0], values[0])
        low, median, high = statistics.quantiles(values, n=4, method="inclusive")
        return Spread(len(values), median, low, high)

    def __str__(self) -> str:
        """Like `17.5 [17.1-17.9]`; one value has no quartiles."""
        digits = 0 if self.median >= 1000 else 1 if self.median >= 10 else 2
        if self.n == 1:
            return f"{self.median:.{digits}f}"
        return f"{self.median:.{digits}f} [{self.low:.{digits}f}-{self.high:.{digits}f}]"


class Rounds:
    """Finished rounds of a benchmark, one JSON line each in build/benchmarks/; an interrupted run goes on with them.

    Args:
        name: of the benchmark.
        settings: what makes rounds comparable; together with machine and revision it names the file. A working tree
            with changes has no revision, so its rounds are never taken up again.
        fresh: forget what is there.
    """

    def __init__(self, name: str, settings: dict[str, object], *, fresh: bool = False) -> None:
        revision = source_revision()
        key = json.dumps([settings, platform.node(), revision], sort_keys=True)
        self.path = RESULTS / f"{name}-{hashlib.sha256(key.encode()).hexdigest()[:12]}.jsonl"
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if fresh or revision is None:
            self.path.unlink(missing_ok=True)
        self.finished: list[Values] = []
        if self.path.exists():
            # a line without an end is what an interrupted run left; it is measured again
            lines = [
                line for line in self.path.read_text(encoding="utf-8").splitlines(keepends=True) if line[-1] == "\n"
            ]
            self.path.write_text("".join(lines), encoding="utf-8")
            self.finished = [json.loads(line)["values"] for line in lines]

    def add(self, values: Values, load_average: float) -> None:
        """Keep a round."""
        self.finished.append(values)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"load_average": load_average, "values": values}) + "\n")
            file.flush()
            os.fsync(file.fileno())

    def spread(self, name: str) -> Spread | None:
        """Of a value over all rounds; None if it was not measured."""
        values = [round_[name] for round_ in self.finished if name in round_]
        return Spread.of(values) if values else None

    def ratio(self, name: str, reference: str) -> Spread | None:
        """Of a value to another, round by round; None if either was not measured."""
        ratios = [round_[name] / round_[reference] for round_ in self.finished if {name, reference} <= round_.keys()]
        return Spread.of(ratios) if ratios else None


def source_revision() -> str | None:
    """The commit, or None where there is none or tracked files differ from it."""
    root = Path(__file__).resolve().parents[1]
    try:
        described = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=12"],
            cwd=root,
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None
    return None if described.endswith("-dirty") else described


def machine_lines() -> list[str]:
    """What the figures were measured on, and a warning if something else is running."""
    model = next(
        (line.split(":", 1)[1].strip() for line in _cpu_information() if line.startswith(("model name", "Model"))),
        platform.machine(),
    )
    cores, load = os.cpu_count() or 1, os.getloadavg()[0]
    busy = psutil.cpu_percent(LOOK_AT_CPU_SECONDS)
    lines = [
        f"{model}, {cores} cores; Python {platform.python_version()}; revision {source_revision() or 'with changes'}",
        f"at start: load average {load:.2f}, CPU {busy:.0f} % busy",
    ]
    if busy > QUIET_CPU_PERCENT or load > QUIET_LOAD_PER_CORE * cores:
        lines.append("WARNING: the machine is not quiet; absolute figures are too low, ratios are noisy")
    return lines


def _cpu_information() -> list[str]:
    path = Path("/proc/cpuinfo")
    return path.read_text(encoding="utf-8").splitlines() if path.exists() else []


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns as wide as their widest cell; the first is flush left."""
    widths = [max(len(row[column]) for row in [header, *rows]) for column in range(len(header))]
    lines = []
    for row in [header, *rows]:
        cells = [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)
