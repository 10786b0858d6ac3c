"""`journal.sqlite`: what of resumable streams must outlive the gateway. Blocking; used by one thread at a time.

Admissions are on the disk when `write` returns (synchronous=FULL for that transaction); tokens are with the system
(NORMAL: the file is synced at checkpoints only), which outlives this process but not a power cut. What a power cut
takes is generated again: under policy `exact` from the same seed, so the same.
"""

from __future__ import annotations

import logging
import os
import sqlite3
from collections.abc import Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fleet.gateway.entries import Entry
from fleet.gateway.rows import StoredStream, entry_of, stream_of

log = logging.getLogger(__name__)

JOURNAL_FILE = "journal.sqlite"
JOURNAL_SCHEMA = 2
LARGEST_JOURNAL_BYTES = 2**30
"""The file never grows beyond it; a full journal is treated like a full disk."""
KEPT_WAL_BYTES = 16 * 2**20
VACUUM_PAGES = 4096
_TABLES = """
CREATE TABLE streams (
    number INTEGER PRIMARY KEY, id TEXT NOT NULL UNIQUE, record BLOB NOT NULL,
    resume_seconds REAL NOT NULL, remaining_seconds REAL NOT NULL, length INTEGER,
    admitted_unix_seconds REAL NOT NULL, ended_unix_seconds REAL);
CREATE TABLE entries (
    stream INTEGER NOT NULL, number INTEGER NOT NULL, body BLOB NOT NULL, PRIMARY KEY (stream, number)) WITHOUT ROWID;
"""


@dataclass(frozen=True)
class Operation:
    """A statement for rows, part of a transaction.

    Attributes:
        durable: on the disk when the transaction has ended.
        frees: it leaves room that may go back to the file system.
    """

    sql: str
    rows: Sequence[tuple[Any, ...]]
    durable: bool = False
    frees: bool = False


def without(numbers: Set[int]) -> list[Operation]:
    """Delete what belongs to no stream of these numbers: rows that damage has made unreachable."""
    kept = f"({', '.join(str(int(number)) for number in numbers)})"
    return [
        Operation(f"DELETE FROM streams WHERE number NOT IN {kept}", [()], frees=True),  # noqa: S608 - integers
        Operation(f"DELETE FROM entries WHERE stream NOT IN {kept}", [()], frees=True),  # noqa: S608
    ]


class JournalDatabase:
    """The file and its connection, which is opened when it is first needed, and anew after trouble.

    Args:
        directory: made if it is missing.

    Attributes:
        generation: of the file: a higher one holds nothing of what was written before.
    """

    def __init__(self, directory: Path) -> None:
        self.path = directory / JOURNAL_FILE
        self.generation = 0
        self._connection: sqlite3.Connection | None = None
        self._files: dict[Path, tuple[int, int]] = {}  # behind the connection, with inode and bytes

    def write(self, operations: Sequence[Operation]) -> None:
        """Do all of them in one transaction, or none.

        Raises:
            OSError, sqlite3.Error: the disk is full, the file can't be opened, …
        """
        connection = self._open()
        durable = any(operation.durable for operation in operations)
        try:
            connection.execute(f"PRAGMA synchronous={'FULL' if durable else 'NORMAL'}")
            connection.execute("BEGIN IMMEDIATE")
            try:
                for operation in operations:
                    connection.executemany(operation.sql, operation.rows)
                connection.execute("COMMIT")
            except BaseException:
                if connection.in_transaction:  # some errors, a full disk among them, have rolled back already
                    connection.execute("ROLLBACK")
                raise
            if any(operation.frees for operation in operations):
                connection.execute(f"PRAGMA incremental_vacuum({VACUUM_PAGES})").fetchall()
        except sqlite3.DatabaseError as error:
            self._judge(error)
            raise
        finally:
            self._note_files()  # freed pages are cut off at some checkpoint, and that is no damage

    def streams(self) -> list[StoredStream]:
        """All streams; one whose row can't be read is left out, with a log line.

        Raises:
            OSError, sqlite3.Error: the file can't be opened or read.
        """
        sql = "SELECT number, record, resume_seconds, remaining_seconds, length FROM streams ORDER BY number"
        streams = []
        for row in self._open().execute(sql):
            try:
                streams.append(stream_of(*row))
            except ValueError as error:
                log.warning("%s: stream number %r is left out: %s", self.path, row[0], error)
        return streams

    def entries(self, number: int) -> list[Entry]:
        """The entries of a stream, in order, up to the first that is missing or not as it was written.

        Raises:
            OSError, sqlite3.Error: the file can't be opened or read.
        """
        rows = self._open().execute("SELECT number, body FROM entries WHERE stream=? ORDER BY number", (number,))
        entries: list[Entry] = []
        for place, body in rows:
            try:
                if place != len(entries):
                    raise ValueError(f"entry {len(entries)} is missing")
                entries.append(entry_of(number, place, body))
            except ValueError as error:
                log.warning("%s: stream number %d ends after %d entries: %s", self.path, number, len(entries), error)
                break
        return entries

    def close(self) -> None:
        """Close the file; it is opened again when needed."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _open(self) -> sqlite3.Connection:
        if self._connection is not None:
            self._check_files()
            return self._connection
        self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        try:
            self._connection = self._connect()
        except sqlite3.DatabaseError as error:
            if not _is_damage(error):
                raise
            self._set_aside(str(error))
            self._connection = self._connect()
        return self._connection

    def _connect(self) -> sqlite3.Connection:
        connection = sqlite3.connect(self.path, isolation_level=None, check_same_thread=False)
        connection.text_factory = lambda raw: raw.decode(errors="replace")  # damage is for the checksums to find
        try:
            self.path.chmod(0o600)
            version = connection.execute("PRAGMA user_version").fetchone()[0]
            if version == 0:
                connection.execute("PRAGMA auto_vacuum=INCREMENTAL")
            connection.execute("PRAGMA journal_mode=WAL")
            connection.execute(f"PRAGMA journal_size_limit={KEPT_WAL_BYTES}")
            page_bytes = connection.execute("PRAGMA page_size").fetchone()[0]
            connection.execute(f"PRAGMA max_page_count={LARGEST_JOURNAL_BYTES // page_bytes}")
            if version == 0:
                connection.executescript(f"BEGIN; {_TABLES} PRAGMA user_version={JOURNAL_SCHEMA}; COMMIT;")
                _sync_directory(self.path.parent)
            elif version != JOURNAL_SCHEMA:
                raise sqlite3.DatabaseError(f"schema {version}, expected {JOURNAL_SCHEMA}")
            elif (found := connection.execute("PRAGMA quick_check(1)").fetchone()[0]) != "ok":
                raise sqlite3.DatabaseError(found)
        except UnicodeDecodeError as error:  # sqlite3's own message, which quotes a damaged schema
            connection.close()
            raise sqlite3.DatabaseError(f"its schema is no text: {error}") from None
        except BaseException:
            connection.close()
            raise
        self._files = {}
        self._note_files()
        return connection

    def _note_files(self) -> None:
        """How long the files are, and which they are if that is not known yet."""
        for path in (self.path, Path(f"{self.path}-wal")):
            if path.exists():
                status = path.stat()
                inode = self._files[path][0] if path in self._files else status.st_ino
                self._files[path] = inode, status.st_size

    def _check_files(self) -> None:
        """What is written must be what a start of the gateway finds.

        Raises:
            sqlite3.DatabaseError: the file was deleted, replaced or cut short; the next write begins a new one.
        """
        for path, (inode, size) in self._files.items():
            status = path.stat() if path.exists() else None
            if status is None or status.st_ino != inode or (path == self.path and status.st_size < size):
                self.close()
                self._set_aside(f"{path.name} was deleted, replaced or cut short")
                raise sqlite3.DatabaseError(f"{path.name} was deleted, replaced or cut short")

    def _judge(self, error: sqlite3.DatabaseError) -> None:
        """After trouble: a damaged file is set aside, so that the next write finds a whole one."""
        if _is_damage(error):
            self.close()
            self._set_aside(str(error))

    def _set_aside(self, reason: str) -> None:
        """Rename the file and what belongs to it; one damaged journal is kept to be looked at, not more."""
        self.generation += 1
        aside = self.path.with_name(self.path.name + ".damaged")
        log.error("%s is damaged (%s); it is set aside as %s", self.path, reason, aside)
        for suffix in ("", "-wal", "-shm"):
            old, new = Path(f"{self.path}{suffix}"), Path(f"{aside}{suffix}")
            new.unlink(missing_ok=True)
            if old.exists():
                old.replace(new)


def _is_damage(error: sqlite3.DatabaseError) -> bool:
    """A damaged file, as against a full disk, missing rights (both OperationalError) and the like."""
    return type(error) is sqlite3.DatabaseError


def _sync_directory(path: Path) -> None:
    directory = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)
