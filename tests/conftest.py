"""What holds for every test: seconds per room are printed, so that the slow room shows."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

import pytest

pytest_plugins = ["tests.lab.fixtures"]  # one lab a run, shared by every room

pytest_plugins = ["tests.lab.fixtures"]

_seconds_per_room: dict[str, float] = defaultdict(float)


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]):  # type: ignore[no-untyped-def]
    """Add the duration of a test's phase (set-up counts) to its room, the folder below tests/."""
    yield
    parts = Path(item.location[0]).parts
    _seconds_per_room[parts[1] if len(parts) > 2 else parts[-1]] += call.duration


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the seconds that each room took, longest first."""
    terminalreporter.section("seconds per room")
    for room, seconds in sorted(_seconds_per_room.items(), key=lambda entry: -entry[1]):
        terminalreporter.write_line(f"{seconds:8.1f}  {room}")
