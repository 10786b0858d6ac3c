"""The board as Prometheus metrics, made anew at each scrape, so that a sensor that is gone leaves no old number."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Mapping

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from guards.board import Board
from guards.findings import State

# Evidence whose key ends in a unit of the field becomes a series; other evidence is for people.
_SERIES = re.compile(
    r"[a-z][a-z0-9_]*_(celsius|percent|bytes|seconds|hertz|sequences|flag|number|ppm|mbit_per_second|bytes_per_hour)"
)


class BoardCollector(Collector):
    """Yields the metrics.

    Args:
        budgets_left: name of each budget → how many more it pays for.
        trouble: why nothing can be written down; empty if it can. write_seconds: of the write under way, else 0.
        monotonic: seconds that never go back.
    """

    def __init__(
        self,
        board: Board,
        budgets_left: Callable[[], Mapping[str, int]],
        trouble: Callable[[], str],
        write_seconds: Callable[[], float],
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._board, self._budgets_left, self._monotonic = board, budgets_left, monotonic
        self._trouble, self._write_seconds = trouble, write_seconds

    def collect(self) -> Iterator[Metric]:
        """What a scrape gets."""
        state = GaugeMetricFamily(
            "fleet_guard_state_flag", "1 for the worst state of a guard's parts.", labels=("guard", "state")
        )
        part = GaugeMetricFamily(
            "fleet_guard_part_state_flag", "1 for the state of a part.", labels=("guard", "part", "state")
        )
        supported = GaugeMetricFamily(
            "fleet_guard_supported", "0: this box has no such part.", labels=("guard", "part")
        )
        rounds = CounterMetricFamily("fleet_guard_rounds", "Rounds that ended.", labels=("guard",))
        length = GaugeMetricFamily("fleet_guard_round_seconds", "Length of the last round.", labels=("guard",))
        age = GaugeMetricFamily("fleet_guard_age_seconds", "Since the last round ended.", labels=("guard",))
        readings: dict[str, GaugeMetricFamily] = {}
        for name, standing in self._board.standings().items():
            for each in State:
                state.add_metric((name, each.value), float(standing.state is each))
            rounds.add_metric((name,), standing.rounds)
            if standing.at_seconds is not None:
                length.add_metric((name,), standing.round_seconds)
                age.add_metric((name,), self._monotonic() - standing.at_seconds)
            for finding in standing.findings:
                supported.add_metric((name, finding.part), float(finding.state is not State.UNSUPPORTED))
                for each in State:
                    part.add_metric((name, finding.part, each.value), float(finding.state is each))
                for key, value in finding.evidence.items():
                    if value is None or isinstance(value, str) or not _SERIES.fullmatch(key):
                        continue
                    series = f"fleet_guard_{key}"
                    family = readings.setdefault(
                        series, GaugeMetricFamily(series, "Evidence of a finding.", labels=("guard", "part"))
                    )
                    family.add_metric((name, finding.part), float(value))
        yield from (state, part, supported, rounds, length, age, *readings.values())
        events = CounterMetricFamily("fleet_guard_events", "What happened.", labels=("guard", "kind"))
        for (name, kind), count in self._board.counts().items():
            events.add_metric((name, kind), count)
        yield events
        budgets = GaugeMetricFamily("fleet_guard_budget_left_number", "Actions still paid for.", labels=("budget",))
        for budget, left in self._budgets_left().items():
            budgets.add_metric((budget,), left)
        yield budgets
        text = "1: budgets and memories can't be written down, so nothing that a budget pays for is done."
        yield GaugeMetricFamily("fleet_guard_store_trouble_flag", text, value=float(bool(self._trouble())))
        text = "How long the write under way has taken so far; 0: there is none."
        yield GaugeMetricFamily("fleet_guard_store_write_seconds", text, value=self._write_seconds())


def render(collector: BoardCollector) -> bytes:
    """The text of a scrape."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(collector)
    return generate_latest(registry)
