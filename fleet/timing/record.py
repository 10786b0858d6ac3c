"""What `fleet time push` did, one JSON object a line in the site's state directory."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fleet.errors import FleetError
from fleet.provision.state_directory import write_private

NAME = "time-pushes.jsonl"
MOST_LINES = 1000
MOST_BYTES = 1 << 20


def read(state_directory: Path) -> list[dict[str, Any]]:
    """All that is kept, oldest first.

    Raises:
        FleetError: the file can't be read, or is not what fleet wrote.
    """
    path = state_directory / NAME
    try:
        with path.open("rb") as file:
            raw = file.read(MOST_BYTES + 1)
        lines = [json.loads(line) for line in raw.splitlines()]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise FleetError(f"{path}: {error.strerror}", hint="run as the user who provisioned this site") from error
    except ValueError as error:
        raise FleetError(f"{path}: not what fleet wrote: {error}", hint=f"move {path} away") from error
    if len(raw) > MOST_BYTES or not all(isinstance(line, dict) for line in lines):
        raise FleetError(f"{path}: not what fleet wrote", hint=f"move {path} away")
    return lines


def add(state_directory: Path, entries: Sequence[dict[str, Any]]) -> None:
    """Append; the oldest go once there are more than MOST_LINES, or they fill half of MOST_BYTES.

    Raises:
        FleetError: see `read`; or it can't be written.
    """
    lines = [json.dumps(entry).encode() + b"\n" for entry in [*read(state_directory), *entries]][-MOST_LINES:]
    while len(lines) > 1 and sum(map(len, lines)) > MOST_BYTES // 2:
        lines = lines[len(lines) // 2 :]
    write_private(state_directory / NAME, b"".join(lines))
