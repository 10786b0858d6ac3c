"""Readers of an answer: one tells it as a stream of events, one as a whole body. Any number may read one answer."""

from __future__ import annotations

import asyncio
from typing import Any

from fleet.gateway.answer import Answer
from fleet.gateway.entries import Entry, Failed
from fleet.gateway.events import EventWriter
from fleet.gateway.healing import HealingPipeline
from fleet.gateway.replay import DONE, EventFold, WholeFold

ENTRIES_AT_ONCE = 64
"""After so many the loop gets a turn: a reader that starts late has a whole answer to go through."""
REPLANNING = "waiting for a new plan"
KEEP_ALIVE = "keep-alive"


class CutShortError(ConnectionError):
    """The author of an answer stopped with the gateway; there is no more to tell."""


async def read_whole(answer: Answer, fold: WholeFold) -> dict[str, Any]:
    """Wait for the end of an answer; its body.

    Raises:
        ApiError: the answer failed.
        CutShortError: the gateway stops.
    """
    wake = asyncio.Event()
    position = 0
    with answer.news.watched(wake):
        while not fold.answer.ended:
            wake.clear()
            for entry in _next(answer, position):
                fold.push(entry)
                position += 1
            await _turn(answer, wake, position, ended=fold.answer.ended)
    return fold.body()


class EventReader:
    """Sends an answer to a client as events, live while it is made.

    Args:
        answer: to read.
        fold: empty.
        pipeline: that makes it; its re-planning is worth a comment.
        writer: to the client.
        keep_alive_seconds: without news for so long, a comment is sent, and with it the headers.
        after: the client has events up to this one.
    """

    def __init__(
        self,
        answer: Answer,
        fold: EventFold,
        pipeline: HealingPipeline,
        writer: EventWriter,
        *,
        keep_alive_seconds: float,
        after: int = 0,
    ) -> None:
        self.number = 0
        self._answer = answer
        self._fold = fold
        self._pipeline = pipeline
        self._writer = writer
        self._keep_alive_seconds = keep_alive_seconds
        self._after = after
        self._quiet_since = 0.0
        self._told_replanning = False

    async def run(self) -> Failed | None:
        """Send everything up to `[DONE]`; the entry that ended the answer if it failed after its headers.

        Raises:
            ApiError: the answer failed and nothing has been sent yet.
            ConnectionError: the client is gone, or the gateway stops (`CutShortError`).
        """
        loop = asyncio.get_running_loop()
        wake = asyncio.Event()
        position = 0
        self._quiet_since = loop.time()
        with self._answer.news.watched(wake), self._pipeline.news.watched(wake):
            while not self._fold.answer.ended:
                wake.clear()
                for entry in _next(self._answer, position):
                    await self._tell(entry)
                    position += 1
                if position < self._answer.published or self._fold.answer.ended:
                    await asyncio.sleep(0)
                    continue
                await self._comment()
                timer = loop.call_at(self._quiet_since + self._keep_alive_seconds, wake.set)
                try:
                    await _turn(self._answer, wake, position, ended=False)
                finally:
                    timer.cancel()
        return self._fold.answer.failed

    async def _tell(self, entry: Entry) -> None:
        if isinstance(entry, Failed) and not self._writer.prepared:
            raise entry.error()
        for data in self._fold.push(entry):
            self.number += 1
            # whoever asks from beyond the end is told the end once more
            if self.number > self._after or data == DONE:
                await self._writer.send(self.number, data)
                self._quiet_since = asyncio.get_running_loop().time()

    async def _comment(self) -> None:
        """A comment if one is due: at once when the pipeline begins to re-plan, and after a long silence."""
        now = asyncio.get_running_loop().time()
        replanning = not self._pipeline.status.ready
        begins = replanning and not self._told_replanning and self._writer.prepared
        if begins or now - self._quiet_since >= self._keep_alive_seconds:
            await self._writer.comment(REPLANNING if replanning else KEEP_ALIVE)
            self._quiet_since = now
            self._told_replanning = replanning
        elif not replanning:
            self._told_replanning = False


def _next(answer: Answer, position: int) -> list[Entry]:
    return answer.entries[position : min(answer.published, position + ENTRIES_AT_ONCE)]


async def _turn(answer: Answer, wake: asyncio.Event, position: int, *, ended: bool) -> None:
    """Give the loop a turn, and wait if there is nothing to read."""
    if ended or position < answer.published:
        await asyncio.sleep(0)
        return
    if answer.complete and position == len(answer.entries):
        raise CutShortError("the gateway stops")
    await wake.wait()
