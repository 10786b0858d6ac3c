"""Life of a stage process: read the log, try the kernels, listen, obey the coordinator, leave, stop."""

from __future__ import annotations

import asyncio
import faulthandler
import logging
import os
import signal
import sys
import time
from collections.abc import Coroutine
from dataclasses import replace
from typing import Any, NoReturn

from fleet import __version__
from fleet.errors import ExitCode, FleetError
from fleet.planning.plan import StagePlan
from stage_runtime.checkpoint.manifest import ModelManifest, read_manifest
from stage_runtime.engine.measure import measure_head_seconds, measure_layer_seconds
from stage_runtime.engine.warm_up import KernelChoice, choose_kernel
from stage_runtime.link.control import PROTOCOL
from stage_runtime.link.endpoints import LinkServer, LinkSettings
from stage_runtime.link.messages import Hello
from stage_runtime.link.tasks import until_first_ends
from stage_runtime.model.store import WeightStore, pieces_of
from stage_runtime.server.admin import AdminServer
from stage_runtime.server.compute import ComputeThread
from stage_runtime.server.config import StageConfig
from stage_runtime.server.control import Control
from stage_runtime.server.dispatch import Dispatcher
from stage_runtime.server.ending import HungError
from stage_runtime.server.epochs import Epochs
from stage_runtime.server.history import History
from stage_runtime.server.http import start_http
from stage_runtime.server.loader import Loader, NoMemory
from stage_runtime.server.memory import (
    LOADING_THRESHOLD_BYTES,
    map_blocks_from,
)
from stage_runtime.server.plan_checks import Expected
from stage_runtime.server.plan_log import PlanLog, Recovered
from stage_runtime.server.pulse import Pulse
from stage_runtime.server.state import StageState

log = logging.getLogger(__name__)

# Layers that the time of a decode step is taken from: of a single one, the processor's cache would hold a part.
MEASURED_LAYERS = 2
# From the decision to stop to the end of the process. Supervisord's own margin behind a drain is longer.
STOP_SECONDS = 3.0
# A plan log that could not be opened is tried again so often.
LOG_RETRY_SECONDS = 5.0


def own_hello(config: StageConfig) -> Hello:
    """What this stage says first on every link; links of a ring carry their epoch in it."""
    return Hello(PROTOCOL, "stage", config.box, config.site, config.model_digest, config.policy, 0, __version__)


def expected_plan(config: StageConfig, manifest: ModelManifest) -> Expected:
    """What this box's plans must agree with."""
    model = manifest.config
    return Expected(
        config.box,
        config.pipeline,
        config.policy,
        config.model_digest,
        model.num_hidden_layers,
        model.tie_word_embeddings,
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
        self._log = PlanLog(config.state_directory)
        self._epochs: Epochs | None = None
        self._control: Control | None = None
        self._told_to_stop = asyncio.Event()
        self._told_again = asyncio.Event()
        self._stopping = False

    async def run(self) -> None:
        """Serve until SIGTERM or SIGINT, then leave; a second signal stops at once.

        Raises:
            OSError: a port or socket is taken.
            HungError: the compute thread hangs, and the coordinator has taken its plan away.
        """
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._note_signal)
        admin = AdminServer(self.state, self.config.admin_socket)
        http = await start_http(self.state)
        try:
            await admin.start()
            parts = (self._serve(), self._stop_after_leaving(), self._stop_at_once(), self._watch_compute())
            await until_first_ends(*map(self._or_else_stop, parts))
        finally:
            await admin.close()
            await http.close()
            self.compute.close()
            self._log.close()

    def _note_signal(self) -> None:
        (self._told_again if self._told_to_stop.is_set() else self._told_to_stop).set()

    async def _stop_at_once(self) -> None:
        await self._told_again.wait()
        log.info("told to stop a second time: stopping at once")

    async def _or_else_stop(self, part: Coroutine[Any, Any, None]) -> None:
        """When this part of the process ends, the others must in time, whatever hangs: a disk, a thread, a bug."""
        try:
            await part
        finally:
            if not self._stopping:
                self._stopping = True
                # the interpreter's own watchdog: it needs neither this loop nor the interpreter's lock
                faulthandler.dump_traceback_later(STOP_SECONDS, exit=True)

    async def _watch_compute(self) -> None:
        """A hung box starts anew, but not before the coordinator has taken its plan away: hung is for others to say."""
        state = self.state
        while state.starting or state.serving is not None or not state.hung_problem:
            await self.compute.watch()
        raise HungError(state.hung_problem)

    async def _stop_after_leaving(self) -> None:
        """Serve on until others have the layers; without a coordinator, until what is open has ended."""
        await self._told_to_stop.wait()
        epochs, control, seconds = self._epochs, self._control, self.config.drain_seconds
        if epochs is None or control is None:
            return
        loop = asyncio.get_running_loop()
        deadline = loop.time() + seconds
        log.info("leaving, for up to %g s", seconds)
        control.leave(f"{self.config.box} was told to stop")
        heard = loop.time()  # a coordinator that restarts just now is dialled again by then
        while epochs.live and loop.time() < min(deadline, heard + self.config.link_timing.reconnect_max_seconds):
            await epochs.changes.wait(min(self.config.heartbeat_seconds, max(0.0, deadline - loop.time())))
            heard = loop.time() if control.connected else heard
        if epochs.live and loop.time() < deadline:
            await epochs.drain(deadline - loop.time())

    async def _serve(self) -> None:
        config = self.config
        try:
            recovered = await self._open_log()
            self.state.incarnation = recovered.incarnation
            history = History(self._log, recovered)
            manifest = await self.compute.run(read_manifest, config.model_directory, config.model_digest)
            expected = expected_plan(config, manifest)
            stage = history.stage_in_force(expected) or StagePlan(config.box, 0, expected.layers, False, False)
            loader = await self._choose_kernel(manifest, stage)
            seconds = await self._measure(loader, stage)
            settings = LinkSettings(own_hello(config), config.tls, config.link_timing)
            self._epochs = Epochs(self.state, settings, expected, loader, history)
            await self._serve_links(settings, self._epochs, *seconds)
        except FleetError as error:
            self._fail(error)
            await asyncio.Event().wait()  # stays up, so that health can say why; a restart would fail again

    async def _open_log(self) -> Recovered:
        """Read the plan log; nothing can be promised without it, so a full disk is waited for."""
        while True:
            try:
                recovered = await self._log.open()
            except FleetError as error:
                self._fail(error)
                await asyncio.sleep(LOG_RETRY_SECONDS)
            else:
                self.state.failure = ""
                return recovered

    def _fail(self, error: FleetError) -> None:
        if self.state.failure != error.message:
            log.error("%s", error.message, extra={"hint": error.hint})
        self.state.failure = error.message
        self.state.changed()

    async def _choose_kernel(self, manifest: ModelManifest, stage: StagePlan) -> Loader:
        """Try kernels on the first of the stage's layers."""
        config, state = self.config, self.state
        map_blocks_from(LOADING_THRESHOLD_BYTES)
        started = time.monotonic()
        choice: KernelChoice = await self.compute.run(
            choose_kernel, config.kernel, config.model_directory, manifest, stage.start
        )
        state.warm_up_seconds = time.monotonic() - started
        state.kernel, state.kernel_difference = choice.kernel, choice.largest_relative_difference
        store = WeightStore(config.model_directory, manifest, choice.kernel)

        def note_loaded() -> None:
            state.weight_bytes = store.weight_bytes
            state.layers_held = frozenset(piece.index for piece in store.held if piece.kind == "layer")

        return Loader(store, config.threads, config.memory_keep_free_bytes, note_loaded)

    async def _measure(self, loader: Loader, stage: StagePlan) -> tuple[float | None, float | None]:
        """Seconds of a decode step of one layer, and of the head where the stage has it; None if memory is short."""
        some = replace(stage, end=min(stage.end, stage.start + MEASURED_LAYERS), embedding=False)
        try:
            await loader.load(pieces_of(some), background=False)
        except NoMemory as error:
            log.warning("layers are not measured: %s", error)
            return None, None
        weights, model = loader.store.weights(some), loader.store.config
        layer_seconds = await self.compute.run(measure_layer_seconds, model, *weights.layers)
        if weights.head is None:
            return layer_seconds, None
        return layer_seconds, await self.compute.run(measure_head_seconds, model, weights.head)

    async def _serve_links(
        self, settings: LinkSettings, epochs: Epochs, layer_seconds: float | None, head_seconds: float | None
    ) -> None:
        dispatcher = Dispatcher(epochs, self.config.link_timing.handshake_seconds)
        server = LinkServer(settings, dispatcher.hello_problem, dispatcher.serve, self._refused)
        server.start(self.config.ring.host, self.config.ring.port)
        pulse = Pulse(self.state, server.port, layer_seconds, head_seconds)
        self._control = Control(settings, self.state, epochs, pulse)
        self.state.starting = ""
        self.state.changed()
        try:
            await until_first_ends(epochs.run(), self._control.run())
        finally:
            await server.close()

    def _refused(self, address: str, reason: str) -> None:
        self.state.connections_refused += 1
        log.warning("connection from %s is closed: %s", address, reason)


def serve(config: StageConfig) -> NoReturn:
    """Run a stage until it is told to stop, then end the process.

    Raises:
        Exception: a bug, or an OSError of a port or socket that is taken.
    """
    os.umask(0o077)
    code = ExitCode.OK
    try:
        asyncio.run(StageProcess(config).run())
    except HungError as error:
        log.critical("%s: the stage ends, to be started anew", error)
        faulthandler.dump_traceback(sys.stderr)  # where it hangs
        code = ExitCode.FAILED
    logging.shutdown()
    os._exit(code)  # an ordinary end would wait for threads that compute or read, which may be for ever
