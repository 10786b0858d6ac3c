"""coordinator.sqlite: every epoch, what is known of the boxes, and the events. Its calls run in a thread of their own.

What need not be waited for (events, incarnations, `preparing`) is noted and written with the next write, at most
`WRITE_BEHIND_SECONDS` later; the durable write that is a switch's commit point takes one transaction, one fsync.
The live part of it is kept in memory too, so that a file that is damaged or deleted meanwhile is made anew.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from fleet.coordinator.database import Database, DatabaseLost, Operation, StoreError
from fleet.coordinator.records import (
    LIVE_STATES,
    BoxRecord,
    EpochRecord,
    EpochState,
    Event,
    Kept,
    box_to_json,
    plan_to_json,
)

log = logging.getLogger("fleet.coordinator")

MOST_EVENTS = 10_000
# Of one kind, pipeline and box: one box that keeps failing, or lying, pushes nobody else's history out.
MOST_EVENTS_ALIKE = 500
MOST_EPOCHS_KEPT = 1_000  # a pipeline; older ones are history that nobody asks for
WRITE_BEHIND_SECONDS = 0.05
# Epochs that may be given out before the next durable write, so that a PREPARE need not wait for one.
EPOCHS_RESERVED = 16

T = TypeVar("T")

# Writes a page and leaves what is there.
_TRIAL: Operation = ("INSERT OR REPLACE INTO boxes SELECT name, record FROM boxes LIMIT 1", ())
_RESERVE = "INSERT OR REPLACE INTO pipelines VALUES (?, ?)"
_EPOCH = "INSERT OR REPLACE INTO epochs VALUES (?, ?, ?, ?, ?)"
_BOX = "INSERT OR REPLACE INTO boxes VALUES (?, ?)"


class Store:
    """The database. Open it, then run `write_behind` for as long as the process lives.

    Attributes:
        refused: why the disk took nothing at the last write; empty if it did.
        made_anew: called with the reason when the file was lost and a new one holds what is live.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.refused = ""
        self.made_anew: Callable[[str], None] = log.error
        self._database = Database(path)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="store")
        self._turn = asyncio.Lock()  # of two that find the file damaged, only one makes it anew
        self._pending: list[Operation] = []
        self._wanted = asyncio.Event()
        self._unwritten = False  # a write failed: what is live is to be written once more
        self._reserved: dict[str, int] = {}
        self._epochs: dict[tuple[str, int], EpochRecord] = {}  # live ones, and what has ended since the last write
        self._boxes: dict[str, BoxRecord] = {}

    @property
    def set_aside(self) -> Path | None:
        """Where a damaged database was moved; None: it was sound, or there was none."""
        return self._database.set_aside

    async def open(self) -> Kept:
        """Open or create the database and read it.

        Raises:
            FleetError: the directory can't be written, or another coordinator uses it.
        """
        kept = await self._in_thread(self._database.open)
        self._reserved, self._boxes = dict(kept.reserved), dict(kept.boxes)
        live = ((name, each) for name, epochs in kept.epochs.items() for each in epochs if each.state in LIVE_STATES)
        self._epochs = {(name, each.epoch): each for name, each in live}
        return kept

    def note(self, sql: str, *values: Any) -> None:
        """Write this soon, and before everything that is noted or committed later."""
        self._pending.append((sql, values))
        self._wanted.set()

    async def commit(self) -> None:
        """Write all that is noted, durably.

        Raises:
            StoreError: it could not be written; events that were noted are lost, what is live comes with the next one.
        """
        async with self._turn:
            await self._commit()

    async def _commit(self) -> None:
        noted, self._pending = self._pending, []
        if not noted and not self._unwritten:  # what a write in between has taken along and lost is written now
            return
        unwritten, self._unwritten = self._unwritten, False
        operations = [*noted, *(self._live() if unwritten else ())]
        try:
            try:
                await self._write(operations)
            except DatabaseLost as lost:
                await self._begin_anew(str(lost), noted)
        except StoreError as error:
            self.refused, self._unwritten = str(error), True
            raise
        except BaseException:
            self._unwritten = True
            raise
        self.refused = ""
        self._epochs = {key: record for key, record in self._epochs.items() if record.state in LIVE_STATES}

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
        await self._in_thread(self._database.close)
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
        async with self._turn:
            try:
                return await self._in_thread(lambda: self._database.events(after, limit))
            except DatabaseLost as lost:
                await self._begin_anew(str(lost), [])
                return []

    async def works(self) -> bool:
        """Whether a durable write is possible now; the disk is asked only if it refused the last one."""
        if self.refused:
            self._pending.append(_TRIAL)
            try:
                await self.commit()
            except StoreError:
                return False
        return True

    # -- what is written ----------------------------------------------------------------------------------------------

    def reserve(self, pipeline: str, epoch: int) -> None:
        """Note that epochs up to `EPOCHS_RESERVED` above this one may be given out."""
        self._reserved[pipeline] = epoch + EPOCHS_RESERVED
        self.note(_RESERVE, pipeline, epoch + EPOCHS_RESERVED)

    def epoch(self, pipeline: str, record: EpochRecord) -> None:
        """Note an epoch with its state; old ones go."""
        self._epochs[pipeline, record.epoch] = record
        sql, values = _epoch_operation(pipeline, record)
        self.note(sql, *values)
        self.note(
            "DELETE FROM epochs WHERE pipeline = ? AND epoch <= ? AND state IN ('aborted', 'retired')",
            pipeline,
            record.epoch - MOST_EPOCHS_KEPT,
        )

    def epoch_state(self, pipeline: str, epoch: int, state: EpochState) -> None:
        """Note that an epoch's state changed."""
        if (record := self._epochs.get((pipeline, epoch))) is not None:
            self._epochs[pipeline, epoch] = replace(record, state=state)
        self.note("UPDATE epochs SET state = ? WHERE pipeline = ? AND epoch = ?", state, pipeline, epoch)

    def box(self, name: str, record: BoxRecord) -> None:
        """Note what is known of a box."""
        self._boxes[name] = record
        self.note(_BOX, name, box_to_json(record))

    def event(self, event: Event) -> None:
        """Note an event with the present time; the oldest beyond `MOST_EVENTS` goes, and of those alike the oldest."""
        alike = (event.kind, event.pipeline, event.box)
        self.note(
            "INSERT INTO events (unix_seconds, kind, pipeline, box, text, milliseconds) VALUES (?, ?, ?, ?, ?, ?)",
            time.time(),
            *alike,
            event.text,
            json.dumps(event.milliseconds),
        )
        self.note("DELETE FROM events WHERE id <= (SELECT max(id) FROM events) - ?", MOST_EVENTS)
        self.note(
            "DELETE FROM events WHERE id = (SELECT id FROM events WHERE kind = ? AND pipeline = ? AND box = ? "
            "ORDER BY id DESC LIMIT 1 OFFSET ?)",
            *alike,
            MOST_EVENTS_ALIKE,
        )

    # -- after trouble ------------------------------------------------------------------------------------------------

    def _live(self) -> list[Operation]:
        """Everything but the history."""
        return [
            *((_RESERVE, item) for item in self._reserved.items()),
            *(_epoch_operation(pipeline, record) for (pipeline, _), record in self._epochs.items()),
            *((_BOX, (name, box_to_json(record))) for name, record in self._boxes.items()),
        ]

    async def _write(self, operations: list[Operation]) -> None:
        """Write; only what is live, into the room that is held for it, if the disk takes no more."""
        try:
            await self._in_thread(lambda: self._database.write(operations))
        except StoreError as error:
            live = self._live()
            await self._in_thread(lambda: self._database.write(live, history=False))
            log.error("%s: what is live is written, events are in this log alone", error)

    async def _begin_anew(self, reason: str, noted: list[Operation]) -> None:
        operations = [*self._live(), *noted]
        await self._in_thread(lambda: self._database.begin_anew(reason, operations))
        self.made_anew(f"{self.path}: {reason}: it was made anew with what is live; older events are gone from it")

    async def _in_thread(self, call: Callable[[], T]) -> T:
        # a write that has begun ends, whoever is cancelled meanwhile: the thread is one, the order stays
        return await asyncio.get_running_loop().run_in_executor(self._thread, call)


def _epoch_operation(pipeline: str, record: EpochRecord) -> Operation:
    values = (pipeline, record.epoch, plan_to_json(record.plan), record.state, int(record.planned))
    return _EPOCH, values
