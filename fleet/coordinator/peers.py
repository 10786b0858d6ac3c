"""A link of the control channel with what is to be sent on it."""

from __future__ import annotations

import asyncio
from typing import Any

from fleet.coordinator.allowance import Allowance
from stage_runtime.link.connection import Link, LinkError
from stage_runtime.link.control import Refused, encode_control
from stage_runtime.link.frames import Frame, FrameError, FrameType
from stage_runtime.link.tasks import within

# Messages that wait for one peer. A healthy one has none waiting; one that lets so many pile up is as good as gone.
MOST_WAITING = 512
# A refused peer closes when it has read why.
REFUSED_SECONDS = 0.5
REFUSED_MESSAGES = 100
REASON_CHARACTERS = 2000
# Messages that a peer may send at once, e.g. after the coordinator stood still for seconds, and those a second beside
# its heartbeats: a ring that breaks brings a handful.
MESSAGES_AT_ONCE = 400
MESSAGES_PER_SECOND = 50.0
HEARTBEATS_EARLY = 4  # times as many as are due: each change of state brings one
# Newer measurements cost a new look at every plan. A stage has them at its start, and when it has a head for the first
# time.
MEASUREMENTS_AT_ONCE = 20
MEASUREMENTS_PER_SECOND = 0.1


class Peer:
    """One stage or gateway as long as its link lives.

    `post` never waits; `send_posted` is a task of the link's owner.

    Args:
        link: its link. heartbeat_seconds: between two heartbeats that it sends.

    Attributes:
        link: its link. box: the name in its certificate. address: where it dialled from.
    """

    def __init__(self, link: Link, heartbeat_seconds: float) -> None:
        now, often = asyncio.get_running_loop().time(), MESSAGES_PER_SECOND + HEARTBEATS_EARLY / heartbeat_seconds
        self.link = link
        self.box = link.peer.box
        self.address = link.peer_host
        self._waiting: asyncio.Queue[Frame] = asyncio.Queue(MOST_WAITING)
        self._messages = Allowance.full(MESSAGES_AT_ONCE, often, now)
        self._measurements = Allowance.full(MEASUREMENTS_AT_ONCE, MEASUREMENTS_PER_SECOND, now)

    async def receive(self) -> Frame:
        """Its next message.

        Raises:
            LinkError: the link has ended.
            FrameError: it sends more than any peer has to say.
        """
        frame = await self.link.receive()
        if not self._messages.take(asyncio.get_running_loop().time()):
            raise FrameError(f"{self.box} sends messages without end, the last one {frame.type.name}")
        return frame

    def may_measure(self) -> bool:
        """Whether it may bring newer measurements once more."""
        return self._measurements.take(asyncio.get_running_loop().time())

    def post(self, kind: FrameType, message: Any, epoch: int = 0) -> None:
        """Send this after what was posted before; a peer that does not read loses its link."""
        try:
            self._waiting.put_nowait(Frame(kind, encode_control(message), epoch))
        except asyncio.QueueFull:
            self.link.close(f"{self.box} does not read: {MOST_WAITING} messages wait for it")

    async def send_posted(self) -> None:
        """Send what is posted; runs until cancelled.

        Raises:
            LinkError: the link has ended.
        """
        while True:
            await self.link.send(await self._waiting.get())

    async def refuse(self, reason: str) -> None:
        """Say why, and end the link."""
        try:
            body = encode_control(Refused(reason[:REASON_CHARACTERS]))
            await self.link.send(Frame(FrameType.REFUSED, body))
            await within(REFUSED_SECONDS, self._until_closed())
        except (LinkError, asyncio.TimeoutError):
            pass  # it is gone, or it stays: both end here
        finally:
            self.link.close(reason)

    async def _until_closed(self) -> None:
        for _ in range(REFUSED_MESSAGES):  # read and dropped, or the kernel would reset before the reason is read
            await self.link.receive()
