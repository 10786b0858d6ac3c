"""What every part of a running coordinator shares: configuration, clock, store, boxes, gateways, events, metrics."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import replace

from fleet.coordinator.awake import AwakeClock
from fleet.coordinator.clock_watch import ClockWatch
from fleet.coordinator.config import CoordinatorConfig
from fleet.coordinator.hold_down import HoldDown
from fleet.coordinator.metrics import CoordinatorMetrics
from fleet.coordinator.records import BoxRecord, Event, Kept
from fleet.coordinator.state import BoxState, GatewayState
from fleet.coordinator.store import Store
from fleet.coordinator.text import line

log = logging.getLogger("fleet.coordinator")

# Deadlines are looked at so often at least; evidence that comes in is looked at when it comes.
MOST_TICK_SECONDS = 0.25
# Of an event; the longest honest one describes a plan of 60 boxes.
MOST_EVENT_CHARACTERS = 2000
EVENTS_AS_WARNINGS = frozenset(
    {
        "box-dead",
        "box-hung",
        "box-slow",
        "box-clone-refused",
        "box-held-down",
        "box-clock-off",
        "plan-aborted",
        "plan-refused",
        "database-replaced",
    }
)


class Context:
    """Shared by all pipelines of one coordinator.

    Args:
        config: what it was told. store: open. kept: what was in it.
        time: the monotonic clock; the running loop's if None.
    """

    def __init__(
        self, config: CoordinatorConfig, store: Store, kept: Kept, time: Callable[[], float] | None = None
    ) -> None:
        self.config = config
        self.store = store
        self.tick_seconds = min(MOST_TICK_SECONDS, config.timing.heartbeat_seconds)
        self.clock = AwakeClock(time or asyncio.get_running_loop().time, self.tick_seconds)
        self.metrics = CoordinatorMetrics(config)
        self.boxes = {name: self._box(name, kept.boxes.get(name, BoxRecord())) for name in config.boxes}
        self.gateways: list[GatewayState] = []
        self.clocks = ClockWatch(config.box, config.boxes, self.metrics.clock_offset, self.event)

    def _box(self, name: str, record: BoxRecord) -> BoxState:
        timing, now = self.config.timing, self.clock.now()
        hold_down = HoldDown(timing.hold_down_seconds, timing.hold_down_max_seconds, timing.hold_down_forget_seconds)
        hold_down.restore(now, record.deaths, record.hold_down_seconds)
        return BoxState(
            name,
            self.config.boxes[name],
            self.config.pipeline_of(name),
            record,
            hold_down,
            channel_since=now,
            since=now,
        )

    def event(
        self, kind: str, text: str, *, pipeline: str = "", box: str = "", milliseconds: dict[str, int] | None = None
    ) -> None:
        """Something happened: one line of the log, one event, one count."""
        text = line(text, MOST_EVENT_CHARACTERS)
        self.store.event(Event(kind, text, pipeline, box, milliseconds or {}))
        self.metrics.events.labels(kind).inc()
        fields = {"event": kind, "pipeline": pipeline, "box": box, **(milliseconds or {})}
        log.log(
            logging.WARNING if kind in EVENTS_AS_WARNINGS else logging.INFO,
            text,
            extra={"fields": {name: value for name, value in fields.items() if value != ""}},
        )

    def keep(self, box: BoxState) -> None:
        """Write down soon what is to outlive this process of a box."""
        hold_down = box.hold_down
        remaining = hold_down.remaining(self.clock.now())
        box.record = replace(box.record, deaths=hold_down.deaths, hold_down_seconds=remaining)
        self.store.box(box.name, box.record)
