"""The stage's log of plans, `stage.sqlite`: what it has promised survives a power cut. One thread of its own writes it.

A row a fact, replaced in one transaction. What a stage reads back at its start is what REGISTER reports.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sqlite3
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from fleet.errors import FleetError
from stage_runtime.link.control import decode_control, encode_control
from stage_runtime.link.frames import FrameError
from stage_runtime.link.membership import Prepare

log = logging.getLogger(__name__)

T = TypeVar("T")
FILE_NAME = "stage.sqlite"
BUSY_SECONDS = 5.0  # nobody else writes; an operator may be reading
_SIDE_FILES = ("", "-wal", "-shm")
_SCHEMA = "CREATE TABLE facts (name TEXT PRIMARY KEY, value TEXT NOT NULL)"
_SQLITE_ERROR = (
    1  # sqlite3.h: bad SQL, or a schema that this release does not know; what a disk does has codes of its own
)
# Epochs and incarnations above are not in anybody's messages.
LARGEST_NUMBER = 2**62
# A worn card may take seconds for a write; who gets no answer for so long is told that there is none.
ANSWER_SECONDS = 15.0
# A card that damages the file at every start must not fill the disk.
SET_ASIDE_AT_MOST = 5


class PlanLogError(Exception):
    """The log could not be written (disk full, read-only, silent); the message says why. Nothing was promised."""


@dataclass(frozen=True)
class Recovered:
    """What the log held.

    Attributes:
        incarnation: starts on this box, this one included.
        committed: the last plan known as committed, whether it still serves or not.
        prepared: a later one that was voted for.
        fenced_epoch: older epochs than this never serve here again.
        retired_epoch: this one and older ones don't either.
    """

    incarnation: int
    committed: Prepare | None
    prepared: Prepare | None
    fenced_epoch: int
    retired_epoch: int


class PlanLog:
    """Opens the database and writes facts; every method waits until they are on disk.

    Args:
        directory: `state_directory` of stage.json.
    """

    def __init__(self, directory: Path) -> None:
        self._path = directory / FILE_NAME
        self._executor = ThreadPoolExecutor(1, "plan-log")
        self._connection: sqlite3.Connection | None = None

    async def open(self) -> Recovered:
        """Open, count this start, and read everything.

        A damaged database is set aside (`stage.sqlite.damaged-<n>`) and a new one is begun: the coordinator knows what
        was decided, and a stage serves nothing until it is told.

        Raises:
            FleetError: the database can't be opened or written at all.
        """
        try:
            return await self._run(self._open)
        except PlanLogError as error:
            raise _unusable(error) from None

    async def prepare(self, prepare: Prepare) -> None:
        """This box votes yes.

        Raises:
            PlanLogError: it can't be written.
        """
        facts = {"prepared": encode_control(prepare).decode()}
        await self._run(self._write, facts, ())

    async def fence(self, epoch: int) -> None:
        """Epochs below this one never serve here again. Raises PlanLogError as above."""
        await self._run(self._write, {"fenced": str(epoch)}, ())

    async def commit(self, prepare: Prepare) -> None:
        """A prepared plan is committed. Raises PlanLogError as above."""
        await self._run(self._write, {"committed": encode_control(prepare).decode()}, ("prepared",))

    async def forget_prepared(self) -> None:
        """A prepared plan was aborted. Raises PlanLogError as above."""
        await self._run(self._write, {}, ("prepared",))

    async def retire(self, epoch: int) -> None:
        """This epoch and older ones are over. Raises PlanLogError as above."""
        await self._run(self._write, {"retired": str(epoch)}, ())

    def close(self) -> None:
        """Wait for the running write and close the database."""
        self._executor.submit(self._close)
        self._executor.shutdown(wait=True)

    async def _run(self, function: Callable[..., T], *arguments: object) -> T:
        call = asyncio.get_running_loop().run_in_executor(self._executor, function, *arguments)
        call.add_done_callback(lambda ended: ended.cancelled() or ended.exception())  # nobody may wait by then
        await asyncio.wait([call], timeout=ANSWER_SECONDS)
        if not call.done():
            raise PlanLogError(f"{self._path}: the disk has not answered for {ANSWER_SECONDS:g} s")
        return call.result()

    def _open(self) -> Recovered:
        self._close()
        try:
            try:
                return self._read()
            except (sqlite3.Error, FrameError, ValueError) as error:
                if _is_the_disk(error):
                    raise
                self._set_aside(error)
                return self._read()
        except (sqlite3.Error, OSError) as error:
            raise _unusable(f"{self._path}: {error}") from None

    def _read(self) -> Recovered:
        self._connect()
        facts = self._stored_facts()
        recovered = Recovered(
            _number(facts.get("incarnation")) + 1,
            _plan(facts.get("committed")),
            _plan(facts.get("prepared")),
            _number(facts.get("fenced")),
            _number(facts.get("retired")),
        )
        self._store({"incarnation": str(recovered.incarnation)}, ())
        return recovered

    def _connect(self) -> None:
        connection = sqlite3.connect(self._path, timeout=BUSY_SECONDS, check_same_thread=False, isolation_level=None)
        self._connection = connection
        connection.text_factory = lambda data: data.decode(errors="replace")  # what is no text is no fact either
        connection.execute("PRAGMA journal_mode=WAL")
        connection.execute("PRAGMA synchronous=FULL")
        if (found := connection.execute("PRAGMA quick_check").fetchone()[0]) != "ok":
            raise sqlite3.DatabaseError(found)
        query = "SELECT sql FROM sqlite_master WHERE tbl_name = 'facts' AND sql IS NOT NULL"
        if not (schema := connection.execute(query).fetchall()):
            connection.execute(_SCHEMA)
        elif schema != [(_SCHEMA,)]:
            raise ValueError(f"its facts are those of another release: {schema}")

    def _stored_facts(self) -> dict[str, str]:
        facts = dict(self._open_connection.execute("SELECT name, value FROM facts"))
        if not all(isinstance(value, str) for value in facts.values()):
            raise ValueError("a fact is no text")
        return facts

    @property
    def _open_connection(self) -> sqlite3.Connection:
        if self._connection is None:
            raise PlanLogError("the plan log is closed")
        return self._connection

    def _set_aside(self, problem: Exception) -> None:
        self._close()
        number = 1
        while (aside := self._path.with_name(f"{FILE_NAME}.damaged-{number}")).exists() and number < SET_ASIDE_AT_MOST:
            number += 1
        for suffix in _SIDE_FILES:
            file = self._path.with_name(FILE_NAME + suffix)
            if file.exists():
                file.replace(aside.with_name(aside.name + suffix))
        log.error("%s is damaged (%s): it is set aside as %s and begun anew", self._path, problem, aside.name)

    def _write(self, facts: dict[str, str], removed: tuple[str, ...]) -> None:
        try:
            self._store(facts, removed)
        except sqlite3.Error as error:
            raise PlanLogError(f"{self._path}: {error}") from None

    def _store(self, facts: dict[str, str], removed: tuple[str, ...]) -> None:
        connection = self._open_connection
        try:
            connection.execute("BEGIN IMMEDIATE")
            connection.executemany("INSERT OR REPLACE INTO facts VALUES (?, ?)", facts.items())
            connection.executemany("DELETE FROM facts WHERE name = ?", [(name,) for name in removed])
            connection.execute("COMMIT")
        except sqlite3.Error:
            with contextlib.suppress(sqlite3.Error):  # the first error is the one to tell
                connection.rollback()
            raise

    def _close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None


def _is_the_disk(error: Exception) -> bool:
    """Whether a database can't be used for now (full, read-only, in use), as opposed to what is in it."""
    if not isinstance(error, sqlite3.OperationalError):
        return False
    code: int | None = getattr(error, "sqlite_errorcode", None)  # None before Python 3.11
    return code is None or code & 0xFF != _SQLITE_ERROR


def _unusable(problem: object) -> FleetError:
    return FleetError(str(problem), hint="look whether the disk is full or read-only; the stage tries again by itself")


def _number(text: str | None) -> int:
    """An epoch or incarnation. Raises ValueError: it is none."""
    number = int(text or "0")
    if not 0 <= number < LARGEST_NUMBER:
        raise ValueError(f"{number} is no epoch and no incarnation")
    return number


def _plan(text: str | None) -> Prepare | None:
    return None if text is None else decode_control(Prepare, text.encode())
