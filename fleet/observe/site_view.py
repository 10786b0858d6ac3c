"""From the coordinator's `GET /v1/site` to rows: what it plans, and what it thinks of each box; pure.

Every value is judged by its type, so that any document makes rows: a coordinator of another version is no crash.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fleet.observe.health import Answer

PLAN_COLUMNS = ("pipeline", "plan", "epoch", "order", "spare", "cannot lose", "switching", "note")
MEMBER_COLUMNS = ("box", "member", "since", "load", "°C", "guards", "note")
WELL_STATES = ("serving", "standby")
"""A box in one of these is as it should be; every other one has something to say."""
MINUTE, HOUR, DAY = 60, 3600, 86400


@dataclass(frozen=True)
class PlanRow:
    """A pipeline as the coordinator plans it.

    Attributes:
        state: "serving", "replanning", "refused" or "none". order: boxes of its stages in ring order.
        degraded: what is missing although it serves. reason: why it does not. switching: in words, empty if it isn't.
        cannot_lose: boxes whose single loss no plan survives. missing_mebibytes: box → what it lacks.
    """

    pipeline: str
    state: str
    epoch: int | None
    order: tuple[str, ...]
    spares: tuple[str, ...]
    degraded: str
    reason: str
    switching: str
    cannot_lose: tuple[str, ...]
    missing_mebibytes: Mapping[str, str]

    @property
    def note(self) -> str:
        """Why it does not serve, or serves with less than the whole site, and which memory is missing."""
        lacks = [f"{box} lacks {mebibytes} MiB" for box, mebibytes in self.missing_mebibytes.items()]
        return "; ".join(part for part in (self.degraded, self.reason, ", ".join(lacks)) if part)

    def cells(self) -> tuple[str, ...]:
        """As `PLAN_COLUMNS`."""
        return (
            self.pipeline,
            self.state,
            "" if self.epoch is None else str(self.epoch),
            " ".join(self.order),
            " ".join(self.spares),
            " ".join(self.cannot_lose),
            self.switching,
            self.note,
        )


@dataclass(frozen=True)
class MemberRow:
    """A box as the coordinator sees it.

    Attributes:
        state: "serving", "unheard", "standby", "returning", "held-down", "drained", "draining", "dead", "hung" or
            "never-seen".
        since_seconds: how long it is so. hold_down_seconds_left: until it may come back.
        slow: its steps take far longer than they used to. load: 0…1.
    """

    box: str
    pipeline: str
    state: str
    reason: str
    since_seconds: float | None
    hold_down_seconds_left: float | None
    slow: bool
    load: float | None
    temperature_celsius: float | None
    guards: str

    @property
    def note(self) -> str:
        """What an operator should know."""
        left = self.hold_down_seconds_left
        held = f"{left:.0f} s of hold-down left" if left is not None and left > 0 else ""
        slow = "slow: its steps take far longer than they used to" if self.slow else ""
        return "; ".join(part for part in (slow, self.reason or held) if part)

    def cells(self) -> tuple[str, ...]:
        """As `MEMBER_COLUMNS`."""
        return (
            self.box,
            self.state,
            "" if self.since_seconds is None else duration(self.since_seconds),
            "" if self.load is None else f"{self.load:.0%}",
            "" if self.temperature_celsius is None else f"{self.temperature_celsius:.0f}",
            self.guards,
            self.note,
        )


@dataclass(frozen=True)
class CoordinatorView:
    """What the coordinator says.

    Attributes:
        state: "answers", "unreachable", "failed", or "none" where the site has none. note: why, for people.
    """

    state: str
    note: str
    plans: tuple[PlanRow, ...] = ()
    members: tuple[MemberRow, ...] = ()

    @property
    def drained(self) -> frozenset[str]:
        """Boxes that serve nothing because someone asked for that."""
        return frozenset(row.box for row in self.members if row.state in ("drained", "draining"))


def coordinator_view(answer: Answer | None) -> CoordinatorView:
    """Rows for every pipeline and box.

    Args:
        answer: of `GET /v1/site`; None where the site has no coordinator.
    """
    if answer is None:
        return CoordinatorView("none", "the site has no coordinator")
    if answer.document is None:
        return CoordinatorView("unreachable" if answer.unreachable else "failed", answer.error)
    pipelines, boxes = mapping(answer.document.get("pipelines")), mapping(answer.document.get("boxes"))
    return CoordinatorView(
        "answers",
        "",
        tuple(_plan_row(name, mapping(entry)) for name, entry in pipelines.items()),
        tuple(_member_row(name, mapping(entry)) for name, entry in boxes.items()),
    )


def _plan_row(name: str, entry: Mapping[str, Any]) -> PlanRow:
    stages = entry.get("stages")
    boxes = [text(mapping(stage).get("box")) for stage in stages] if isinstance(stages, list) else []
    missing = mapping(entry.get("missing_mebibytes"))
    return PlanRow(
        pipeline=name,
        state=text(entry.get("state")) or "unknown",
        epoch=integer(entry.get("epoch")),
        order=tuple(box for box in boxes if box),
        spares=texts(entry.get("spares")),
        degraded=text(entry.get("degraded")) or "",
        reason=text(entry.get("reason")) or "",
        switching=_switching(entry.get("switching")),
        cannot_lose=texts(entry.get("unsurvivable")),
        missing_mebibytes={box: str(size) for box, size in missing.items() if isinstance(size, int | float | str)},
    )


def _switching(value: object) -> str:
    """A switch in words: `to epoch 5, planned, 3 s, waits for box2`."""
    switch = mapping(value)
    epoch, since = integer(switch.get("epoch")), number(switch.get("since_seconds"))
    if epoch is None:
        return ""
    words = [f"to epoch {epoch}", "planned" if switch.get("planned") is True else "unplanned"]
    if since is not None:
        words.append(duration(since))
    if waiting := texts(switch.get("waiting_for")):
        words.append(f"waits for {' '.join(waiting)}")
    return ", ".join(words)


def _member_row(name: str, entry: Mapping[str, Any]) -> MemberRow:
    heartbeat = mapping(entry.get("heartbeat"))
    return MemberRow(
        box=name,
        pipeline=text(entry.get("pipeline")) or "",
        state=text(entry.get("state")) or "unknown",
        reason=text(entry.get("reason")) or "",
        since_seconds=number(entry.get("since_seconds")),
        hold_down_seconds_left=number(entry.get("hold_down_seconds_left")),
        slow=entry.get("slow") is True,
        load=number(heartbeat.get("load")),
        temperature_celsius=number(heartbeat.get("temperature_celsius")),
        guards=text(heartbeat.get("guard_state")) or "",
    )


def duration(seconds: float) -> str:
    """A time span as people say it: `8 s`, `12 min`, `3 h`, `2 d`."""
    for unit, word in ((DAY, "d"), (HOUR, "h"), (MINUTE, "min")):
        if seconds >= 2 * unit:
            return f"{seconds / unit:.0f} {word}"
    return f"{seconds:.0f} s"


def mapping(value: object) -> Mapping[str, Any]:
    """The value if it is a JSON object, else an empty one."""
    return value if isinstance(value, dict) else {}


def text(value: object) -> str | None:
    """The value if it is text that says something."""
    return value if isinstance(value, str) and value else None


def texts(value: object) -> tuple[str, ...]:
    """The texts of a list."""
    return tuple(item for item in value if isinstance(item, str)) if isinstance(value, list) else ()


def integer(value: object) -> int | None:
    """The value if it is an integer."""
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def number(value: object) -> float | None:
    """The value if it is a number that a float can hold."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return None
    try:
        return float(value)
    except OverflowError:
        return None
