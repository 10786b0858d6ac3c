"""The journal's file goes, or its disk is full, while streams are made: clients lose nothing that memory has."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from fleet.gateway.answer import Answer
from fleet.gateway.database import JOURNAL_FILE
from fleet.gateway.entries import End, Entry, Token
from fleet.gateway.errors import ApiError
from fleet.gateway.journal import Journal
from fleet.gateway.metrics import GatewayMetrics
from fleet.gateway.streams import StreamKeeper, StreamRegistry
from stage_runtime.link.messages import TokenEvent
from tests.gateway.test_journal_damage import record_of


@dataclass
class Author:
    """Writes an answer's entries when the test says so.

    Attributes:
        step: set it for the next entry. finish: set it for the rest.
    """

    answer: Answer
    keeper: StreamKeeper
    said: asyncio.Queue[Entry | None] = field(default_factory=asyncio.Queue)

    async def run(self) -> None:
        while (entry := await self.said.get()) is not None:
            self.answer.entries.append(entry)
            self.keeper.keep(self.answer)
        self.answer.close()


@dataclass
class Keeping:
    """A journal and its registry, running."""

    directory: Path
    journal: Journal
    registry: StreamRegistry
    failures: list[int]
    authors: dict[int, Author] = field(default_factory=dict)

    async def admit(self, number: int, seconds: float = 30.0) -> Author:
        """A new stream with its author."""

        def start(answer: Answer, keeper: StreamKeeper) -> Any:
            self.authors[number] = Author(answer, keeper)
            return self.authors[number]

        await self.registry.admit(Answer(record_of(number)), seconds, start)  # type: ignore[arg-type]
        return self.authors[number]

    async def say(self, number: int, *entries: Entry | None) -> None:
        """The author writes these, and they are published."""
        author = self.authors[number]
        for entry in entries:
            author.said.put_nowait(entry)
        wanted = len(author.answer.entries) + sum(entry is not None for entry in entries)
        for _ in range(500):
            if author.answer.published >= wanted and author.said.empty():
                return
            await asyncio.sleep(0.01)
        raise AssertionError(f"stream {number}: {author.answer.published} of {wanted} published")

    async def read(self, number: int) -> list[Entry]:
        """What a client that resumes is told."""
        reading = await self.registry.open(record_of(number).stream_id, "tester")
        try:
            return list(reading.answer.entries)
        finally:
            reading.close()


@asynccontextmanager
async def keeping(directory: Path, most: int = 1000) -> AsyncIterator[Keeping]:
    failures: list[int] = []
    journal = Journal(directory, lambda: failures.append(1))
    registry = StreamRegistry(journal, most, GatewayMetrics(["main"]))
    registry.restore(journal.load(), lambda answer, keeper: None)
    tasks = [asyncio.ensure_future(journal.run()), asyncio.ensure_future(registry.run())]
    try:
        yield Keeping(directory, journal, registry, failures)
        assert not any(task.done() for task in tasks)
    finally:
        for task in reversed(tasks):
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


def token(place: int) -> Token:
    return Token(0, TokenEvent(place, 40 + place, None, ()))


def _delete(directory: Path) -> None:
    for suffix in ("", "-wal", "-shm"):
        Path(f"{directory / JOURNAL_FILE}{suffix}").unlink(missing_ok=True)


def _delete_directory(directory: Path) -> None:
    shutil.rmtree(directory)


def _replace(directory: Path) -> None:
    copy = directory / "copy"
    shutil.copy(directory / JOURNAL_FILE, copy)
    copy.replace(directory / JOURNAL_FILE)


def _cut_short(directory: Path) -> None:
    os.truncate(directory / JOURNAL_FILE, 100)


@pytest.mark.parametrize("break_it", [_delete, _delete_directory, _replace, _cut_short])
async def test_a_journal_that_goes_costs_no_open_stream(tmp_path: Path, break_it: Callable[[Path], None]) -> None:
    directory = tmp_path / "journal"
    async with keeping(directory) as kept:
        await kept.admit(1)
        await kept.admit(2)
        await kept.say(1, token(0), token(1))
        await kept.say(2, token(0))
        break_it(directory)
        await kept.say(2, token(1))  # finds out
        await kept.say(1, token(2), End(0, "stop"), End(1, "stop"), None)
        await asyncio.sleep(0.1)
        assert await kept.read(1) == [token(0), token(1), token(2), End(0, "stop"), End(1, "stop")]
        assert await kept.read(2) == [token(0), token(1)]
        assert kept.failures
        await kept.admit(3)  # new ones are kept again
        await kept.say(3, token(0), End(0, "stop"), End(1, "stop"), None)
        await asyncio.sleep(0.1)
        assert await kept.read(3) == [token(0), End(0, "stop"), End(1, "stop")]
    async with keeping(directory) as again:
        assert await again.read(3) == [token(0), End(0, "stop"), End(1, "stop")]
        for number in (1, 2):
            with pytest.raises(ApiError) as told:
                await again.read(number)
            assert told.value.status == 410


async def test_a_stream_that_ended_before_the_journal_went_is_an_honest_gone(tmp_path: Path) -> None:
    directory = tmp_path / "journal"
    async with keeping(directory) as kept:
        await kept.admit(1)
        await kept.say(1, token(0), End(0, "stop"), End(1, "stop"), None)
        await asyncio.sleep(0.1)
        assert len(await kept.read(1)) == 3
        _delete(directory)
        await kept.admit(2)
        with pytest.raises(ApiError) as told:
            await kept.read(1)
        assert told.value.status == 410


async def test_an_expiry_writes_no_row_of_the_others(tmp_path: Path) -> None:
    """300 streams, each with an end of its own: the card is not to be written 300 times 300 rows."""
    written: list[int] = []
    journal = Journal(tmp_path, lambda: pytest.fail("a transaction failed"))
    registry = StreamRegistry(journal, 1000, GatewayMetrics(["main"]))
    registry.restore(journal.load(), lambda answer, keeper: None)
    remain = journal.remain
    journal.remain = lambda rows: (written.append(len(rows)), remain(rows))[1]  # type: ignore[method-assign]
    journalling = asyncio.ensure_future(journal.run())
    kept = Keeping(tmp_path, journal, registry, [])
    for number in range(1, 301):
        await kept.admit(number, 0.5 + number / 300)
        kept.authors[number].said.put_nowait(None)
    running = asyncio.ensure_future(registry.run())
    for _ in range(300):
        if not registry._streams:
            break
        await asyncio.sleep(0.05)
    assert not registry._streams
    assert sum(written) <= 600
    for task in (running, journalling):
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


@contextmanager
def small_disk(directory: Path, size: int) -> Iterator[None]:
    directory.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(directory)]
    if os.geteuid() != 0 or subprocess.run(command, check=False, capture_output=True).returncode != 0:
        pytest.skip("no right to mount a small disk")
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(directory)], check=True)


def remount(directory: Path, how: str) -> None:
    subprocess.run(["mount", "-o", f"remount,{how}", str(directory)], check=True)


@pytest.mark.parametrize("trouble", ["full", "read-only"])
async def test_a_disk_that_takes_nothing_costs_no_open_stream(tmp_path: Path, trouble: str) -> None:
    directory = tmp_path / "journal"
    filler = directory / "filler"

    def begin() -> None:
        if trouble == "read-only":
            remount(directory, "ro")
            return
        with suppress(OSError), filler.open("wb", buffering=0) as file:
            while True:
                file.write(b"x" * 4096)

    def end() -> None:
        if trouble == "read-only":
            remount(directory, "rw")
        else:
            filler.unlink()

    with small_disk(directory, 2**20):
        async with keeping(directory) as kept:
            await kept.admit(1)
            await kept.say(1, token(0))
            if trouble == "read-only":
                assert kept.journal._database._connection is not None
                await asyncio.sleep(0.1)
                kept.journal._database.close()  # the system refuses ro while a file is open for writing
            begin()
            await kept.say(1, *(token(place) for place in range(1, 3000)))
            assert len(await kept.read(1)) == 3000
            assert kept.failures
            with pytest.raises(ApiError) as told:
                for number in range(2, 500):
                    await kept.admit(number)
            assert told.value.status == 507
            await kept.say(1, End(0, "stop"), End(1, "stop"), None)
            end()
            await kept.admit(600)
            await kept.say(600, token(0), End(0, "stop"), End(1, "stop"), None)
            await asyncio.sleep(0.1)
        async with keeping(directory) as again:
            assert await again.read(600) == [token(0), End(0, "stop"), End(1, "stop")]
            with pytest.raises(ApiError):
                await again.read(1)
