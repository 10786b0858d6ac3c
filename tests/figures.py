"""Figures that tests measure, shown at the end of the run: a green run still says what it saw."""

from __future__ import annotations

FIGURES: list[str] = []


def note(line: str) -> None:
    """Show a line under "figures" when the run ends."""
    FIGURES.append(line)
