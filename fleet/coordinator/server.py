"""The control channel's port: links of stages and gateways, one task each; what they say goes to their pipeline."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping

from fleet import __version__
from fleet.coordinator.allowance import Allowance
from fleet.coordinator.context import Context
from fleet.coordinator.incoming import decode, heartbeat_of, leaving_reason, link_report_of, register_of, vote_of
from fleet.coordinator.membership import Membership
from fleet.coordinator.peers import Peer
from fleet.coordinator.pipeline import Pipeline
from fleet.coordinator.state import BoxState, GatewayState
from fleet.coordinator.text import line
from stage_runtime.link.connection import Link, LinkError
from stage_runtime.link.control import PROTOCOL, decode_control
from stage_runtime.link.endpoints import LinkServer, LinkSettings
from stage_runtime.link.frames import Frame, FrameError, FrameType
from stage_runtime.link.membership import TAKES_KEY, TAKES_WALL_CLOCK, ChallengeAnswer, Committed, Drained
from stage_runtime.link.messages import Hello
from stage_runtime.link.tasks import until_first_ends, within

log = logging.getLogger("fleet.coordinator")

# A box whose links come more often than that, for minutes, keeps failing; a flapping one is far below.
LINKS_AT_ONCE = 60
LINKS_PER_SECOND = 0.5
# Links of one box that have not registered: it needs one, and a second after a break.
MOST_UNREGISTERED = 4
REASON_CHARACTERS = 500


class ControlServer:
    """Listens on the control channel's port."""

    def __init__(self, context: Context, pipelines: Mapping[str, Pipeline]) -> None:
        self._context = context
        self._pipelines = pipelines
        self._membership = Membership(context)
        self._links: dict[str, Allowance] = {}  # by name in the certificate: the site's CA bounds it
        self._unregistered: dict[str, list[Peer]] = {}
        config = context.config
        takes = {TAKES_KEY: TAKES_WALL_CLOCK}
        hello = Hello(PROTOCOL, "coordinator", config.box, config.site, "", "", 0, __version__, takes)
        settings = LinkSettings(hello, config.tls, config.link_timing)
        self.server = LinkServer(settings, self._check, self._handle, self._refused)

    def _check(self, hello: Hello) -> str:
        config = self._context.config
        if hello.role == "stage":
            return "" if config.pipeline_of(hello.box) else f"{hello.box!r} is no stage box of this site"
        if hello.role == "gateway":
            return "" if hello.box in config.gateways else f"{hello.box!r} is no gateway of this site"
        return f"role {hello.role!r} has no business with the coordinator"

    def _refused(self, address: str, reason: str) -> None:
        self._context.metrics.refused_links.inc()
        log.warning("refused a connection from %s: %s", address, line(reason, REASON_CHARACTERS))

    async def _handle(self, link: Link) -> None:
        """Serve one link until it ends."""
        peer, now = Peer(link, self._context.config.timing.heartbeat_seconds), asyncio.get_running_loop().time()
        links = self._links.setdefault(peer.box, Allowance.full(LINKS_AT_ONCE, LINKS_PER_SECOND, now))
        try:
            if not links.take(now):
                raise FrameError(
                    f"{peer.box} has made {LINKS_AT_ONCE} links in a short time: one in {1 / LINKS_PER_SECOND:g} s"
                )
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
        register = register_of(await self._first_frame(peer), box.name, box.pipeline)
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
        waiting = self._unregistered.setdefault(peer.box, [])
        if len(waiting) >= MOST_UNREGISTERED:
            waiting.pop(0).link.close("newer links of its box have not registered either")
        waiting.append(peer)
        try:
            return await within(seconds, peer.receive())
        except asyncio.TimeoutError:
            raise FrameError(f"no REGISTER within {seconds:g} s") from None
        finally:
            if peer in waiting:
                waiting.remove(peer)

    async def _read_stage(self, peer: Peer, box: BoxState, pipeline: Pipeline) -> None:
        while True:
            frame = await peer.receive()
            kind = frame.type
            if kind is FrameType.HEARTBEAT:
                pipeline.heartbeat(box, heartbeat_of(frame.body))
            elif kind is FrameType.LINK_REPORT:
                pipeline.link_report(box, link_report_of(frame.body))
            elif kind is FrameType.VOTE:
                pipeline.vote(box, vote_of(frame.body))
            elif kind is FrameType.COMMITTED:
                pipeline.committed(box, decode_control(Committed, frame.body).epoch)
            elif kind is FrameType.LEAVING:
                pipeline.leaving(box, leaving_reason(frame.body))
            elif kind is FrameType.ANSWER:
                self._membership.answered(peer, decode_control(ChallengeAnswer, frame.body))
            else:
                register = register_of(frame, box.name, box.pipeline)  # again, with newer measurements
                if register.process_id != box.record.process_id:
                    raise FrameError("REGISTER of another process on the same link")
                if not peer.may_measure():
                    raise FrameError("REGISTER again and again")
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
        except (LinkError, FrameError) as error:  # no news when the coordinator itself stops
            if gateway in gateways:  # else a newer connection has its place
                self._context.event("gateway-lost", f"gateway on {peer.box}: {error}", box=peer.box)
            raise
        finally:
            if gateway in gateways:
                gateways.remove(gateway)
            self._context.metrics.gateways.set(len(gateways))

    async def _read_gateway(self, gateway: GatewayState) -> None:
        while True:
            drained = decode(Drained, await gateway.peer.receive(), FrameType.DRAINED)
            pipeline = self._pipelines.get(drained.pipeline)
            if pipeline is None:
                raise FrameError(f"DRAINED for pipeline {drained.pipeline[:80]!r}, which is not served here")
            pipeline.drained(gateway, drained.epoch)
