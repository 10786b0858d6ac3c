"""The operator's side of a site: a directory of mode 0700 whose files are 0600 and appear whole or not at all."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import secrets
import socket
import stat
from collections.abc import Callable, Iterator
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, TypeVar

from fleet.errors import ExitCode, FleetError

DIRECTORY_MODE = 0o700
FILE_MODE = 0o600
LOCK_NAME = "provision.lock"
LOCK_NOTE_MAX_BYTES = 4096
STATE_FILE_MAX_BYTES = 1 << 20
Parsed = TypeVar("Parsed")


def make_private_directory(path: Path) -> None:
    """Create a directory (and its parents) that only the operator can enter; an existing one is narrowed to 0700.

    Raises:
        FleetError: the path is no directory, or cannot be made.
    """
    try:
        path.mkdir(mode=DIRECTORY_MODE, parents=True, exist_ok=True)
        if stat.S_IMODE(path.stat().st_mode) != DIRECTORY_MODE:
            path.chmod(DIRECTORY_MODE)
    except OSError as error:
        raise FleetError(
            f"state directory {path}: {error.strerror}", hint="set state_dir in the inventory to a place you can write"
        ) from error


def write_private(path: Path, data: bytes) -> None:
    """Write a file as a whole: temporary name, 0600, fsync, rename, fsync of the directory.

    Raises:
        FleetError: the file cannot be written.
    """
    make_private_directory(path.parent)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(6)}")
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, FILE_MODE)
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise FleetError(f"{path}: {error.strerror}", hint="free some space, or mend the directory's owner") from error


def write_private_json(path: Path, data: dict[str, Any]) -> bool:
    """Write an object as JSON unless the file already says exactly that. Returns whether it was written."""
    text = (json.dumps(data, indent=2, sort_keys=True) + "\n").encode()
    if path.is_file() and path.read_bytes() == text:
        return False
    write_private(path, text)
    return True


def read_json(path: Path) -> dict[str, Any] | None:
    """A JSON object of the state directory; None if there is no such file.

    Raises:
        FleetError: the file is there, but is no JSON object of schema 1 or is longer than STATE_FILE_MAX_BYTES.
    """
    try:
        with path.open("rb") as file:
            raw = file.read(STATE_FILE_MAX_BYTES + 1)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise FleetError(f"{path}: {error.strerror}", hint="run as the user who provisioned this site") from error
    hint = f"move {path} away and provision again"
    if len(raw) > STATE_FILE_MAX_BYTES:
        raise FleetError(f"{path}: longer than {STATE_FILE_MAX_BYTES} bytes", hint=hint)
    try:
        data = json.loads(raw)
    except ValueError as error:
        raise FleetError(f"{path}: expected JSON: {error}", hint=hint) from error
    if not isinstance(data, dict) or data.get("schema") != 1:
        raise FleetError(f'{path}: expected a JSON object with "schema": 1', hint=hint)
    return data


def read_state(path: Path, parse: Callable[[dict[str, Any]], Parsed], hint: str = "") -> Parsed | None:
    """What a JSON file of the state directory says; None if there is no such file.

    Args:
        parse: takes the object apart; its KeyError, TypeError, ValueError or AttributeError means a damaged file.
        hint: the next step for a damaged file; moving it away if empty.

    Raises:
        FleetError: as `read_json`, or `parse` refuses what the file says.
    """
    data = read_json(path)
    try:
        return None if data is None else parse(data)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise FleetError(
            f"{path}: not what fleet wrote: {type(error).__name__}: {error}",
            hint=hint or f"move {path} away and provision again",
        ) from error


@contextlib.contextmanager
def site_lock(state_directory: Path, name: str = LOCK_NAME) -> Iterator[None]:
    """Keep two runs of one kind at a site apart, by flock: the lock ends with the process, however that ends.

    Args:
        name: of the lock's file; provisioning's if not given.

    Raises:
        FleetError: exit code 4; names process, machine and since when the holder works.
    """
    make_private_directory(state_directory)
    path = state_directory / name
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, FILE_MODE)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise _lock_held(descriptor, path) from error
        since = datetime.now(timezone.utc).isoformat(timespec="seconds")
        note = json.dumps({"pid": os.getpid(), "host": socket.gethostname(), "since": since})
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, note.encode(), 0)
        yield
        os.ftruncate(descriptor, 0)
    finally:
        os.close(descriptor)


def _lock_held(descriptor: int, path: Path) -> FleetError:
    """The error that names who holds the lock."""
    try:
        note = json.loads(os.pread(descriptor, LOCK_NOTE_MAX_BYTES, 0))
        who = f"process {note['pid']} on {note['host']}, since {note['since']}"
    except (ValueError, KeyError, TypeError):  # taken this very moment: its note is not written yet
        who = "a process that has just started"
    return FleetError(
        f"site is locked by {who} ({path})",
        hint="wait for it to end, or stop that process; the lock ends with it",
        exit_code=ExitCode.LOCKED,
    )
