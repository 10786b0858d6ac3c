"""Streams that can be resumed: owned here and not by the client's connection, kept for a while after their end."""

from __future__ import annotations

import asyncio
import math
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from fleet.gateway.answer import Answer
from fleet.gateway.entries import Entry
from fleet.gateway.errors import ApiError, gone, journal_full, overloaded, unavailable
from fleet.gateway.generation import Generation, Keeper
from fleet.gateway.journal import Journal, JournalError
from fleet.gateway.log import logger
from fleet.gateway.metrics import GatewayMetrics
from fleet.gateway.record import AdmissionRecord
from fleet.gateway.rows import StoredStream

TICK_SECONDS = 30.0
"""So often the time that ended streams have left is written down."""
START_SHARE = 0.1
"""A start of the gateway costs an ended stream this share of its time, at most one tick: time while the gateway was
down does not count, yet one that restarts for ever keeps nothing for ever."""
REMEMBERED_EXPIRED = 1024
READERS_OF_A_STREAM = 8


@dataclass
class KeptStream:
    """A resumable stream.

    Attributes:
        stored: what the journal has.
        answer: in memory while it is made, and after it if the journal failed; None: in the journal.
        journalled: the journal has every entry so far.
        asked: entries given to the journal.
        deadline: monotonic time of its expiry; None while it is made.
        readers: that read it now.
    """

    stored: StoredStream
    answer: Answer | None
    journalled: bool = True
    asked: int = 0
    deadline: float | None = None
    readers: int = 0


class StreamKeeper:
    """Publishes a stream's entries once they are in the journal.

    If the journal fails on the way, the stream goes on from memory while this process lives, and is forgotten after:
    its clients lose nothing that they would have had without the journal.
    """

    def __init__(self, stream: KeptStream, journal: Journal) -> None:
        self._stream = stream
        self._journal = journal

    def keep(self, answer: Answer) -> None:
        """Journal what is new, then publish it."""
        stream, count = self._stream, len(answer.entries)
        if not stream.journalled:
            answer.publish(count)
            return

        def done(error: Exception | None) -> None:
            if error is not None and stream.journalled:
                stream.journalled = False
                self._journal.forget([stream.stored.number])
            answer.publish(count if stream.journalled else len(answer.entries))

        first, stream.asked = stream.asked, count
        self._journal.append(stream.stored.number, first, answer.entries[first:], done)


StartGeneration = Callable[[Answer, Keeper], Generation]


class StreamRegistry:
    """All resumable streams of the gateway.

    Args:
        journal: where they are kept.
        most: kept at once, running or ended.
        metrics: counts.
    """

    def __init__(self, journal: Journal, most: int, metrics: GatewayMetrics) -> None:
        self._journal = journal
        self._most = most
        self._metrics = metrics
        self._streams: dict[str, KeptStream] = {}
        self._expired: OrderedDict[str, tuple[str, float]] = OrderedDict()  # id → key's name, seconds it was kept
        self._tasks: set[asyncio.Task[None]] = set()
        journal.lost = self._journal_lost

    async def run(self) -> None:
        """Let ended streams expire; runs until cancelled, then every author stops where it is."""
        written = -math.inf  # at once: a start costs each stream a share of its time
        try:
            while True:
                self._expire()
                if time.monotonic() - written >= TICK_SECONDS:  # not at each expiry: it is a row for every stream
                    self._write_remaining()
                    written = time.monotonic()
                soonest = min((s.deadline for s in self._streams.values() if s.deadline), default=float("inf"))
                await asyncio.sleep(min(TICK_SECONDS, max(0.05, soonest - time.monotonic())))
        finally:
            tasks = list(self._tasks)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def restore(
        self,
        loaded: Sequence[tuple[StoredStream, list[Entry]]],
        start: Callable[[Answer, Keeper], Generation | None],
    ) -> None:
        """Take over what the journal has; unfinished streams go on by themselves.

        Args:
            loaded: from the journal.
            start: makes the author of an answer; None: its pipeline or model is not here any more.
        """
        now = time.monotonic()
        for stored, entries in loaded:
            remaining = stored.remaining_seconds - min(TICK_SECONDS, stored.resume_seconds * START_SHARE)
            if stored.length is None:
                stream = KeptStream(stored, Answer(stored.record, entries), asked=len(entries))
            else:
                stream = KeptStream(stored, None, asked=stored.length, deadline=now + remaining)
            answer = stream.answer
            if answer is not None:
                generation = start(answer, StreamKeeper(stream, self._journal))
                if generation is None:
                    logger.warning("stream %s is dropped: its model is not here any more", stored.record.stream_id)
                    self._journal.forget([stored.number])
                    continue
                self._own(stream, generation)
            self._streams[stored.record.stream_id] = stream
        self._count()

    async def admit(self, answer: Answer, resume_seconds: float, start: StartGeneration) -> Generation:
        """Keep a new answer and start its author.

        Raises:
            ApiError: 429 too many are kept, 507 the journal does not take it.
        """
        self._expire()
        if len(self._streams) >= self._most:
            raise overloaded(f"{len(self._streams)} resumable streams are kept, at most {self._most} may be")
        record = answer.record
        stored = StoredStream(secrets.randbits(62), record, resume_seconds, resume_seconds)
        stream = KeptStream(stored, answer, journalled=False)
        self._streams[record.stream_id] = stream  # before the first wait: it counts
        try:
            await self._journal.admit(stored)
        except BaseException as error:
            del self._streams[record.stream_id]
            self._journal.forget([stored.number])  # the client may have left while it was written
            if isinstance(error, JournalError):
                raise journal_full(f"a resumable stream can't be kept: {error}; it can be asked for without") from None
            raise
        stream.journalled = True
        generation = start(answer, StreamKeeper(stream, self._journal))
        self._own(stream, generation)
        self._count()
        return generation

    async def open(self, stream_id: str, key_name: str) -> Reading:
        """A stream for one more reader, who has to close it.

        Raises:
            ApiError: 410 not kept, damaged, or not for this key; 429 too many read it; 503 the journal can't be read.
        """
        self._expire()
        stream = self._streams.get(stream_id)
        if stream is None or stream.stored.record.key_name != key_name:
            raise self._gone(stream_id, key_name)
        if stream.readers >= READERS_OF_A_STREAM:
            raise overloaded(f"{stream.readers} clients read this stream already")
        self._metrics.resumed_streams.inc()
        stream.readers += 1
        try:
            return Reading(stream, stream.answer or await self._from_journal(stream))
        except BaseException as error:
            stream.readers -= 1
            if isinstance(error, JournalError):
                raise unavailable(f"the journal can't be read: {error}") from None
            raise

    def _journal_lost(self) -> None:
        """What it held is gone: open streams go on from memory, and nothing more of them is written by halves."""
        lost = [stream for stream in self._streams.values() if stream.journalled]
        for stream in lost:
            stream.journalled = False
        if lost:
            logger.error("%d resumable streams are no longer in the journal", len(lost))

    async def _from_journal(self, stream: KeptStream) -> Answer:
        answer = Answer(stream.stored.record, await self._journal.entries(stream.stored.number))
        answer.close()
        if len(answer.entries) != stream.asked:
            raise gone("the journal has lost a part of this stream", "stream_unknown")
        return answer

    def _gone(self, stream_id: str, key_name: str) -> ApiError:
        owner, seconds = self._expired.get(stream_id, ("", 0.0))
        if owner == key_name:
            return gone(f"the stream was kept for {seconds:g} s after its end, which have passed", "stream_expired")
        return gone(
            "no such stream: its time has passed, or it was never resumable, or it belongs to another API key",
            "stream_unknown",
        )

    def _own(self, stream: KeptStream, generation: Generation) -> None:
        task = asyncio.ensure_future(self._author(stream, generation))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _author(self, stream: KeptStream, generation: Generation) -> None:
        try:
            await generation.run()
        except Exception:  # a bug: this stream ends here, the others go on
            logger.exception("bug", extra={"fields": {"request_id": stream.stored.record.request_id}})
        stream.deadline = time.monotonic() + stream.stored.resume_seconds

        def ended(error: Exception | None) -> None:
            if error is None and stream.journalled:
                stream.answer = None
            elif stream.journalled:
                stream.journalled = False
                self._journal.forget([stream.stored.number])

        if stream.journalled:
            self._journal.end(stream.stored.number, stream.asked, stream.stored.resume_seconds, ended)

    def _expire(self) -> None:
        now = time.monotonic()
        due = [stream for stream in self._streams.values() if stream.deadline is not None and stream.deadline <= now]
        for stream in due:
            record = stream.stored.record
            del self._streams[record.stream_id]
            self._expired[record.stream_id] = (record.key_name, stream.stored.resume_seconds)
            while len(self._expired) > REMEMBERED_EXPIRED:
                self._expired.popitem(last=False)
        if due:
            self._journal.forget([stream.stored.number for stream in due])
        self._count()

    def _write_remaining(self) -> None:
        now = time.monotonic()
        rows = [
            (stream.deadline - now, stream.stored.number)
            for stream in self._streams.values()
            if stream.deadline is not None and stream.journalled
        ]
        if rows:
            self._journal.remain(rows)

    def _count(self) -> None:
        self._metrics.open_resumable_streams.set(len(self._streams))


class Reading:
    """One reader's hold of a stream."""

    def __init__(self, stream: KeptStream, answer: Answer) -> None:
        self.answer = answer
        self._stream = stream

    @property
    def record(self) -> AdmissionRecord:
        """What was admitted."""
        return self._stream.stored.record

    def close(self) -> None:
        """The reader has gone."""
        self._stream.readers -= 1
