"""What a site says of itself while it heals: the coordinator's site and events, the stages' health and metrics.

Waits are bounded; one that fails shows the site, its events and the last lines of every log.
"""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Callable, Sequence
from typing import Any
from urllib.parse import urlencode

from prometheus_client.parser import text_string_to_metric_families

from fleet.inventory.model import Role
from fleet.inventory.sitefile import SiteFile
from fleet.observe.site_access import client_context
from tests.lab.lab import Lab

REQUEST_SECONDS = 2.0
POLL_SECONDS = 0.05
WHOLE_DEADLINE_SECONDS = 120.0
EVENT_DEADLINE_SECONDS = 60.0
SHOWN_EVENTS = 40
SHOWN_LOG_LINES = 8

NO_ANSWER = (OSError, http.client.HTTPException)
"""What a request raises when the other side is down, silent, or ends in the middle of its answer."""

Event = dict[str, Any]


class Watch:
    """Looks at a site from outside, with the operator's certificate, and never keeps a connection that has died.

    Args:
        pipeline: the one that is watched.
    """

    def __init__(self, site: SiteFile, lab: Lab, pipeline: str = "main") -> None:
        self.site_file = site
        self.lab = lab
        self.name = pipeline
        self.boxes: tuple[str, ...] = tuple(site.site.pipelines[pipeline].boxes)
        self._context = client_context(site, with_certificate=True)
        control = next(name for name, box in site.site.boxes.items() if Role.COORDINATOR in box.roles)
        self._control = site.site.boxes[control].address

    def _get(self, address: str, port: int, path: str, **parameters: int) -> bytes:
        """The body of an answer, whatever its status: a stage or site that is not well answers 503 and says why."""
        connection = http.client.HTTPSConnection(address, port, timeout=REQUEST_SECONDS, context=self._context)
        try:
            connection.request("GET", f"{path}?{urlencode(parameters)}" if parameters else path)
            return connection.getresponse().read()
        finally:
            connection.close()

    def _coordinator(self, path: str, **parameters: int) -> dict[str, Any]:
        port = self.site_file.site.ports.coordinator_http
        return dict(json.loads(self._get(self._control, port, path, **parameters)))

    def _stage(self, box: str, path: str) -> bytes:
        spec = self.site_file.site
        return self._get(spec.boxes[box].address, spec.ports.metrics, path)

    def site(self) -> dict[str, Any]:
        """The coordinator's `/v1/site`.

        Raises:
            OSError, HTTPException: it does not answer.
        """
        return self._coordinator("/v1/site")

    def pipeline(self) -> dict[str, Any]:
        """The watched pipeline of it."""
        return dict(self.site()["pipelines"][self.name])

    def layers(self) -> dict[str, tuple[int, int]]:
        """Box → layers that the committed plan gives it; a box without layers is absent."""
        return {stage["box"]: tuple(stage["layers"]) for stage in self.pipeline()["stages"]}

    def events(self, after: int = 0) -> list[Event]:
        """The coordinator's events with a higher id, oldest first.

        Raises:
            OSError, HTTPException: it does not answer.
        """
        found: list[Event] = []
        while True:
            more = self._coordinator("/v1/events", after=found[-1]["id"] if found else after, limit=1000)["events"]
            if not more:
                return found
            found += more

    def last_event_id(self) -> int:
        """Where `events` goes on later."""
        return max((event["id"] for event in self.events()), default=0)

    def wait_for_event(
        self, kind: str, after: int, *, box: str | None = None, seconds: float = EVENT_DEADLINE_SECONDS
    ) -> Event:
        """The first event of a kind (about a box) behind an id; a coordinator that is down is waited for."""
        found: list[Event] = []

        def seen() -> bool:
            found[:] = [event for event in self.events(after) if event["kind"] == kind and box in (None, event["box"])]
            return bool(found)

        self.wait(seen, f"event {kind}{f' about {box}' if box else ''}", seconds)
        return found[0]

    def wait(self, condition: Callable[[], bool], what: str, seconds: float) -> None:
        """Poll until the condition holds; whoever does not answer has not fulfilled it yet.

        Raises:
            AssertionError: it does not hold in time; the message shows the site.
        """
        deadline = time.monotonic() + seconds
        while not self.holds(condition):
            assert time.monotonic() < deadline, f"{what}: not within {seconds:g} s\n{self.report()}"
            time.sleep(POLL_SECONDS)

    @staticmethod
    def holds(condition: Callable[[], bool]) -> bool:
        """The condition, or False while who is asked does not answer."""
        try:
            return condition()
        except NO_ANSWER:
            return False

    def is_whole(self) -> bool:
        """Every box of the pipeline serves layers, no switch goes on, and the ring is ready for requests."""
        site = self.site()
        pipeline = site["pipelines"][self.name]
        states = {name: box["state"] for name, box in site["boxes"].items() if name in self.boxes}
        return (
            pipeline["state"] == "serving"
            and pipeline["switching"] is None
            and tuple(stage["box"] for stage in pipeline["stages"]) == self.boxes
            and set(states.values()) == {"serving"}
            and self.is_ready()
        )

    def wait_whole(self, seconds: float = WHOLE_DEADLINE_SECONDS) -> None:
        """Return when all boxes serve again; a better split may still follow, once newer measurements have come in."""
        self.wait(self.is_whole, "the site is whole", seconds)

    def is_ready(self) -> bool:
        """The first stage of the committed plan runs its epoch's ring."""
        pipeline = self.pipeline()
        if pipeline["state"] != "serving" or not pipeline["stages"]:
            return False
        health = self.health(pipeline["stages"][0]["box"])
        return bool(health["state"] == "ready" and health["epoch"] == pipeline["epoch"])

    def health(self, box: str) -> dict[str, Any]:
        """A stage's `/health`, whatever its status code."""
        return dict(json.loads(self._stage(box, "/health")))

    def metric(self, box: str, name: str) -> float:
        """A stage's series without labels (counters without `_total`)."""
        families = text_string_to_metric_families(self._stage(box, "/metrics").decode())
        return next(family.samples[0].value for family in families if family.name == name)

    def guards(self, box: str) -> dict[str, Any]:
        """What a box's guards say of it: `/v1/guards`."""
        spec = self.site_file.site
        return dict(json.loads(self._get(spec.boxes[box].address, spec.ports.guards, "/v1/guards")))

    def guards_metrics(self, box: str) -> str:
        """A scrape of a box's guards."""
        spec = self.site_file.site
        return self._get(spec.boxes[box].address, spec.ports.guards, "/metrics").decode()

    def finding(self, box: str, guard: str, part: str) -> dict[str, Any] | None:
        """What a guard finds of one part; None if it has no such part (yet)."""
        findings = self.guards(box)["guards"][guard]["findings"]
        return next((finding for finding in findings if finding["part"] == part), None)

    def wait_for_finding(self, box: str, guard: str, part: str, *states: str, seconds: float) -> dict[str, Any]:
        """A guard's finding of a part, once it is in one of these states."""
        found: list[dict[str, Any]] = []

        def seen() -> bool:
            finding = self.finding(box, guard, part)
            found[:] = [finding] if finding is not None and finding["state"] in states else []
            return bool(found)

        self.wait(seen, f"{box}: {guard}/{part} is {' or '.join(states)}", seconds)
        return found[0]

    def largest_logit_difference(self) -> float | None:
        """δ of the newest probe of the rings that run now."""
        known = [self._difference_of(box) for box in self.boxes]
        return max((value for value in known if value is not None), default=None)

    def _difference_of(self, box: str) -> float | None:
        try:
            value = self.health(box)["largest_logit_difference"]
        except NO_ANSWER:
            return None
        return None if value is None else float(value)

    def report(self) -> str:
        """For a failed assertion: the site, its newest events, the end of every log."""
        lines: list[str] = []
        try:
            lines += [json.dumps(self.site()), *map(_event_line, self.events()[-SHOWN_EVENTS:])]
        except NO_ANSWER as error:
            lines.append(f"the coordinator does not answer: {error!r}")
        for box in self.lab.boxes:
            lines.append(f"--- {box.name}: {'last lines of its logs' if box.is_on else 'off'}")
            if box.is_on:
                tail = ["sh", "-c", f"tail -n {SHOWN_LOG_LINES} /var/log/fleet/*.log"]
                lines.append(box.exec(tail, check=False).stdout)
        return "\n".join(lines)


def _event_line(event: Event) -> str:
    phases = " ".join(f"{phase} {value:g}" for phase, value in event["milliseconds"].items())
    return f"{event['id']} {event['unix_seconds']:.3f} {event['kind']} {event['box'] or ''} {event['text']} {phases}"


def kinds(events: Sequence[Event]) -> list[str]:
    """Kinds of events in order."""
    return [event["kind"] for event in events]
