"""What the guards of a site's boxes say: asked at once, shown as rows. The asking apart from the showing.

A box may send anything: what is shown of it is one printable line a cell, and so many rows a box at most.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import aiohttp

from fleet.errors import ExitCode
from fleet.observe.health import Answer, ask
from fleet.observe.site_access import Endpoint

GUARD_COLUMNS = ("box", "guard", "part", "state", "seen")
BUDGET_COLUMNS = ("box", "budget", "left")
EVENT_COLUMNS = ("box", "guard", "kind", "times", "what")
SETTING_COLUMNS = ("box", "guard", "setting", "value")
# Of a part that is well or absent only the number is shown, unless all are asked for.
QUIET = ("healthy", "unsupported")
WORST_FIRST = ("unhealthy", "degraded", "initialising", "healthy", "unsupported")
EVENTS_SHOWN = 10
MOST_ROWS = 500  # of one kind of a box; a box with many sensors and links has some dozens
MOST_NAME_CHARACTERS = 64
MOST_TEXT_CHARACTERS = 300


@dataclass(frozen=True)
class BoxGuards:
    """What came back from the guards of one box."""

    box: str
    answer: Answer

    @property
    def guards(self) -> Mapping[str, Any]:
        """Name of a guard → its standing; empty without an answer."""
        return self.section("guards")

    @property
    def worst(self) -> str:
        """The worst state of all guards; "unknown" without an answer."""
        states = {_mapping(guard).get("state") for guard in self.guards.values() if _is_state(guard)}
        return next((state for state in WORST_FIRST if state in states), "unknown")

    def section(self, name: str) -> Mapping[str, Any]:
        """A mapping of the answer; empty if there is none."""
        return _mapping(_mapping(self.answer.document).get(name))


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
    """Rows as `GUARD_COLUMNS`: every part, or one line for all parts of a guard that are well.

    A box that does not answer has one row, which says so.
    """
    rows: list[tuple[str, ...]] = []
    for each in found:
        if not each.guards:
            rows.append((each.box, "-", "-", "unknown", _text(each.answer.error) or "no guards in the answer"))
        rows += islice(_rows_of(each, every_part=every_part), MOST_ROWS)
    return rows


def _rows_of(found: BoxGuards, *, every_part: bool) -> Iterable[tuple[str, ...]]:
    for name, guard in found.guards.items():
        shown_name, findings = _name(name), [_mapping(one) for one in _list(_mapping(guard).get("findings"))]
        shown = [one for one in findings if every_part or one.get("state") not in QUIET]
        if not findings:
            yield found.box, shown_name, "-", _name(_mapping(guard).get("state")), ""
        elif quiet := len(findings) - len(shown):
            well = any(one.get("state") == "healthy" for one in findings)
            parts = f"{quiet} part{'s' if quiet > 1 else ''}"
            yield found.box, shown_name, parts, "healthy" if well else "unsupported", ""
        for one in shown:
            yield found.box, shown_name, _name(one.get("part")), _name(one.get("state")), _seen(one)


def budget_rows(found: Sequence[BoxGuards]) -> list[tuple[str, ...]]:
    """Rows as `BUDGET_COLUMNS`."""
    return [
        (each.box, _name(name), _name(left))
        for each in found
        for name, left in islice(each.section("budgets_left").items(), MOST_ROWS)
    ]


def event_rows(found: Sequence[BoxGuards]) -> list[tuple[str, ...]]:
    """Rows as `EVENT_COLUMNS`: the last ones of each box."""
    return [
        (each.box, *(_name(event.get(key, "")) for key in ("guard", "kind", "times")), _text(event.get("text", "")))
        for each in found
        for event in map(_mapping, _list(_mapping(each.answer.document).get("events"))[-EVENTS_SHOWN:])
    ]


def setting_rows(found: Sequence[BoxGuards]) -> list[tuple[str, ...]]:
    """Rows as `SETTING_COLUMNS`. Boxes that have the same settings share one row a setting, headed "all"."""
    sections = {each.box: each.section("settings") for each in found if each.section("settings")}
    if not sections:
        return []
    first = next(iter(sections.values()))
    if all(section == first for section in sections.values()):
        sections = {"all": first}
    return [(box, *row) for box, section in sections.items() for row in islice(_settings_of(section), MOST_ROWS)]


def _settings_of(section: Mapping[str, Any]) -> Iterable[tuple[str, str, str]]:
    for guard, settings in section.items():
        for name, value in _mapping(settings).items():
            yield _name(guard), _name(name), _figure(value)


def problems(found: Sequence[BoxGuards]) -> list[str]:
    """One line for each box that does not answer, only observes, or can't write down what it must not forget."""
    lines = []
    for each in found:
        document = _mapping(each.answer.document)
        if not each.guards:
            lines.append(f"{each.box}: {_text(each.answer.error) or 'no guards in the answer'}")
        if document.get("trouble"):
            lines.append(f"{each.box}: {_text(document['trouble'])}")
        if document.get("observe") is True:
            lines.append(f"{each.box}: its guards only observe (guards.observe in the inventory)")
    return lines


def exit_code(found: Sequence[BoxGuards]) -> ExitCode:
    """0: nothing is unhealthy; 3: only unreachable boxes stand in the way; 1 otherwise."""
    silent = [each for each in found if each.worst == "unknown"]
    if any(each.worst == "unhealthy" for each in found) or any(not each.answer.unreachable for each in silent):
        return ExitCode.FAILED
    return ExitCode.UNREACHABLE if silent else ExitCode.OK


def _is_state(guard: object) -> bool:
    return isinstance(_mapping(guard).get("state"), str)


def _seen(finding: Mapping[str, Any]) -> str:
    evidence = _mapping(finding.get("evidence"))
    figures = [f"{key} {_figure(value)}" for key, value in evidence.items() if value is not None and value != ""]
    reason = finding.get("reason", "")
    return _text("; ".join(filter(None, (reason if isinstance(reason, str) else "", ", ".join(figures)))))


def _figure(value: object) -> str:
    return f"{value:.6g}" if isinstance(value, float) else _name(value)


def _name(value: object) -> str:
    return _text(value, MOST_NAME_CHARACTERS)


def _text(value: object, most: int = MOST_TEXT_CHARACTERS) -> str:
    """One printable line: what a terminal would obey is escaped. Mappings and lists are no text."""
    if isinstance(value, Mapping | list):
        return "?"
    # a number of a million digits is none of ours, and Python refuses to print it
    text = value[: most + 1] if isinstance(value, str) else "?" if _is_huge(value) else str(value)
    escaped = "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in text)
    return escaped if len(escaped) <= most else escaped[: most - 1] + "…"


def _is_huge(value: object) -> bool:
    return isinstance(value, int) and value.bit_length() > 64


def _mapping(value: object) -> Mapping[str, Any]:
    """What another process sent may be anything."""
    return value if isinstance(value, Mapping) else {}


def _list(value: object) -> list[Any]:
    return value if isinstance(value, list) else []
