"""The section `guards` of an inventory, made from the guards' own settings: keys, defaults and descriptions stand there
alone."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field, create_model

from fleet.inventory.section import Section
from guards.config import LEAST_PERIOD_SECONDS
from guards.settings import GuardSettings

MOST = 1e9  # no period, threshold or count is larger
MOST_PERCENT = 100.0
MOST_STRATUM = 16.0  # NTP's "not synchronised" (RFC 5905, 7.3)
LEAST_DEADLINE_SECONDS = 0.1  # nothing answers sooner for sure, and what does not would be restarted
# Some settings make no sense at 0: key → (least, most). All others: from 0 to MOST, percentages to MOST_PERCENT.
BOUNDS: dict[str, tuple[float, float]] = {
    "period_seconds": (LEAST_PERIOD_SECONDS, MOST),
    "window_seconds": (1.0, MOST),
    # how long an answer is waited for
    "zone_deadline_seconds": (LEAST_DEADLINE_SECONDS, MOST),
    "gpu_deadline_seconds": (LEAST_DEADLINE_SECONDS, MOST),
    "query_seconds": (LEAST_DEADLINE_SECONDS, MOST),
    "answer_seconds": (LEAST_DEADLINE_SECONDS, MOST),
    "file_seconds": (LEAST_DEADLINE_SECONDS, MOST),
    "tool_seconds": (LEAST_DEADLINE_SECONDS, MOST),
    # a step that keeps nothing, or all, is none; a stage that never computes serves nobody
    "step_percent": (1.0, 99.0),
    "least_duty_percent": (1.0, MOST_PERCENT),
    # of nothing that was seen, nothing follows
    "silent_rounds": (1.0, MOST),
    "stopped_rounds": (1.0, MOST),
    "down_rounds": (1.0, MOST),
    "hung_seconds": (1.0, MOST),
    "loading_seconds": (1.0, MOST),
    "leak_mb_per_hour": (0.1, MOST),
    "local_stratum": (1.0, MOST_STRATUM),
    "future_years": (1.0, 1000.0),
}


def _setting(name: str) -> Any:
    """The type of a setting: a number with its bounds."""
    least, most = BOUNDS.get(name, (0.0, MOST_PERCENT if name.endswith("_percent") else MOST))
    return Annotated[float, Field(ge=least, le=most)]


def _section_of(kind: type[Any]) -> type[Section]:
    """The section of one guard."""
    fields: dict[str, Any] = {
        field.name: (_setting(field.name), Field(default=field.default, description=field.metadata["description"]))
        for field in dataclasses.fields(kind)
    }
    return create_model(kind.__name__, __base__=Section, __doc__=kind.__doc__, **fields)


def _guards() -> type[Section]:
    parts: dict[str, Any] = {}
    for field in dataclasses.fields(GuardSettings):
        kind = type(getattr(GuardSettings(), field.name))
        section, summary = _section_of(kind), (kind.__doc__ or "").strip().splitlines()[0]
        parts[field.name] = (section, Field(default=section(), description=summary))
    observe = Field(default=False, description="guards only say what they would do, and do nothing")
    return create_model(
        "Guards",
        __base__=Section,
        __doc__="What the guards of every box watch, and from where on they act.",
        observe=(bool, observe),
        **parts,
    )


if TYPE_CHECKING:
    Guards = Section  # made while the program runs, so a type checker knows no more of it
else:
    Guards = _guards()
