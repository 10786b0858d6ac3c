"""coordinator.sqlite itself: blocking, used by one thread at a time. What trouble means is the store's business."""

from __future__ import annotations

import json
import logging
import os
import sqlite3
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO

from fleet.coordinator.only_one import hold_lock
from fleet.coordinator.records import BoxRecord, EpochRecord, Event, Kept, box_from_json, epoch_of, is_epoch
from fleet.errors import FleetError

log = logging.getLogger("fleet.coordinator")

SCHEMA = 1
# Damaged files that are kept to be looked at; a dying card makes one after the other.
MOST_SET_ASIDE = 3
Operation = tuple[str, tuple[Any, ...]]

_TABLES = """
CREATE TABLE IF NOT EXISTS pipelines (name TEXT PRIMARY KEY, reserved INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS epochs (pipeline TEXT, epoch INTEGER, plan TEXT NOT NULL, state TEXT NOT NULL,
    planned INTEGER NOT NULL, PRIMARY KEY (pipeline, epoch));
CREATE TABLE IF NOT EXISTS boxes (name TEXT PRIMARY KEY, record TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS events (id INTEGER PRIMARY KEY AUTOINCREMENT, unix_seconds REAL NOT NULL, kind TEXT NOT NULL,
    pipeline TEXT NOT NULL, box TEXT NOT NULL, text TEXT NOT NULL, milliseconds TEXT NOT NULL);
CREATE INDEX IF NOT EXISTS events_alike ON events (kind, pipeline, box);
CREATE TABLE IF NOT EXISTS room (bytes BLOB NOT NULL);
"""
# Held for the day when something else has filled the disk: free pages in the file, and as much in the log, which
# SQLite overwrites in place. A switch takes a few.
ROOM_BYTES = 256 * 1024
# History is written only while so many pages are free; what is live may take them all.
LEAST_FREE_PAGES = 32
# The log starts from its beginning again before it outgrows the room that it has.
CHECKPOINT_PAGES = 40


class StoreError(Exception):
    """A durable write failed, e.g. because the disk is full; nothing of it is in the database."""


class DatabaseLost(Exception):
    """The file is damaged, or it is not there any more; `begin_anew` makes another."""


class Database:
    """The file, its connection and the lock of its directory.

    Attributes:
        set_aside: where the last damaged file was moved; None: there was none.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.set_aside: Path | None = None
        self._connection: sqlite3.Connection | None = None
        self._lock: BinaryIO | None = None
        self._files: dict[Path, tuple[int, int]] = {}  # of the open database, with inode and bytes

    def open(self) -> Kept:
        """Open or create the file and read it; a damaged one is set aside.

        Raises:
            FleetError: the directory can't be written, or another coordinator uses it.
        """
        try:
            self._take_lock()
            try:
                self._connect()
                return self._read()
            except sqlite3.OperationalError:
                raise
            except (sqlite3.DatabaseError, ValueError) as error:
                self._move_away(str(error))
                self._connect()
                return self._read()
        except (OSError, sqlite3.OperationalError) as error:
            raise FleetError(f"{self.path}: cannot use it: {error}", hint="look at the disk: df -h, ls -ld") from None

    def write(self, operations: Sequence[Operation], *, history: bool = True) -> None:
        """Do all of them in one transaction, or none; on the disk when this returns.

        Args:
            history: there is history among them, for which the room is not that is held for what is live.

        Raises:
            StoreError: the disk takes nothing.
            DatabaseLost: see there.
        """
        connection: sqlite3.Connection | None = None
        try:
            connection = self._sound()
            if history and not self._has_room(connection):
                raise StoreError(f"{self.path}: cannot write: the disk is full")
            connection.execute("BEGIN IMMEDIATE")
            for sql, values in operations:
                connection.execute(sql, values)
            connection.execute("COMMIT")
        except (sqlite3.Error, OSError) as error:
            if connection is not None:
                self._roll_back(connection)
            raise self._trouble(error) from None

    def events(self, after: int, limit: int) -> list[Event]:
        """Events with a higher id, oldest first.

        Raises:
            StoreError: they can't be read. DatabaseLost: see there.
        """
        sql = (
            "SELECT id, unix_seconds, kind, pipeline, box, text, milliseconds FROM events WHERE id > ? "
            "ORDER BY id LIMIT ?"
        )
        try:
            rows = self._sound().execute(sql, (after, limit)).fetchall()
            return [
                Event(kind, text, pipeline, box, json.loads(milliseconds), id=number, unix_seconds=when)
                for number, when, kind, pipeline, box, text, milliseconds in rows
            ]
        except ValueError as error:
            raise DatabaseLost(f"an event is not as it was written: {error}") from None
        except (sqlite3.Error, OSError) as error:
            raise self._trouble(error) from None

    def begin_anew(self, reason: str, operations: Sequence[Operation]) -> None:
        """Set aside what is there, make a new file and write this into it.

        Raises:
            StoreError: the disk takes nothing.
        """
        try:
            self._take_lock()
            self._move_away(reason)
            self._connect()
            self.write(operations)
        except (OSError, ValueError, sqlite3.Error, FleetError, DatabaseLost) as error:
            self._disconnect()
            raise StoreError(f"{self.path}: cannot begin it anew: {error}") from None

    def close(self) -> None:
        """Close the file and give the lock up."""
        self._disconnect()
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def _take_lock(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if self._lock is not None:
            if os.fstat(self._lock.fileno()).st_nlink:
                return
            self._lock.close()  # its file was deleted: the next coordinator would lock another one
            self._lock = None
        self._lock = hold_lock(self.path.parent)

    def _connect(self) -> None:
        connection = self._connection = sqlite3.connect(self.path, check_same_thread=False, isolation_level=None)
        connection.execute("PRAGMA journal_mode=WAL")
        connection.execute("PRAGMA synchronous=FULL")
        if (answer := connection.execute("PRAGMA quick_check(1)").fetchone()[0]) != "ok":
            raise ValueError(str(answer))
        if (version := connection.execute("PRAGMA user_version").fetchone()[0]) not in (0, SCHEMA):
            raise ValueError(f"schema {version}, expected {SCHEMA}")
        connection.executescript(_TABLES)
        connection.execute(f"PRAGMA user_version={SCHEMA}")
        connection.execute(f"PRAGMA wal_autocheckpoint={CHECKPOINT_PAGES}")
        self._files = {}
        for path in (self.path, self.path.with_name(self.path.name + "-wal")):
            status = path.stat()
            self._files[path] = status.st_ino, status.st_size
        self._has_room(connection)

    def _has_room(self, connection: sqlite3.Connection) -> bool:
        """Whether enough pages are free; if not, more are taken from the disk, if it has them."""
        if connection.execute("PRAGMA freelist_count").fetchone()[0] >= LEAST_FREE_PAGES:
            return True
        status = os.statvfs(self.path.parent)
        if status.f_bavail * status.f_frsize <= ROOM_BYTES:
            return False
        try:
            connection.execute("INSERT INTO room VALUES (zeroblob(?))", (ROOM_BYTES,))
            connection.execute("PRAGMA wal_checkpoint(RESTART)").fetchall()  # now the file is as long as it says
            connection.execute("DELETE FROM room")
        except sqlite3.OperationalError as error:
            log.error("%s: no room is held for a full disk: %s", self.path, error)
            return False
        return True

    def _read(self) -> Kept:
        connection = self._sound()
        epochs: dict[str, list[EpochRecord]] = {}
        for pipeline, *row in connection.execute(
            "SELECT pipeline, epoch, plan, state, planned FROM epochs ORDER BY pipeline, epoch"
        ):
            try:
                epochs.setdefault(pipeline, []).append(epoch_of(*row))
            except ValueError as error:
                log.error("%s: an epoch of pipeline %.80r is left out: %s", self.path, pipeline, error)
        boxes: dict[str, BoxRecord] = {}
        for name, record in connection.execute("SELECT name, record FROM boxes"):
            try:
                boxes[name] = box_from_json(record)
            except (ValueError, AttributeError) as error:
                log.error("%s: what is known of box %.80r is left out: %s", self.path, name, error)
        reserved = dict(connection.execute("SELECT name, reserved FROM pipelines").fetchall())
        if not all(is_epoch(epoch) for epoch in reserved.values()):
            raise ValueError(f"reserved epochs {reserved!r}")
        return Kept(reserved, epochs, boxes)

    def _sound(self) -> sqlite3.Connection:
        """The connection, if the files behind it are still those that a restart would find."""
        if self._connection is None:
            raise DatabaseLost("it is not open")
        for path, (inode, size) in self._files.items():
            try:
                status = path.stat()
            except FileNotFoundError:
                raise DatabaseLost(f"{path.name} was deleted") from None
            if status.st_ino != inode or status.st_size < size:  # while it is open, SQLite shrinks neither
                raise DatabaseLost(f"{path.name} was replaced or cut short")
            self._files[path] = inode, status.st_size
        return self._connection

    def _trouble(self, error: sqlite3.Error | OSError) -> StoreError | DatabaseLost:
        if type(error) is sqlite3.DatabaseError:  # damage; a full disk, missing rights and the like are others
            return DatabaseLost(str(error))
        return StoreError(f"{self.path}: cannot write: {error}")

    @staticmethod
    def _roll_back(connection: sqlite3.Connection) -> None:
        if connection.in_transaction:  # some errors, a full disk among them, have rolled back already
            try:
                connection.execute("ROLLBACK")
            except sqlite3.Error as error:  # damage found once more; the transaction ends with the connection
                log.error("cannot roll back: %s", error)

    def _move_away(self, reason: str) -> None:
        self._disconnect()
        for suffix in ("-wal", "-shm"):
            self.path.with_name(self.path.name + suffix).unlink(missing_ok=True)
        if not self.path.exists():
            log.error("%s is gone (%s): a new one begins", self.path, reason)
            return
        number = 1
        while (
            target := self.path.with_name(f"{self.path.name}.damaged-{number}")
        ).exists() and number < MOST_SET_ASIDE:
            number += 1
        self.path.replace(target)
        self.set_aside = target
        log.error("%s is damaged (%s): set aside as %s, a new one begins", self.path, reason, target)

    def _disconnect(self) -> None:
        if self._connection is not None:
            try:
                self._connection.close()
            except sqlite3.Error as error:  # its last checkpoint found the damage
                log.error("%s: %s", self.path, error)
            self._connection = None
