"""Events of the coordinator as rows and lines; pure."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timezone

from fleet.observe.coordinator import Event

EVENT_COLUMNS = ("id", "when", "event", "pipeline", "box", "what", "ms")


def event_rows(events: Sequence[Event], zone: timezone | None = None) -> list[tuple[str, ...]]:
    """Rows as `EVENT_COLUMNS`; the pipeline is named only where there are several.

    Args:
        zone: for the times; None: this machine's.
    """
    several = len({event.pipeline for event in events if event.pipeline}) > 1
    return [
        (
            str(event.id),
            when(event, zone),
            event.kind,
            event.pipeline if several else "",
            event.box,
            event.text,
            phases(event),
        )
        for event in events
    ]


def event_line(event: Event, zone: timezone | None = None) -> str:
    """One line, as `fleet events --follow` prints it."""
    about = " ".join(part for part in (event.pipeline, event.box) if part)
    took = phases(event)
    words = (when(event, zone), event.kind, f"[{about}]" if about else "", event.text, f"({took} ms)" if took else "")
    return "  ".join(word for word in words if word)


def phases(event: Event) -> str:
    """How long each phase took, in milliseconds: `detect 41, plan 2, prepare 220`."""
    return ", ".join(f"{phase} {value:.0f}" for phase, value in event.milliseconds.items())


def when(event: Event, zone: timezone | None = None) -> str:
    """By the coordinator's clock, in this machine's time zone; empty if it has no time that a calendar knows."""
    try:
        return datetime.fromtimestamp(event.unix_seconds, zone).strftime("%m-%d %H:%M:%S")
    except (OverflowError, OSError, ValueError):
        return ""
