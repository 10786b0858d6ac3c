"""The stage's log of plans, `stage.sqlite`: what it has promised survives a power cut. One thread of its own writes it.

A row a fact, replaced in one transaction. What a stage reads back at its start is what REGISTER reports.
"""

from __future__ import annotations

import asyncio
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


class PlanLogError(Exception):
    """The log could not be written (disk full, read-only); the message says why. Nothing was promised."""


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
        return await self._run(self._open)

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
        return await asyncio.get_running_loop().run_in_executor(self._executor, function, *arguments)

    def _open(self) -> Recovered:
        try:
            try:
                return self._read()
            except sqlite3.OperationalError:
                raise
            except (sqlite3.DatabaseError, FrameError, ValueError) as error:
                self._set_aside(error)
                return self._read()
        except (sqlite3.Error, OSError, PlanLogError) as error:
            raise FleetError(
                f"{self._path}: {error}", hint="look whether the disk is full or read-only, then restart the stage"
            ) from None

    def _read(self) -> Recovered:
        connection = sqlite3.connect(self._path, timeout=BUSY_SECONDS, check_same_thread=False, isolation_level=None)
        self._connection = connection
        connection.execute("PRAGMA journal_mode=WAL")
        connection.execute("PRAGMA synchronous=FULL")
        if (found := connection.execute("PRAGMA quick_check").fetchone()[0]) != "ok":
            raise sqlite3.DatabaseError(found)
        connection.execute("CREATE TABLE IF NOT EXISTS facts (name TEXT PRIMARY KEY, value TEXT NOT NULL)")
        facts: dict[str, str] = dict(connection.execute("SELECT name, value FROM facts"))
        incarnation = int(facts.get("incarnation", "0")) + 1
        self._write({"incarnation": str(incarnation)}, ())
        return Recovered(
            incarnation,
            _plan(facts.get("committed")),
            _plan(facts.get("prepared")),
            int(facts.get("fenced", "0")),
            int(facts.get("retired", "0")),
        )

    def _set_aside(self, problem: Exception) -> None:
        self._close()
        number = 1
        while (aside := self._path.with_name(f"{FILE_NAME}.damaged-{number}")).exists():
            number += 1
        for suffix in _SIDE_FILES:
            file = self._path.with_name(FILE_NAME + suffix)
            if file.exists():
                file.replace(aside.with_name(aside.name + suffix))
        log.error("%s is damaged (%s): it is set aside as %s and begun anew", self._path, problem, aside.name)

    def _write(self, facts: dict[str, str], removed: tuple[str, ...]) -> None:
        if self._connection is None:
            raise PlanLogError("the plan log is closed")
        try:
            self._connection.execute("BEGIN IMMEDIATE")
            self._connection.executemany("INSERT OR REPLACE INTO facts VALUES (?, ?)", facts.items())
            self._connection.executemany("DELETE FROM facts WHERE name = ?", [(name,) for name in removed])
            self._connection.execute("COMMIT")
        except sqlite3.Error as error:
            if self._connection.in_transaction:
                self._connection.execute("ROLLBACK")
            raise PlanLogError(f"{self._path}: {error}") from None

    def _close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None


def _plan(text: str | None) -> Prepare | None:
    return None if text is None else decode_control(Prepare, text.encode())
