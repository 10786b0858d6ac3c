"""What the guards of a site's boxes say: asked at once, shown as rows. The asking apart from the showing."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp

from fleet.errors import ExitCode
from fleet.observe.health import Answer, ask
from fleet.observe.site_access import Endpoint

GUARD_COLUMNS = ("box", "guard", "part", "state", "seen")
BUDGET_COLUMNS = ("box", "budget", "left")
EVENT_COLUMNS = ("box", "guard", "kind", "times", "what")
SETTING_COLUMNS = ("guard", "setting", "value")
# Of a part that is well or absent only the number is shown, unless all are asked for.
QUIET = ("healthy", "unsupported")
EVENTS_SHOWN = 10


@dataclass(frozen=True)
class BoxGuards:
    """What came back from the guards of one box."""

    box: str
    answer: Answer

    @property
    def guards(self) -> Mapping[str, Any]:
        """Name of a guard → its standing; empty without an answer."""
        return _mapping(_mapping(self.answer.document).get("guards"))

    @property
    def worst(self) -> str:
        """The worst state of all guards; "unknown" without an answer."""
        order = ("unhealthy", "degraded", "initialising", "healthy", "unsupported")
        states = {str(_mapping(guard).get("state")) for guard in self.guards.values()}
        return next((state for state in order if state in states), "unknown")


async def ask_guards(endpoints: Mapping[str, Endpoint], context: ssl.SSLContext) -> list[BoxGuards]:
    """Ask all boxes at once, each with its own deadline.

    Args:
        context: with the operator's certificate.
    """
    connector = aiohttp.TCPConnector(ssl=context, limit=0, force_close=True)
    async with aiohttp.ClientSession(connector=connector, trust_env=False) as session:
        answers = await asyncio.gather(*(ask(session, endpoint, "/v1/guards") for endpoint in endpoints.values()))
    return [BoxGuards(box, answer) for box, answer in zip(endpoints, answers, strict=True)]


def guard_rows(found: Sequence[BoxGuards], *, every_part: bool) -> list[tuple[str, ...]]:
    """Rows as `GUARD_COLUMNS`: every part, or one line for all parts of a guard that are well."""
    rows: list[tuple[str, ...]] = []
    for each in found:
        for name, guard in each.guards.items():
            findings = [_mapping(finding) for finding in _list(_mapping(guard).get("findings"))]
            shown = [one for one in findings if every_part or one.get("state") not in QUIET]
            quiet = len(findings) - len(shown)
            if quiet or not findings:
                state = "healthy" if findings else str(_mapping(guard).get("state"))
                rows.append((each.box, name, f"{quiet} parts" if findings else "-", state, ""))
            rows += [(each.box, name, str(one.get("part")), str(one.get("state")), _seen(one)) for one in shown]
    return rows


def budget_rows(found: Sequence[BoxGuards]) -> list[tuple[str, ...]]:
    """Rows as `BUDGET_COLUMNS`."""
    return [
        (each.box, name, str(left))
        for each in found
        for name, left in _mapping(_mapping(each.answer.document).get("budgets_left")).items()
    ]


def event_rows(found: Sequence[BoxGuards]) -> list[tuple[str, ...]]:
    """Rows as `EVENT_COLUMNS`: the last ones of each box."""
    return [
        (each.box, *(str(event.get(key, "")) for key in ("guard", "kind", "times", "text")))
        for each in found
        for event in map(_mapping, _list(_mapping(each.answer.document).get("events"))[-EVENTS_SHOWN:])
    ]


def setting_rows(found: BoxGuards) -> list[tuple[str, ...]]:
    """Rows as `SETTING_COLUMNS`, of one box."""
    settings = _mapping(_mapping(found.answer.document).get("settings"))
    return [
        (guard, name, f"{value:g}" if isinstance(value, float) else str(value))
        for guard, section in settings.items()
        for name, value in _mapping(section).items()
    ]


def problems(found: Sequence[BoxGuards]) -> list[str]:
    """One line for each box that does not answer, only observes, or can't write down what it must not forget."""
    lines = []
    for each in found:
        document = _mapping(each.answer.document)
        if not document:
            lines.append(f"{each.box}: {each.answer.error}")
        if document.get("trouble"):
            lines.append(f"{each.box}: {document['trouble']}")
        if document.get("observe"):
            lines.append(f"{each.box}: its guards only observe (guards.observe in the inventory)")
    return lines


def exit_code(found: Sequence[BoxGuards]) -> ExitCode:
    """0: nothing is unhealthy; 3: only unreachable boxes stand in the way; 1 otherwise."""
    silent = [each for each in found if each.answer.document is None]
    if any(each.worst == "unhealthy" for each in found) or any(not each.answer.unreachable for each in silent):
        return ExitCode.FAILED
    return ExitCode.UNREACHABLE if silent else ExitCode.OK


def _seen(finding: Mapping[str, Any]) -> str:
    evidence = _mapping(finding.get("evidence"))
    figures = [f"{key} {_figure(value)}" for key, value in evidence.items() if value not in (None, "")]
    return "; ".join(filter(None, (str(finding.get("reason", "")), ", ".join(figures))))


def _figure(value: object) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _mapping(value: object) -> Mapping[str, Any]:
    """What another process sent may be anything."""
    return value if isinstance(value, Mapping) else {}


def _list(value: object) -> list[Any]:
    return value if isinstance(value, list) else []
