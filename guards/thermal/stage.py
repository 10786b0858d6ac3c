"""What the thermal guard needs of the stage."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol


class Stage(Protocol):
    """The stage of this box (`guards/stage_client.py`)."""

    def health(self) -> Mapping[str, Any] | None:
        """Its health document; None if it does not answer."""

    def limit_batch(self, sequences: int) -> None:
        """Sequences that it allows in one micro-batch from now on; ActionFailed if it does not obey."""

    def limit_duty(self, percent: float) -> None:
        """Share of the time in which it computes from now on; ActionFailed if it does not obey."""


@dataclass(frozen=True)
class StageReading:
    """What its health document says; None: not said, or nonsense.

    Attributes:
        max_batch_sequences: its limit without guards. batch_limit_sequences: its limit now.
        duty_limit_percent: share of the time in which it computes at most.
        tokens_per_second: of the whole pipeline.
    """

    max_batch_sequences: int | None
    batch_limit_sequences: int | None
    duty_limit_percent: float | None
    tokens_per_second: float | None
    open_sequences: int | None

    @property
    def busy(self) -> bool:
        """It has something to compute."""
        return (self.open_sequences or 0) > 0

    @staticmethod
    def of(document: Mapping[str, Any]) -> StageReading:
        """From a health document of any make."""
        return StageReading(
            max_batch_sequences=_count(document.get("max_batch_sequences"), least=1),
            batch_limit_sequences=_count(document.get("batch_limit_sequences"), least=1),
            duty_limit_percent=_number(document.get("duty_limit_percent")),
            tokens_per_second=_number(document.get("tokens_per_second")),
            open_sequences=_count(document.get("open_sequences"), least=0),
        )


def _count(value: object, *, least: int) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= least else None


def _number(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value < 0:
        return None
    return float(value)
