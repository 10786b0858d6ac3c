"""The journal on the event loop: writes gather while the disk is busy and go down together, in order, in one thread."""

from __future__ import annotations

import asyncio
import logging
import sqlite3
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from fleet.gateway.database import JournalDatabase, Operation, without
from fleet.gateway.entries import Entry
from fleet.gateway.rows import StoredStream, entry_row, stream_row

log = logging.getLogger(__name__)

Done = Callable[[Exception | None], None]
TROUBLES = (OSError, sqlite3.Error)


class JournalError(Exception):
    """The journal did not take, or does not have, something; the message says why."""


class Journal:
    """Streams on disk.

    Args:
        directory: of the file.
        failed: called for every transaction that failed.

    Attributes:
        lost: called when the file was lost with all that it held; new streams are kept in another one.
    """

    def __init__(self, directory: Path, failed: Callable[[], None]) -> None:
        self._database = JournalDatabase(directory)
        self._failed = failed
        self.lost: Callable[[], None] = lambda: None
        self._generation = 0
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="journal")
        self._pending: list[tuple[Operation, Done]] = []
        self._wake = asyncio.Event()

    def load(self) -> list[tuple[StoredStream, list[Entry]]]:
        """All streams, with the entries of those that have not ended. Blocks; before the loop serves.

        A journal that can't be read costs its streams, not the gateway: it says so in the log.
        """
        try:
            streams = self._database.streams()
            made = {stream.number: self._database.entries(stream.number) for stream in streams if stream.length is None}
            self._database.write(without({stream.number for stream in streams}))
        except TROUBLES as error:
            log.error("%s can't be read, its streams are lost: %s", self._database.path, error)
            return []
        finally:
            self._generation = self._database.generation  # nobody has been promised anything yet
        return [(stream, made.get(stream.number, [])) for stream in streams]

    async def run(self) -> None:
        """Write what is asked for; runs until cancelled, then writes the rest and closes the file."""
        loop = asyncio.get_running_loop()
        try:
            while True:
                await self._wake.wait()
                self._wake.clear()
                batch, self._pending = self._pending, []
                error = await loop.run_in_executor(self._thread, self._write, [operation for operation, _ in batch])
                self._look_after_loss()
                for _, done in batch:
                    done(error)
        finally:
            rest = [operation for operation, _ in self._pending]
            await loop.run_in_executor(self._thread, self._finish, rest)
            self._thread.shutdown(wait=False)

    async def admit(self, stream: StoredStream) -> None:
        """Keep a new stream; on the disk when this returns.

        Raises:
            JournalError: it could not be written.
        """
        generation = self._database.generation
        error = await self._admitted(stream)
        if error is not None and self._database.generation != generation:
            error = await self._admitted(stream)  # the file was lost just now, and there is a new one
        if error is not None:
            raise JournalError(str(error))

    async def _admitted(self, stream: StoredStream) -> Exception | None:
        written: asyncio.Future[Exception | None] = asyncio.get_running_loop().create_future()
        self._ask(
            Operation(
                "INSERT INTO streams VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
                [stream_row(stream, time.time())],
                durable=True,
            ),
            lambda error: None if written.done() else written.set_result(error),
        )
        return await written

    def append(self, number: int, first: int, entries: Sequence[Entry], done: Done) -> None:
        """Keep entries of a stream, the first of which has the place `first`."""
        rows = [entry_row(number, first + place, entry) for place, entry in enumerate(entries)]
        # behind an entry that was lost others may lie, and what is computed again takes their places
        self._ask(Operation("INSERT OR REPLACE INTO entries VALUES (?, ?, ?)", rows), done)

    def end(self, number: int, length: int, remaining_seconds: float, done: Done) -> None:
        """A stream has ended with so many entries; the wall-clock time is kept for people and never read."""
        sql = "UPDATE streams SET length=?, remaining_seconds=?, ended_unix_seconds=? WHERE number=?"
        self._ask(Operation(sql, [(length, remaining_seconds, time.time(), number)]), done)

    def remain(self, remaining_seconds: Sequence[tuple[float, int]]) -> None:
        """Keep how long ended streams are still kept: (seconds, number of the stream)."""
        self._ask(Operation("UPDATE streams SET remaining_seconds=? WHERE number=?", remaining_seconds), _only_logged)

    def forget(self, numbers: Sequence[int]) -> None:
        """Delete streams."""
        rows = [(number,) for number in numbers]
        self._ask(Operation("DELETE FROM streams WHERE number=?", rows, frees=True), _only_logged)
        self._ask(Operation("DELETE FROM entries WHERE stream=?", rows, frees=True), _only_logged)

    async def entries(self, number: int) -> list[Entry]:
        """The entries of a stream.

        Raises:
            JournalError: they can't be read.
        """
        loop = asyncio.get_running_loop()
        try:
            return await loop.run_in_executor(self._thread, self._database.entries, number)
        except TROUBLES as error:
            self._look_after_loss()
            raise JournalError(str(error)) from None

    def _look_after_loss(self) -> None:
        if self._database.generation != self._generation:
            self._generation = self._database.generation
            self.lost()

    def _ask(self, operation: Operation, done: Done) -> None:
        self._pending.append((operation, done))
        self._wake.set()

    def _write(self, operations: Sequence[Operation]) -> Exception | None:
        """In the journal's thread: the error, if there was one. What a full disk refuses keeps no deletion back."""
        error = self._try(operations)
        deletions = [operation for operation in operations if operation.frees]
        if error is not None and 0 < len(deletions) < len(operations):
            self._try(deletions)
        return error

    def _try(self, operations: Sequence[Operation]) -> Exception | None:
        try:
            self._database.write(operations)
        except TROUBLES as error:
            log.error("%s: %s", self._database.path, error)
            self._failed()
            return error
        return None

    def _finish(self, operations: Sequence[Operation]) -> None:
        if operations:
            self._write(operations)
        self._database.close()


def _only_logged(error: Exception | None) -> None:
    """For writes that nobody waits for: the journal has logged the error, and the next start mends the row."""
