"""Long lists that resume: `make soak-<room>` runs a room's tests marked `soak`, one line of JSON a finished case.

Every case that passes is appended to build/soak/<room>.jsonl with commit, seed and time. A later run at the same commit
leaves those cases out, so a session that is cut off loses one case at most.
"""

from __future__ import annotations

import json
import os
import subprocess
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pytest

REPOSITORY = Path(__file__).resolve().parents[1]
RESULTS = REPOSITORY / "build" / "soak"


def room_of(item_location: str) -> str:
    """The folder below tests/ that a test lies in."""
    return Path(item_location).parts[1]


def commit() -> str:
    """The commit under test, with `+changes` when the tree differs from it."""
    git = ["git", "-C", str(REPOSITORY)]
    head = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
    clean = subprocess.run([*git, "diff", "--quiet", "HEAD"], check=False).returncode == 0
    return head if clean else f"{head}+changes"


def finished_cases(room: str, at_commit: str) -> set[str]:
    """Cases that passed at a commit."""
    return {entry["case"] for entry in entries(room, at_commit)}


class SoakRecord:
    """A pytest plugin: leaves finished cases out and records those that pass."""

    def __init__(self) -> None:
        self._commit = commit()

    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        """Drop what has passed at this commit."""
        rooms = {room_of(item.location[0]) for item in items}
        finished = {case for room in rooms for case in finished_cases(room, self._commit)}
        done = [item for item in items if item.get_closest_marker("soak") and item.nodeid in finished]
        if done:
            config.hook.pytest_deselected(items=done)
            items[:] = [item for item in items if item not in done]

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Append a case that passed."""
        if report.when != "call" or not report.passed or "soak" not in report.keywords:
            return
        entry = {"case": report.nodeid, "commit": self._commit, "seconds": round(report.duration, 2), **now()}
        append(room_of(report.location[0]), entry)


def now() -> dict[str, str]:
    """When a case has finished, as an entry's field."""
    return {"finished": datetime.now(timezone.utc).isoformat(timespec="seconds")}


def append(name: str, entry: dict[str, Any]) -> None:
    """Add a line to build/soak/<name>.jsonl, synced, so that a power cut keeps it."""
    RESULTS.mkdir(parents=True, exist_ok=True)
    with (RESULTS / f"{name}.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps(entry) + "\n")
        file.flush()
        os.fsync(file.fileno())


def entries(name: str, at_commit: str) -> list[dict[str, Any]]:
    """Lines of build/soak/<name>.jsonl that were written at a commit."""
    file = RESULTS / f"{name}.jsonl"
    if not file.exists():
        return []
    lines = (json.loads(line) for line in file.read_text(encoding="utf-8").splitlines())
    return [entry for entry in lines if entry["commit"] == at_commit]
