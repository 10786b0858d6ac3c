"""What guards see as a table of plain text, at most as wide as the terminal. Pure."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence

from guards.board import Standing
from guards.findings import Finding, Value

HEADINGS = ("guard", "part", "state", "seen")
LEAST_TEXT_COLUMNS = 30
GAP = "  "


def table(standings: Mapping[str, Standing], columns: int) -> str:
    """One line a finding: guard, part, state, and its reason or figures; long ones go on below themselves.

    Args:
        columns: of the terminal.
    """
    rows: list[tuple[str, ...]] = [HEADINGS]
    for name, standing in standings.items():
        if not standing.findings:
            rows.append((name, "-", standing.state.value, ""))
        rows += [(name, found.part, found.state.value, _seen(found)) for found in standing.findings]
    widths = [max(len(row[index]) for row in rows) for index in range(len(HEADINGS) - 1)]
    room = max(LEAST_TEXT_COLUMNS, columns - sum(widths) - len(GAP) * len(widths))
    lines: list[str] = []
    for row in rows:
        seen = textwrap.wrap(row[-1], room) or [""]
        left = [cell.ljust(width) for cell, width in zip(row, widths, strict=False)]
        lines.append(GAP.join([*left, seen[0]]).rstrip())
        indent = " " * (sum(widths) + len(GAP) * len(widths))
        lines += [indent + more for more in seen[1:]]
    return "\n".join(lines)


def _seen(finding: Finding) -> str:
    known = {key: value for key, value in finding.evidence.items() if value is not None and value != ""}
    figures = ", ".join(f"{key} {_shown(value)}" for key, value in known.items())
    parts: Sequence[str] = [part for part in (finding.reason, figures) if part]
    return "; ".join(parts)


def _shown(value: Value) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)
