"""The coordinator's process: start order, its tasks, its end."""

from __future__ import annotations

import asyncio
import functools
import logging
import signal
from contextlib import AsyncExitStack
from typing import NoReturn

from fleet.coordinator.config import CoordinatorConfig
from fleet.coordinator.context import Context
from fleet.coordinator.database import StoreError
from fleet.coordinator.http import Api
from fleet.coordinator.pipeline import Pipeline
from fleet.coordinator.server import ControlServer
from fleet.coordinator.store import Store
from fleet.errors import FleetError
from stage_runtime.link.tasks import until_first_ends

log = logging.getLogger("fleet.coordinator")


class Coordinator:
    """A running coordinator; use it as an asynchronous context manager around `run`.

    Attributes:
        context: shared state. pipelines: by name. port, http_port: where it listens.
    """

    def __init__(self, config: CoordinatorConfig) -> None:
        self.config = config
        self.pipelines: dict[str, Pipeline] = {}
        self.context: Context
        self.port = 0
        self.http_port = 0
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Coordinator:
        """Open the store, take up what it holds, listen.

        Raises:
            FleetError: the store can't be used, or an address not be listened on.
        """
        async with AsyncExitStack() as stack:
            store = Store(self.config.database)
            kept = await store.open()
            stack.push_async_callback(store.close)
            self.context = Context(self.config, store, kept)
            store.made_anew = functools.partial(self.context.event, "database-replaced")
            self.pipelines = {name: Pipeline(spec, self.context) for name, spec in self.config.pipelines.items()}
            try:
                for name, pipeline in self.pipelines.items():
                    await pipeline.switching.restore(kept.epochs.get(name, []), kept.reserved.get(name, 0))
            except StoreError as error:
                raise FleetError(str(error), hint="look at the disk: df -h") from None
            self._say_started(store)
            await self._listen(stack)
            self._stack = stack.pop_all()
        return self

    async def __aexit__(self, *_: object) -> None:
        """End every link, write what is noted, close."""
        await self._stack.aclose()

    async def run(self) -> None:
        """Work until cancelled, or until a task ends, which only a bug does."""
        pipelines = [pipeline.run() for pipeline in self.pipelines.values()]
        await until_first_ends(self._tick(), self.context.store.write_behind(), *pipelines)

    async def _listen(self, stack: AsyncExitStack) -> None:
        listen, server = self.config.listen, ControlServer(self.context, self.pipelines).server
        try:
            server.start(listen.host, listen.port)
        except OSError as error:
            raise FleetError(
                f"cannot listen on {listen.host}:{listen.port}: {error.strerror or error}",
                hint=f"see who has the port: ss -ltnp 'sport = :{listen.port}'",
            ) from None
        stack.push_async_callback(server.close)
        api = await Api(self.context, self.pipelines).start()
        stack.push_async_callback(api.close)
        self.port, self.http_port = server.port, api.port
        fields = {"host": listen.host, "port": self.port, "http_port": self.http_port}
        log.info("listening", extra={"fields": fields})

    async def _tick(self) -> NoReturn:
        while True:
            self.context.clock.tick()
            self.context.clocks.check()
            await asyncio.sleep(self.context.tick_seconds)

    def _say_started(self, store: Store) -> None:
        epochs = ", ".join(f"{name} at epoch {each.switching.epoch}" for name, each in self.pipelines.items())
        text = f"the coordinator started: {epochs}"
        if store.set_aside is not None:
            text += (
                f"; ITS DATABASE WAS DAMAGED and is set aside as {store.set_aside}: "
                "plans, drains and hold-downs are forgotten, epochs go on above what the stages know"
            )
        self.context.event("coordinator-started", text)


async def serve(config: CoordinatorConfig) -> None:
    """Coordinate until SIGTERM or SIGINT.

    Raises:
        FleetError: the store can't be used, or an address not be listened on.
        Exception: a bug that ended one of its tasks; supervisord starts it anew.
    """
    loop, stop = asyncio.get_running_loop(), asyncio.Event()
    for signal_number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signal_number, stop.set)
    async with Coordinator(config) as coordinator:
        await until_first_ends(coordinator.run(), _until(stop))
    log.info("stopped")


async def _until(stop: asyncio.Event) -> None:
    await stop.wait()


def check(config: CoordinatorConfig) -> None:
    """Whether what the configuration names can be read; nothing is written or listened on.

    Raises:
        FleetError: a certificate file is missing or wrong.
    """
    try:
        config.tls.server_context()
    except OSError as error:
        raise FleetError(
            f"{config.tls.certificate}: cannot use this certificate: {error}", hint="run fleet provision again"
        ) from None
