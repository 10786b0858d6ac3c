"""Life of a stage process: listen, load, warm up, join the ring, drain, stop."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import time

from fleet import __version__
from fleet.errors import FleetError
from stage_runtime.checkpoint.manifest import ModelManifest, read_manifest
from stage_runtime.engine.stage import StageEngine
from stage_runtime.engine.warm_up import KernelChoice, choose_kernel
from stage_runtime.link.connection import Link
from stage_runtime.link.control import PROTOCOL
from stage_runtime.link.endpoints import LinkServer, LinkSettings
from stage_runtime.link.messages import Hello
from stage_runtime.link.tasks import until_first_ends
from stage_runtime.model.load import StageWeights, load_stage
from stage_runtime.server.admin import AdminServer
from stage_runtime.server.compute import ComputeThread
from stage_runtime.server.config import StageConfig
from stage_runtime.server.first import FirstStage
from stage_runtime.server.follower import Follower
from stage_runtime.server.http import start_http
from stage_runtime.server.memory import (
    LOADING_THRESHOLD_BYTES,
    SERVING_THRESHOLD_BYTES,
    map_blocks_from,
    return_freed_memory,
)
from stage_runtime.server.state import StageState

log = logging.getLogger(__name__)


def own_hello(config: StageConfig) -> Hello:
    """What this stage says first on every link."""
    return Hello(
        PROTOCOL,
        "stage",
        config.box,
        config.site,
        config.model_digest,
        config.plan.policy,
        config.epoch,
        __version__,
    )


class StageProcess:
    """Everything that runs in one stage process.

    Args:
        config: what `etc/stage.json` said.
    """

    def __init__(self, config: StageConfig) -> None:
        self.config = config
        self.compute = ComputeThread(config.threads)
        self.state = StageState(config, self.compute)
        self._role: FirstStage | Follower | None = None
        self._stop = asyncio.Event()

    async def run(self) -> None:
        """Serve until SIGTERM or SIGINT, then drain.

        Raises:
            OSError: a port or socket is taken.
        """
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stop.set)
        admin = AdminServer(self.state, self.config.admin_socket)
        http = await start_http(self.state)
        try:
            await admin.start()
            await until_first_ends(self._serve(), self._stop_after_drain())
        finally:
            await admin.close()
            await http.cleanup()
            self.compute.close()

    async def _stop_after_drain(self) -> None:
        await self._stop.wait()
        log.info("draining for up to %g s", self.config.drain_seconds)
        if self._role is not None:
            await self._role.drain(self.config.drain_seconds)

    async def _serve(self) -> None:
        try:
            engine = await self._load()
        except FleetError as error:
            log.error("%s", error.message, extra={"hint": error.hint})
            self.state.enter("failed", error.message)
            await asyncio.Event().wait()  # stays up, so that health can say why; a restart would fail again
            return
        settings = LinkSettings(own_hello(self.config), self.config.tls, self.config.link_timing)
        self._role = self._make_role(settings, engine)
        server = LinkServer(settings, self._check_hello, self._handle_link, self._refused)
        server.start(self.config.ring.host, self.config.ring.port)
        try:
            await self._role.run()
        finally:
            await server.close()

    async def _load(self) -> StageEngine:
        config, state = self.config, self.state
        map_blocks_from(LOADING_THRESHOLD_BYTES)
        manifest = await self.compute.run(read_manifest, config.model_directory, config.model_digest)
        own_layer = config.stage.start if config.stage.end > config.stage.start else None
        started = time.monotonic()
        choice: KernelChoice = await self.compute.run(
            choose_kernel, config.kernel, config.model_directory, manifest, own_layer
        )
        warmed = time.monotonic()
        weights: StageWeights = await self.compute.run(
            load_stage, config.model_directory, manifest, config.stage, choice.kernel
        )
        return_freed_memory()
        map_blocks_from(SERVING_THRESHOLD_BYTES)
        state.warm_up_seconds = warmed - started
        state.load_seconds = time.monotonic() - warmed
        state.kernel, state.kernel_difference = choice.kernel, choice.largest_relative_difference
        state.weight_bytes = weights.weight_bytes
        state.engine = self._engine(manifest, weights)
        log.info("layers %d to %d are loaded", config.stage.start, config.stage.end, extra={"kernel": choice.kernel})
        return state.engine

    def _engine(self, manifest: ModelManifest, weights: StageWeights) -> StageEngine:
        config, plan = self.config, self.config.plan
        return StageEngine(
            manifest.config, weights, config.kv_block_tokens, plan.max_sequences, plan.max_tokens_per_sequence
        )

    def _make_role(self, settings: LinkSettings, engine: StageEngine) -> FirstStage | Follower:
        boxes = [stage.box for stage in self.config.plan.stages]
        if self.config.box not in boxes:  # a spare: loaded, waiting for a plan that uses it
            return Follower(settings, self.config.peers[boxes[0]], engine, self.state, last=True)
        index = boxes.index(self.config.box)
        successor = self.config.peers[boxes[(index + 1) % len(boxes)]]
        if index == 0:
            return FirstStage(settings, successor if len(boxes) > 1 else None, engine, self.state)
        return Follower(settings, successor, engine, self.state, last=index == len(boxes) - 1)

    def _check_hello(self, peer: Hello) -> str:
        boxes = [stage.box for stage in self.config.plan.stages]
        if peer.role == "stage":
            if self.config.box not in boxes or len(boxes) == 1:
                return f"{self.config.box} is not part of a ring"
            expected = boxes[boxes.index(self.config.box) - 1]
            return "" if peer.box == expected else f"the predecessor is {expected!r}, not {peer.box!r}"
        if peer.role == "gateway":
            return "" if self.config.box == boxes[0] else f"gateways talk to the first stage, {boxes[0]!r}"
        return f"role {peer.role!r} is not served here"

    async def _handle_link(self, link: Link) -> None:
        if self._role is None:
            return
        if link.peer.role == "gateway":
            await self._role.serve_gateway(link)
        else:
            await self._role.serve_stage(link)

    def _refused(self, address: str, reason: str) -> None:
        self.state.connections_refused += 1
        log.warning("connection from %s is closed: %s", address, reason)


def serve(config: StageConfig) -> int:
    """Run a stage until it is told to stop; returns the exit code."""
    os.umask(0o077)
    asyncio.run(StageProcess(config).run())
    return 0
