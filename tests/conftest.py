"""What holds for every test: figures that tests measured and seconds per room are printed when the run ends."""

from __future__ import annotations

import signal
from collections import defaultdict
from pathlib import Path

import pytest
from hypothesis import settings

from tests.figures import FIGURES
from tests.soak import SoakRecord

pytest_plugins = ["tests.lab.fixtures"]  # one lab a run, shared by every room

# two busy cores: how long an example takes says nothing about whether it is right
settings.register_profile("fleet", deadline=None)
settings.load_profile("fleet")

_seconds_per_room: dict[str, float] = defaultdict(float)


def pytest_configure(config: pytest.Config) -> None:
    """`-m soak` resumes and records. Ctrl-C works in the programs that tests start, however this run was started."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a shell's background job passes that on to its children
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if config.getoption("markexpr") == "soak":
        config.pluginmanager.register(SoakRecord())


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]):  # type: ignore[no-untyped-def]
    """Add the duration of a test's phase (set-up counts) to its room, the folder below tests/."""
    yield
    parts = Path(item.location[0]).parts
    _seconds_per_room[parts[1] if len(parts) > 2 else parts[-1]] += call.duration


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print what was measured, and the seconds that each room took, longest first."""
    if FIGURES:
        terminalreporter.section("figures")
        for line in FIGURES:
            terminalreporter.write_line(line)
    terminalreporter.section("seconds per room")
    for room, seconds in sorted(_seconds_per_room.items(), key=lambda entry: -entry[1]):
        terminalreporter.write_line(f"{seconds:8.1f}  {room}")
