"""The board as one JSON document: for `/v1/guards`, `fleet guard status` and `--observe`. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from guards.board import Event, Standing
from guards.settings import GuardSettings

SCHEMA = 1


def status_document(
    *,
    site: str,
    box: str,
    observe: bool,
    settings: GuardSettings,
    standings: Mapping[str, Standing],
    events: tuple[Event, ...],
    budgets_left: Mapping[str, int],
    trouble: str,
    monotonic_seconds: float,
) -> dict[str, Any]:
    """Settings, readings, states, budgets left and the last events.

    Args:
        trouble: why nothing can be written down; empty if it can.
        monotonic_seconds: now, for the age of each round.
    """
    return {
        "schema": SCHEMA,
        "site": site,
        "box": box,
        "observe": observe,
        "trouble": trouble,
        "settings": asdict(settings),
        "guards": {name: _standing(standing, monotonic_seconds) for name, standing in standings.items()},
        "budgets_left": dict(budgets_left),
        "events": [asdict(event) for event in events],
    }


def _standing(standing: Standing, monotonic_seconds: float) -> dict[str, Any]:
    age = None if standing.at_seconds is None else round(monotonic_seconds - standing.at_seconds, 3)
    return {
        "state": standing.state.value,
        "rounds": standing.rounds,
        "round_seconds": round(standing.round_seconds, 6),
        "age_seconds": age,
        "findings": [
            {
                "part": finding.part,
                "state": finding.state.value,
                "reason": finding.reason,
                "evidence": dict(finding.evidence),
                "repair": finding.repair.value,
            }
            for finding in standing.findings
        ],
    }
