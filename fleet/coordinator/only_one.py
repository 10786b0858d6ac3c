"""One coordinator a state directory: a second one would give out epochs that the first gives out too."""

from __future__ import annotations

import fcntl
from pathlib import Path
from typing import BinaryIO

from fleet.errors import ExitCode, FleetError

LOCK_FILE = "coordinator.lock"


def hold_lock(directory: Path) -> BinaryIO:
    """Take the directory's lock; it is held until the file is closed or the process ends, however it ends.

    A file of its own: closing any descriptor of the database's file would drop the locks that SQLite holds on it.

    Raises:
        FleetError: another process holds it; exit code 4.
        OSError: the file can't be made.
    """
    file = (directory / LOCK_FILE).open("ab")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise FleetError(
            f"{directory}: another coordinator runs on it",
            hint=f"see which one: fuser -v {directory / LOCK_FILE}; supervisord runs the site's",
            exit_code=ExitCode.LOCKED,
        ) from None
    return file
