"""The gateways' links at the first stage: requests in, events and status out."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Protocol

from stage_runtime.engine.scheduler import Delivery
from stage_runtime.link.connection import Link, LinkError
from stage_runtime.link.control import Cancel, FinishedMessage, TokenMessage, decode_control, encode_control
from stage_runtime.link.frames import Frame, FrameError, FrameType
from stage_runtime.link.messages import GenerateRequest, PipelineStatus, TokenEvent
from stage_runtime.link.tasks import until_first_ends, within

log = logging.getLogger(__name__)

# A gateway that lets this many events pile up has stopped reading.
EVENTS_QUEUED = 16384
# The last events of an epoch that ends are on their way by then, or their gateway does not read.
FLUSH_SECONDS = 0.5


class RequestSink(Protocol):
    """Who takes requests: the first stage."""

    def submit(self, request: GenerateRequest, gateway: Link) -> None:
        """Take a request; its events are delivered to the gateway."""

    def cancel(self, sequence_id: int, gateway: Link) -> None:
        """The gateway wants no more of a sequence."""

    def forget(self, gateway: Link) -> None:
        """The gateway is gone: all its sequences end."""


class Gateways:
    """Owns the outgoing queue of every connected gateway.

    Args:
        epoch: of every frame.
        sink: who takes requests.
        status: what gateways are told.
    """

    def __init__(self, epoch: int, sink: RequestSink, status: Callable[[], PipelineStatus]) -> None:
        self._epoch = epoch
        self._sink = sink
        self._status = status
        self._queues: dict[Link, asyncio.Queue[Frame | None]] = {}  # None: nothing follows
        self._all_gone = asyncio.Event()
        self._all_gone.set()

    async def serve(self, link: Link) -> None:
        """Serve one gateway until its link ends."""
        queue: asyncio.Queue[Frame | None] = asyncio.Queue(EVENTS_QUEUED)
        self._queues[link] = queue
        self._all_gone.clear()
        log.info("gateway %s is connected", link.peer.box)
        queue.put_nowait(self._status_frame())
        try:
            await until_first_ends(self._receive(link), self._send(link, queue))
        except (LinkError, FrameError) as error:
            log.info("gateway %s is gone: %s", link.peer.box, error)
        finally:
            del self._queues[link]
            if not self._queues:
                self._all_gone.set()
            self._sink.forget(link)

    def deliver(self, delivery: Delivery) -> None:
        """Queue an event for its gateway."""
        link = delivery.owner
        if not isinstance(link, Link) or link not in self._queues:
            return
        if isinstance(delivery.event, TokenEvent):
            body = encode_control(TokenMessage(delivery.sequence_id, delivery.event))
            self._put(link, Frame(FrameType.TOKEN, body, self._epoch))
        else:
            body = encode_control(FinishedMessage(delivery.sequence_id, delivery.event))
            self._put(link, Frame(FrameType.FINISHED, body, self._epoch))

    def broadcast_status(self) -> None:
        """Tell every gateway how things stand."""
        for link in self._queues:
            self._put(link, self._status_frame())

    async def end(self, reason: str, seconds: float = FLUSH_SECONDS) -> None:
        """Send what is queued, for so long at most, and end every link."""
        for link in list(self._queues):
            self._put(link, None)
        try:
            await within(seconds, self._all_gone.wait())
        except asyncio.TimeoutError:
            for link in self._queues:
                link.close(reason)

    def _put(self, link: Link, frame: Frame | None) -> None:
        try:
            self._queues[link].put_nowait(frame)
        except asyncio.QueueFull:
            link.close(f"{EVENTS_QUEUED} events wait, the gateway does not read")

    def _status_frame(self) -> Frame:
        return Frame(FrameType.STATUS, encode_control(self._status()), self._epoch)

    async def _receive(self, link: Link) -> None:
        while True:
            frame = await link.receive()
            if frame.type is FrameType.GENERATE:
                self._sink.submit(decode_control(GenerateRequest, frame.body), link)
            elif frame.type is FrameType.CANCEL:
                self._sink.cancel(decode_control(Cancel, frame.body).sequence_id, link)
            else:
                raise FrameError(f"{frame.type.name} from a gateway")

    @staticmethod
    async def _send(link: Link, queue: asyncio.Queue[Frame | None]) -> None:
        while (frame := await queue.get()) is not None:
            await link.send(frame)
