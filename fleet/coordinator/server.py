"""The control channel's port: links of stages and gateways, one task each; what they say goes to their pipeline."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from typing import TypeVar

from fleet import __version__
from fleet.coordinator.context import Context
from fleet.coordinator.http import OPERATOR
from fleet.coordinator.membership import Membership
from fleet.coordinator.peers import Peer
from fleet.coordinator.pipeline import Pipeline
from fleet.coordinator.state import BoxState, GatewayState
from stage_runtime.link.connection import Link, LinkError
from stage_runtime.link.control import PROTOCOL, decode_control
from stage_runtime.link.endpoints import LinkServer, LinkSettings
from stage_runtime.link.frames import Frame, FrameError, FrameType
from stage_runtime.link.membership import (
    ChallengeAnswer,
    Committed,
    Drained,
    Heartbeat,
    Leaving,
    LinkReport,
    Register,
    Vote,
)
from stage_runtime.link.messages import Hello
from stage_runtime.link.tasks import until_first_ends, within

log = logging.getLogger("fleet.coordinator")

# Epochs are counted from 1; a number beyond this is a lie, and would leave none to give out.
LARGEST_EPOCH = 2**62
MOST_PROCESS_ID_CHARACTERS = 128

T = TypeVar("T")


class ControlServer:
    """Listens on the control channel's port."""

    def __init__(self, context: Context, pipelines: Mapping[str, Pipeline]) -> None:
        self._context = context
        self._pipelines = pipelines
        self._membership = Membership(context)
        config = context.config
        hello = Hello(PROTOCOL, "coordinator", config.box, config.site, "", "", 0, __version__)
        settings = LinkSettings(hello, config.tls, config.link_timing)
        self.server = LinkServer(settings, self._check, self._handle, self._refused)

    def _check(self, hello: Hello) -> str:
        config = self._context.config
        if hello.role == "stage":
            return "" if config.pipeline_of(hello.box) else f"{hello.box!r} is no stage box of this site"
        if hello.role == "gateway":
            known = hello.box != OPERATOR if config.gateways is None else hello.box in config.gateways
            return "" if known else f"{hello.box!r} is no gateway of this site"
        return f"role {hello.role!r} has no business with the coordinator"

    def _refused(self, address: str, reason: str) -> None:
        self._context.metrics.refused_links.inc()
        log.warning("refused a connection from %s: %s", address, reason)

    async def _handle(self, link: Link) -> None:
        """Serve one link until it ends."""
        peer = Peer(link)
        try:
            if link.peer.role == "gateway":
                await self._serve_gateway(peer)
            else:
                await self._serve_stage(peer)
        except LinkError as error:
            log.info("%s: %s", peer.box, error)
        except FrameError as error:
            self._refused(f"{peer.box} ({peer.address})", str(error))
            await peer.refuse(str(error))

    # -- stages -------------------------------------------------------------------------------------------------------

    async def _serve_stage(self, peer: Peer) -> None:
        box = self._context.boxes[peer.box]
        pipeline = self._pipelines[box.pipeline]
        register = self._register(box, await self._first_frame(peer))
        if refusal := await self._membership.admit(box, peer, register):
            self._refused(peer.address, refusal)
            await peer.refuse(refusal)
            return
        pipeline.registered(box, register)
        try:
            await until_first_ends(peer.send_posted(), self._read_stage(peer, box, pipeline))
        finally:
            if box.peer is peer:  # else a newer connection has the name now
                ended = peer.link.ended_by_peer
                pipeline.lost(box, ended.silent_seconds if ended is not None else 0.0)

    async def _first_frame(self, peer: Peer) -> Frame:
        seconds = self._context.config.link_timing.handshake_seconds
        try:
            return await within(seconds, peer.link.receive())
        except asyncio.TimeoutError:
            raise FrameError(f"no REGISTER within {seconds:g} s") from None

    def _register(self, box: BoxState, frame: Frame) -> Register:
        register = _decode(Register, frame, FrameType.REGISTER)
        if register.pipeline != box.pipeline:
            raise FrameError(f"{box.name} belongs to pipeline {box.pipeline!r}, registers for {register.pipeline!r}")
        epochs = (register.committed_epoch, register.prepared_epoch, register.serving_epoch)
        if max(*epochs, register.incarnation, register.memory_total_bytes) > LARGEST_EPOCH:
            raise FrameError("REGISTER with a number beyond all reason")
        if not 0 < len(register.process_id) <= MOST_PROCESS_ID_CHARACTERS or not 0 < register.ring_port < 2**16:
            raise FrameError("REGISTER without a process id or a port")
        return register

    async def _read_stage(self, peer: Peer, box: BoxState, pipeline: Pipeline) -> None:
        while True:
            frame = await peer.link.receive()
            kind = frame.type
            if kind is FrameType.HEARTBEAT:
                pipeline.heartbeat(box, decode_control(Heartbeat, frame.body))
            elif kind is FrameType.LINK_REPORT:
                pipeline.link_report(box, decode_control(LinkReport, frame.body))
            elif kind is FrameType.VOTE:
                pipeline.vote(box, decode_control(Vote, frame.body))
            elif kind is FrameType.COMMITTED:
                pipeline.committed(box, decode_control(Committed, frame.body).epoch)
            elif kind is FrameType.LEAVING:
                pipeline.leaving(box, decode_control(Leaving, frame.body).reason)
            elif kind is FrameType.ANSWER:
                self._membership.answered(peer, decode_control(ChallengeAnswer, frame.body))
            else:
                register = self._register(box, frame)  # again, with newer measurements
                if register.process_id != box.record.process_id:
                    raise FrameError("REGISTER of another process on the same link")
                pipeline.measured(box, register)

    # -- gateways -----------------------------------------------------------------------------------------------------

    async def _serve_gateway(self, peer: Peer) -> None:
        gateways = self._context.gateways
        for old in [each for each in gateways if each.peer.box == peer.box]:
            old.peer.link.close(f"{peer.box} has a newer connection, from {peer.address}")
            gateways.remove(old)
        gateway = GatewayState(peer)
        gateways.append(gateway)
        self._context.metrics.gateways.set(len(gateways))
        self._context.event("gateway-joined", f"gateway on {peer.box}, from {peer.address}", box=peer.box)
        for pipeline in self._pipelines.values():
            pipeline.gateway_joined(gateway)
        try:
            await until_first_ends(peer.send_posted(), self._read_gateway(gateway))
        finally:
            if gateway in gateways:
                gateways.remove(gateway)
            self._context.metrics.gateways.set(len(gateways))
            self._context.event("gateway-lost", f"gateway on {peer.box}: {peer.link.closed_reason}", box=peer.box)

    async def _read_gateway(self, gateway: GatewayState) -> None:
        while True:
            drained = _decode(Drained, await gateway.peer.link.receive(), FrameType.DRAINED)
            pipeline = self._pipelines.get(drained.pipeline)
            if pipeline is None:
                raise FrameError(f"DRAINED for pipeline {drained.pipeline[:80]!r}, which is not served here")
            pipeline.drained(gateway, drained.epoch)


def _decode(kind: type[T], frame: Frame, expected: FrameType) -> T:
    if frame.type is not expected:
        raise FrameError(f"{frame.type.name} where {expected.name} was expected")
    return decode_control(kind, frame.body)
