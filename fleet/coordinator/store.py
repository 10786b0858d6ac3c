"""coordinator.sqlite: every epoch, what is known of the boxes, and the events. Its calls run in a thread of their own.

What need not be waited for (events, incarnations, `preparing`) is noted and written with the next write, at most
`WRITE_BEHIND_SECONDS` later; the durable write that is a switch's commit point takes one transaction, one fsync.
"""

from __future__ import annotations

import asyncio
import json
import logging
import sqlite3
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Literal, TypeVar

from fleet.coordinator.only_one import hold_lock
from fleet.errors import FleetError
from fleet.planning.plan import PipelinePlan, StagePlan

log = logging.getLogger("fleet.coordinator")

SCHEMA = 1
MOST_EVENTS = 10_000
MOST_EPOCHS_KEPT = 1_000  # a pipeline; older ones are history that nobody asks for
WRITE_BEHIND_SECONDS = 0.05
# Epochs that may be given out before the next durable write, so that a PREPARE need not wait for one.
EPOCHS_RESERVED = 16

EpochState = Literal["preparing", "committed", "aborted", "retired"]
T = TypeVar("T")
Operation = tuple[str, tuple[Any, ...]]

_TABLES = """
CREATE TABLE IF NOT EXISTS pipelines (name TEXT PRIMARY KEY, reserved INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS epochs (pipeline TEXT, epoch INTEGER, plan TEXT NOT NULL, state TEXT NOT NULL,
    planned INTEGER NOT NULL, PRIMARY KEY (pipeline, epoch));
CREATE TABLE IF NOT EXISTS boxes (name TEXT PRIMARY KEY, record TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS events (id INTEGER PRIMARY KEY AUTOINCREMENT, unix_seconds REAL NOT NULL, kind TEXT NOT NULL,
    pipeline TEXT NOT NULL, box TEXT NOT NULL, text TEXT NOT NULL, milliseconds TEXT NOT NULL);
"""
# Writes a page and leaves what is there.
_TRIAL: Operation = ("INSERT OR REPLACE INTO boxes SELECT name, record FROM boxes LIMIT 1", ())


class StoreError(Exception):
    """A durable write failed, e.g. because the disk is full; nothing of it is in the database."""


@dataclass(frozen=True)
class EpochRecord:
    """One epoch of a pipeline."""

    epoch: int
    plan: PipelinePlan
    state: EpochState
    planned: bool


@dataclass(frozen=True)
class BoxRecord:
    """What outlives the coordinator of a box.

    Attributes:
        incarnation, process_id, address: of its last registration.
        memory_bytes, layer_seconds, head_seconds: measured there; None: not yet.
        deaths, hold_down_seconds: of its hold-down, as seconds that remained when this was written.
        drained: an operator wants nothing on it.
    """

    incarnation: int = 0
    process_id: str = ""
    address: str = ""
    memory_bytes: int | None = None
    layer_seconds: float | None = None
    head_seconds: float | None = None
    deaths: int = 0
    hold_down_seconds: float = 0.0
    drained: bool = False


@dataclass(frozen=True)
class Event:
    """One line of history, as the API gives it; `id` is 0 until it is stored."""

    kind: str
    text: str
    pipeline: str = ""
    box: str = ""
    milliseconds: dict[str, int] = field(default_factory=dict)
    id: int = 0
    unix_seconds: float = 0.0


@dataclass(frozen=True)
class Kept:
    """Everything that a start reads.

    Attributes:
        reserved: pipeline → highest epoch that may have been given out. epochs: pipeline → records, oldest first.
    """

    reserved: dict[str, int]
    epochs: dict[str, list[EpochRecord]]
    boxes: dict[str, BoxRecord]


def plan_to_json(plan: PipelinePlan) -> str:
    """Canonical JSON of a pipeline's plan."""
    return json.dumps(asdict(plan), sort_keys=True)


def plan_from_json(text: str) -> PipelinePlan:
    """What `plan_to_json` wrote.

    Raises:
        ValueError, KeyError, TypeError: it is none.
    """
    raw = json.loads(text)
    return PipelinePlan(**{**raw, "stages": tuple(StagePlan(**stage) for stage in raw["stages"])})


class Store:
    """The database. Open it, `load`, then run `write_behind` for as long as the process lives.

    Attributes:
        set_aside: where a damaged database was moved; None: it was sound, or there was none.
        refused: why the disk took nothing at the last write; empty if it did.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.set_aside: Path | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="store")
        self.refused = ""
        self._pending: list[Operation] = []
        self._reserved: dict[str, int] = {}  # not on the disk yet; a failed write must not lose it
        self._wanted = asyncio.Event()
        self._database: sqlite3.Connection | None = None
        self._lock: BinaryIO | None = None

    async def open(self) -> Kept:
        """Open or create the database and read it.

        Raises:
            FleetError: the directory can't be written, or another coordinator uses it.
        """
        return await self._in_thread(self._open_or_set_aside)

    def note(self, sql: str, *values: Any) -> None:
        """Write this soon, and before everything that is noted or committed later."""
        self._pending.append((sql, values))
        self._wanted.set()

    async def commit(self) -> None:
        """Write all that is noted, durably.

        Raises:
            StoreError: it could not be written; what was noted is lost, but for the epochs that are reserved.
        """
        noted, self._pending = self._pending, []
        reserved = dict(self._reserved)
        reserve = "INSERT OR REPLACE INTO pipelines VALUES (?, ?)"
        operations = [*noted, *((reserve, item) for item in reserved.items())]
        if not operations:
            return
        try:
            await self._in_thread(lambda: self._write(operations))
        except StoreError as error:
            self.refused = str(error)
            raise
        self.refused = ""
        self._reserved = {name: epoch for name, epoch in self._reserved.items() if reserved.get(name) != epoch}

    async def write_behind(self) -> None:
        """Write what is noted; runs until cancelled. What the disk refuses is logged: serving goes on without."""
        while True:
            await self._wanted.wait()
            await asyncio.sleep(WRITE_BEHIND_SECONDS)
            self._wanted.clear()
            try:
                await self.commit()
            except StoreError as error:
                log.error("%s", error)

    async def close(self) -> None:
        """Write what is noted and close."""
        try:
            await self.commit()
        except StoreError as error:
            log.error("%s", error)
        await self._in_thread(self._close_all)
        self._thread.shutdown(wait=False)

    async def events(self, after: int, limit: int) -> list[Event]:
        """Events with a higher id, oldest first; what was noted before this call is among them, if the disk took it.

        Raises:
            StoreError: they can't be read.
        """
        try:
            await self.commit()
        except StoreError as error:
            log.error("%s", error)
        return await self._in_thread(lambda: self._events(after, limit))

    # -- what is written ----------------------------------------------------------------------------------------------

    def reserve(self, pipeline: str, epoch: int) -> None:
        """Note that epochs up to `EPOCHS_RESERVED` above this one may be given out."""
        self._reserved[pipeline] = epoch + EPOCHS_RESERVED
        self._wanted.set()

    async def works(self) -> bool:
        """Whether a durable write is possible now; the disk is asked only if it refused the last one."""
        if self.refused:
            try:
                await self._in_thread(lambda: self._write([_TRIAL]))
                await self.commit()
            except StoreError as error:
                self.refused = str(error)
                return False
            self.refused = ""
        return True

    def epoch(self, pipeline: str, record: EpochRecord) -> None:
        """Note an epoch with its state; old ones go."""
        values = (pipeline, record.epoch, plan_to_json(record.plan), record.state, int(record.planned))
        self.note("INSERT OR REPLACE INTO epochs VALUES (?, ?, ?, ?, ?)", *values)
        self.note(
            "DELETE FROM epochs WHERE pipeline = ? AND epoch <= ? AND state IN ('aborted', 'retired')",
            pipeline,
            record.epoch - MOST_EPOCHS_KEPT,
        )

    def epoch_state(self, pipeline: str, epoch: int, state: EpochState) -> None:
        """Note that an epoch's state changed."""
        self.note("UPDATE epochs SET state = ? WHERE pipeline = ? AND epoch = ?", state, pipeline, epoch)

    def box(self, name: str, record: BoxRecord) -> None:
        """Note what is known of a box."""
        self.note("INSERT OR REPLACE INTO boxes VALUES (?, ?)", name, json.dumps(asdict(record)))

    def event(self, event: Event) -> None:
        """Note an event with the present time; the oldest beyond `MOST_EVENTS` goes."""
        values = (time.time(), event.kind, event.pipeline, event.box, event.text, json.dumps(event.milliseconds))
        self.note(
            "INSERT INTO events (unix_seconds, kind, pipeline, box, text, milliseconds) VALUES (?, ?, ?, ?, ?, ?)",
            *values,
        )
        self.note("DELETE FROM events WHERE id <= (SELECT max(id) FROM events) - ?", MOST_EVENTS)

    # -- in the thread ------------------------------------------------------------------------------------------------

    async def _in_thread(self, call: Callable[[], T]) -> T:
        # a write that has begun ends, whoever is cancelled meanwhile: the thread is one, the order stays
        return await asyncio.get_running_loop().run_in_executor(self._thread, call)

    def _open_or_set_aside(self) -> Kept:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._lock = hold_lock(self.path.parent)
            try:
                return self._open()
            except (sqlite3.DatabaseError, ValueError, KeyError, TypeError) as error:
                if isinstance(error, sqlite3.OperationalError):
                    raise
                self._close()
                self.set_aside = self._move_away()
                log.error("%s is damaged (%s): set aside as %s, a new one begins", self.path, error, self.set_aside)
                return self._open()
        except (OSError, sqlite3.OperationalError) as error:
            raise FleetError(f"{self.path}: cannot use it: {error}", hint="look at the disk: df -h, ls -ld") from None

    def _open(self) -> Kept:
        database = sqlite3.connect(self.path, check_same_thread=False, isolation_level=None)
        self._database = database
        database.execute("PRAGMA journal_mode=WAL")
        database.execute("PRAGMA synchronous=FULL")
        if (answer := database.execute("PRAGMA quick_check(1)").fetchone()[0]) != "ok":
            raise ValueError(str(answer))
        if (version := database.execute("PRAGMA user_version").fetchone()[0]) not in (0, SCHEMA):
            raise ValueError(f"schema {version}, expected {SCHEMA}")
        database.executescript(_TABLES)
        database.execute(f"PRAGMA user_version={SCHEMA}")
        epochs: dict[str, list[EpochRecord]] = {}
        rows = database.execute("SELECT pipeline, epoch, plan, state, planned FROM epochs ORDER BY pipeline, epoch")
        for pipeline, epoch, plan, state, planned in rows:
            epochs.setdefault(pipeline, []).append(EpochRecord(epoch, plan_from_json(plan), state, bool(planned)))
        boxes = {name: BoxRecord(**json.loads(raw)) for name, raw in database.execute("SELECT * FROM boxes")}
        return Kept(dict(database.execute("SELECT name, reserved FROM pipelines").fetchall()), epochs, boxes)

    def _move_away(self) -> Path:
        number = 1
        while (target := self.path.with_name(f"{self.path.name}.damaged-{number}")).exists():
            number += 1
        for suffix in ("-wal", "-shm"):
            self.path.with_name(self.path.name + suffix).unlink(missing_ok=True)
        self.path.rename(target)
        return target

    def _write(self, operations: list[Operation]) -> None:
        database = self._opened()
        try:
            database.execute("BEGIN IMMEDIATE")
            for sql, values in operations:
                database.execute(sql, values)
            database.execute("COMMIT")
        except sqlite3.Error as error:
            if database.in_transaction:
                database.execute("ROLLBACK")
            raise StoreError(f"{self.path}: cannot write: {error}") from None

    def _events(self, after: int, limit: int) -> list[Event]:
        rows = (
            self._opened()
            .execute(
                "SELECT id, unix_seconds, kind, pipeline, box, text, milliseconds FROM events WHERE id > ? "
                "ORDER BY id LIMIT ?",
                (after, limit),
            )
            .fetchall()
        )
        return [
            Event(kind, text, pipeline, box, json.loads(milliseconds), id=number, unix_seconds=when)
            for number, when, kind, pipeline, box, text, milliseconds in rows
        ]

    def _opened(self) -> sqlite3.Connection:
        if self._database is None:
            raise StoreError(f"{self.path}: it is not open")
        return self._database

    def _close(self) -> None:
        if self._database is not None:
            self._database.close()
            self._database = None

    def _close_all(self) -> None:
        self._close()
        if self._lock is not None:
            self._lock.close()
