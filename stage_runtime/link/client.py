"""The gateway's side of a pipeline: submits sequences to the first stage and hands out their events."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable
from dataclasses import replace

from stage_runtime.link.backoff import Backoff
from stage_runtime.link.connection import Link, LinkError, LinkTiming
from stage_runtime.link.control import (
    PROTOCOL,
    Cancel,
    FinishedMessage,
    TokenMessage,
    decode_control,
    encode_control,
)
from stage_runtime.link.endpoints import BoxAddress, LinkSettings, dial
from stage_runtime.link.frames import Frame, FrameError, FrameType
from stage_runtime.link.messages import FinishedEvent, GenerateRequest, Hello, PipelineStatus, TokenEvent
from stage_runtime.link.tls import TlsIdentity

log = logging.getLogger(__name__)


class PipelineClient:
    """Implements `messages.Pipeline` over one long-lived link to the first stage of one epoch.

    Args:
        site: name of the site.
        box: name of the box this client runs on; its certificate carries it.
        first_stage_box: name of the box to talk to.
        host, port: its ring address.
        model_digest: digest of the pipeline's model.json, hex.
        policy: numeric policy.
        epoch: plan epoch that this side knows.
        runtime_version: of the fleet distribution.
        tls: own certificate.
        timing: deadlines of the link.
        changed: called after every change of `status`.
    """

    def __init__(
        self,
        *,
        site: str,
        box: str,
        first_stage_box: str,
        host: str,
        port: int,
        model_digest: str,
        policy: str,
        epoch: int,
        runtime_version: str,
        tls: TlsIdentity,
        timing: LinkTiming,
        changed: Callable[[], None] = lambda: None,
    ) -> None:
        hello = Hello(PROTOCOL, "gateway", box, site, model_digest, policy, epoch, runtime_version)
        self._settings = LinkSettings(hello, tls, timing)
        self._first_stage = BoxAddress(first_stage_box, host, port)
        self._epoch = epoch
        self._changed = changed
        self._link: Link | None = None
        self._status = PipelineStatus(policy=policy, epoch=epoch)
        self._streams: dict[int, asyncio.Queue[TokenEvent | FinishedEvent]] = {}

    @property
    def status(self) -> PipelineStatus:
        """The latest status; never blocks."""
        return self._status

    async def run(self) -> None:
        """Connect, reconnect with back-off and jitter, receive; runs until cancelled."""
        backoff = Backoff(self._settings.timing.reconnect_seconds, self._settings.timing.reconnect_max_seconds)
        try:
            while True:
                try:
                    await self._session(backoff)
                except (LinkError, FrameError) as error:
                    self._lose(str(error))
                await asyncio.sleep(backoff.next_seconds())
        finally:
            self._lose(f"the link to {self._first_stage.box} of epoch {self._epoch} is closed")

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[TokenEvent | FinishedEvent, None]:
        """Submit a sequence and yield its events; exactly one FinishedEvent, last.

        Closing the iterator early cancels the sequence on all stages. Close it explicitly
        (`contextlib.aclosing`) where the loop over it may be left early.
        """
        link = self._link
        if link is None:
            yield FinishedEvent("unavailable", self._status.reason, len(request.prompt))
            return
        if request.sequence_id in self._streams:
            yield FinishedEvent("invalid", f"sequence {request.sequence_id} is already open", len(request.prompt))
            return
        # bounded by the events of one sequence: max_tokens and the end
        events: asyncio.Queue[TokenEvent | FinishedEvent] = asyncio.Queue()
        self._streams[request.sequence_id] = events
        finished = False
        try:
            try:
                await link.send(Frame(FrameType.GENERATE, encode_control(request), self._epoch))
            except (LinkError, FrameError) as error:
                finished = True
                reason = "invalid" if isinstance(error, FrameError) else "unavailable"
                yield FinishedEvent(reason, str(error), len(request.prompt))  # type: ignore[arg-type]
                return
            while not finished:
                event = await events.get()
                finished = isinstance(event, FinishedEvent)
                yield event
        finally:
            self._streams.pop(request.sequence_id, None)
            if not finished:
                await self._cancel(link, request.sequence_id)

    async def _cancel(self, link: Link, sequence_id: int) -> None:
        try:
            await link.send(Frame(FrameType.CANCEL, encode_control(Cancel(sequence_id)), self._epoch))
        except LinkError:
            log.debug("sequence %d needs no cancel: its link is gone, and with it the sequence", sequence_id)

    async def _session(self, backoff: Backoff) -> None:
        link = await dial(self._settings, self._first_stage)
        backoff.reset()
        self._link = link
        try:
            while True:
                self._receive(await link.receive())
        finally:
            link.close("the client ends the session")

    def _receive(self, frame: Frame) -> None:
        if frame.type is FrameType.TOKEN:
            token = decode_control(TokenMessage, frame.body)
            self._deliver(token.sequence_id, token.event)
        elif frame.type is FrameType.FINISHED:
            finished = decode_control(FinishedMessage, frame.body)
            self._deliver(finished.sequence_id, finished.event)
        elif frame.type is FrameType.STATUS:
            self._status = decode_control(PipelineStatus, frame.body)
            self._changed()
        else:
            raise FrameError(f"{frame.type.name} from the first stage")

    def _deliver(self, sequence_id: int, event: TokenEvent | FinishedEvent) -> None:
        stream = self._streams.get(sequence_id)
        if stream is not None:  # else it was cancelled a moment ago
            stream.put_nowait(event)

    def _lose(self, reason: str) -> None:
        self._link = None
        self._status = replace(self._status, ready=False, reason=reason, active_sequences=0, queued_sequences=0)
        for stream in self._streams.values():
            stream.put_nowait(FinishedEvent("unavailable", reason))
        self._changed()
