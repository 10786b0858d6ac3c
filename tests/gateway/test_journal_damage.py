"""A worn card: whatever bytes of the journal change, a client gets what was sent or an honest "gone", never else."""

from __future__ import annotations

import asyncio
import random
import shutil
import sqlite3
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fleet.gateway.answer import Answer
from fleet.gateway.database import JOURNAL_FILE, JournalDatabase, Operation
from fleet.gateway.entries import End, Entry, Token
from fleet.gateway.errors import ApiError
from fleet.gateway.journal import Journal
from fleet.gateway.metrics import GatewayMetrics
from fleet.gateway.record import AdmissionRecord
from fleet.gateway.requests import GenerationOptions
from fleet.gateway.rows import StoredStream, entry_of, entry_row, stream_of, stream_row
from fleet.gateway.streams import StreamKeeper, StreamRegistry
from stage_runtime.link.messages import SamplingParameters, TokenEvent, TokenLogprob

TOKENS = 30
ENDED = (1, 2)


def record_of(number: int) -> AdmissionRecord:
    sampling = SamplingParameters(seed=5, temperature=0.5, logprobs=2)
    options = GenerationOptions("tiny", 200, sampling, True, ("zzz",), 2, True, True, True)
    ids = (10 * number, 10 * number + 1)
    return AdmissionRecord(
        f"cmpl-{number:032x}", "completions", 17, "print", "main", "ab" * 32, "tester", "r", ids, (1, 2, 3), 99, options
    )


def entries_of(number: int) -> list[Entry]:
    entries: list[Entry] = []
    for place in range(TOKENS):
        for choice in (0, 1):
            entries.append(Token(choice, TokenEvent(place, 40 + place, -0.25, (TokenLogprob(7, -3.5),))))
    return entries + ([End(0, "length"), End(1, "length")] if number in ENDED else [])


WANTED = {record_of(number).stream_id: (record_of(number), entries_of(number)) for number in range(1, 6)}


def write_streams(directory: Path) -> None:
    """Five streams, two of which have ended."""
    database = JournalDatabase(directory)
    for number, (record, entries) in enumerate(WANTED.values(), 1):
        row = stream_row(StoredStream(number, record, 30.0, 30.0), 1.0)
        database.write([Operation("INSERT INTO streams VALUES (?, ?, ?, ?, ?, ?, ?, ?)", [row], durable=True)])
        rows = [entry_row(number, place, entry) for place, entry in enumerate(entries)]
        database.write([Operation("INSERT INTO entries VALUES (?, ?, ?)", rows)])
        if number in ENDED:
            database.write([Operation("UPDATE streams SET length=? WHERE number=?", [(len(entries), number)])])
    database.close()


def damaged(content: bytes, seed: int) -> bytes:
    """As a card may do it: bits that flip, a block of rubbish, blocks that change places, a file that ends early."""
    source, data = random.Random(seed), bytearray(content)  # noqa: S311 - rubbish, no secret
    kind = source.choice(["flip", "flips", "block", "places", "short"])
    if kind == "short":
        return bytes(data[: source.randrange(len(data))])
    if kind == "block":
        start = source.randrange(len(data) - 512)
        data[start : start + 512] = source.randbytes(512)
    elif kind == "places":
        one, other = (4096 * source.randrange(len(data) // 4096) for _ in range(2))
        data[one : one + 4096], data[other : other + 4096] = data[other : other + 4096], data[one : one + 4096]
    else:
        for _ in range(1 if kind == "flip" else 8):
            data[source.randrange(len(data))] ^= 1 << source.randrange(8)
    return bytes(data)


class Idle:
    """An author that writes nothing."""

    async def run(self) -> None:
        await asyncio.Event().wait()


async def told(directory: Path) -> dict[str, tuple[AdmissionRecord, Sequence[Entry]] | int]:
    """What a gateway that starts on this journal has for readers: stream → what was admitted and happened, or 410."""
    journal = Journal(directory, lambda: None)
    registry = StreamRegistry(journal, 100, GatewayMetrics(["main"]))
    begun: dict[str, Any] = {}

    def start(answer: Answer, keeper: StreamKeeper) -> Any:
        begun[answer.record.stream_id] = answer
        return Idle()

    found: dict[str, tuple[AdmissionRecord, Sequence[Entry]] | int] = {}
    registry.restore(journal.load(), start)  # type: ignore[arg-type]
    tasks = [asyncio.ensure_future(journal.run()), asyncio.ensure_future(registry.run())]
    try:
        for stream_id in WANTED:
            try:
                reading = await registry.open(stream_id, "tester")
            except ApiError as error:
                found[stream_id] = error.status
            else:
                found[stream_id] = (reading.record, list(reading.answer.entries))
        await journal.admit(StoredStream(99, record_of(99), 5.0, 5.0))  # new streams can be kept
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return found


async def test_without_damage_all_is_there(tmp_path: Path) -> None:
    write_streams(tmp_path)
    assert await told(tmp_path) == WANTED


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("journal")
    write_streams(directory)
    return directory


@settings(max_examples=80, deadline=None)
@given(st.integers(0, 2**32))
@example(55430)  # a damaged schema, which sqlite3 quotes in a message that it then can't decode
def test_damage_anywhere_is_never_told_as_an_answer(whole: Path, seed: int) -> None:
    directory = whole / "damaged"
    directory.mkdir()
    (directory / JOURNAL_FILE).write_bytes(damaged((whole / JOURNAL_FILE).read_bytes(), seed))
    found = asyncio.run(told(directory))
    shutil.rmtree(directory)
    for stream_id, what in found.items():
        record, entries = WANTED[stream_id]
        if isinstance(what, int):
            assert what == 410
            continue
        assert what[0] == record
        assert what[1] == entries[: len(what[1])]  # an unfinished one goes on from there
        assert what[1] == entries or not isinstance(entries[-1], End)


@pytest.mark.parametrize(
    "change",
    [
        "UPDATE entries SET body=x'00' WHERE stream=1 AND number=4",
        "UPDATE entries SET body=NULL WHERE stream=1 AND number=4",
        "UPDATE entries SET body=17 WHERE stream=1 AND number=4",
        "UPDATE entries SET body=(SELECT body FROM entries WHERE stream=2 AND number=4) WHERE stream=1 AND number=4",
        "UPDATE entries SET body=(SELECT body FROM entries WHERE stream=1 AND number=5) WHERE stream=1 AND number=4",
        "DELETE FROM entries WHERE stream=1 AND number=61",
        "UPDATE streams SET length=7 WHERE number=1",
        "UPDATE streams SET record=x'00' WHERE number=1",
        "UPDATE streams SET record='text' WHERE number=1",
        "UPDATE streams SET record=(SELECT record FROM streams WHERE number=2) WHERE number=1",
        "UPDATE streams SET resume_seconds=1e300 WHERE number=1",
        "UPDATE streams SET number=77 WHERE number=1",
    ],
)
async def test_a_damaged_row_costs_its_stream_alone(tmp_path: Path, change: str) -> None:
    write_streams(tmp_path)
    database = JournalDatabase(tmp_path)
    loose = change.replace("body=NULL", "body=''")  # the table refuses NULL; an empty text is as wrong
    database.write([Operation(loose, [()])])
    database.close()
    found = await told(tmp_path)
    first = record_of(1).stream_id
    assert found.pop(first) == 410
    assert found == {name: wanted for name, wanted in WANTED.items() if name != first}


async def test_a_lost_entry_of_an_unfinished_stream_is_made_again(tmp_path: Path) -> None:
    write_streams(tmp_path)
    database = JournalDatabase(tmp_path)
    database.write([Operation("DELETE FROM entries WHERE stream=4 AND number=10", [()])])
    database.close()
    journal = Journal(tmp_path, lambda: pytest.fail("a transaction failed"))
    [kept] = [entries for stream, entries in journal.load() if stream.number == 4]
    assert kept == entries_of(4)[:10]
    task = asyncio.ensure_future(journal.run())
    written: asyncio.Future[Exception | None] = asyncio.get_running_loop().create_future()
    journal.append(4, 10, entries_of(4)[10:], written.set_result)
    assert await written is None  # what lay behind the gap is no obstacle
    assert await journal.entries(4) == entries_of(4)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


def test_what_belongs_to_no_stream_is_deleted(tmp_path: Path) -> None:
    write_streams(tmp_path)
    database = JournalDatabase(tmp_path)
    database.write([Operation("UPDATE streams SET record=x'00' WHERE number IN (1, 3)", [()])])
    database.close()
    assert [stream.number for stream, _ in Journal(tmp_path, lambda: None).load()] == [2, 4, 5]
    assert [database.entries(number) for number in (1, 3)] == [[], []]
    database.close()


@pytest.mark.parametrize("remaining", [-5.0, 1e300, float("nan"), float("inf"), None, "soon", 7])
def test_time_left_is_never_more_than_promised(remaining: object) -> None:
    stored = StoredStream(3, record_of(3), 30.0, 30.0)
    _, _, sealed, seconds, *_ = stream_row(stored, 1.0)
    found = stream_of(3, sealed, seconds, remaining, None)
    assert 0 <= found.remaining_seconds <= 30
    assert replace(found, remaining_seconds=30.0) == stored


def test_a_row_is_bound_to_its_place() -> None:
    number, place, body = entry_row(3, 4, End(0, "stop"))
    assert entry_of(number, place, body) == End(0, "stop")
    for other in ((3, 5), (4, 4)):
        with pytest.raises(ValueError, match="checksum"):
            entry_of(*other, body)


def test_room_that_goes_back_to_the_disk_is_no_damage(tmp_path: Path) -> None:
    database = JournalDatabase(tmp_path)
    file = tmp_path / JOURNAL_FILE
    insert = "INSERT INTO entries VALUES (?, ?, ?)"
    largest = shrunk = 0
    for stream in range(60):  # each longer than a checkpoint's distance; the one before last is forgotten
        database.write([Operation(insert, [(stream, place, b"x" * 4000) for place in range(300)])])
        largest = max(largest, file.stat().st_size)
        if stream >= 10 and stream % 10 == 0:
            database.write([Operation("DELETE FROM entries WHERE stream < ?", [(stream - 1,)], frees=True)])
        shrunk += file.stat().st_size < largest
    assert shrunk > 0
    assert database.generation == 0
    database.close()
    with closing(sqlite3.connect(file)) as again:
        rows = again.execute("SELECT DISTINCT stream FROM entries ORDER BY stream").fetchall()
    assert [stream for (stream,) in rows] == list(range(49, 60))
