"""A link of the control channel with what is to be sent on it."""

from __future__ import annotations

import asyncio
from typing import Any

from stage_runtime.link.connection import Link, LinkError
from stage_runtime.link.control import Refused, encode_control
from stage_runtime.link.frames import Frame, FrameType
from stage_runtime.link.tasks import within

# Messages that wait for one peer. A healthy one has none waiting; one that lets so many pile up is as good as gone.
MOST_WAITING = 512
# A refused peer closes when it has read why.
REFUSED_SECONDS = 0.5
REASON_CHARACTERS = 2000


class Peer:
    """One stage or gateway as long as its link lives.

    `post` never waits; `send_posted` is a task of the link's owner.

    Attributes:
        link: its link. box: the name in its certificate. address: where it dialled from.
    """

    def __init__(self, link: Link) -> None:
        self.link = link
        self.box = link.peer.box
        self.address = link.peer_host
        self._waiting: asyncio.Queue[Frame] = asyncio.Queue(MOST_WAITING)

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
        while True:  # what it says meanwhile is read and dropped, or the kernel would reset before the reason is read
            await self.link.receive()
