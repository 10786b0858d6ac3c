"""The gateway's link to the coordinator: routes come down it, "drained" goes up."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from contextlib import ExitStack

from fleet.gateway.healing import HealingPipeline
from fleet.gateway.routes import RouteStore, decode_route
from stage_runtime.link.backoff import Backoff
from stage_runtime.link.connection import Link, LinkError
from stage_runtime.link.control import encode_control
from stage_runtime.link.endpoints import BoxAddress, LinkSettings, dial
from stage_runtime.link.frames import Frame, FrameError, FrameType
from stage_runtime.link.membership import Drained, Route
from stage_runtime.link.tasks import until_first_ends

log = logging.getLogger(__name__)


class RouteChannel:
    """Follows the coordinator; without it the last routes stand.

    Args:
        settings: this side of the link.
        coordinator: whom to dial.
        pipelines: by name; told of their routes.
        store: where serving routes are kept.

    Attributes:
        connected: a link to the coordinator is up.
    """

    def __init__(
        self,
        settings: LinkSettings,
        coordinator: BoxAddress,
        pipelines: Mapping[str, HealingPipeline],
        store: RouteStore,
    ) -> None:
        self.connected = False
        self._settings = settings
        self._coordinator = coordinator
        self._pipelines = pipelines
        self._store = store

    def recall(self) -> None:
        """Follow the routes on disk until the coordinator says otherwise. Blocks; before the loop serves."""
        for name, route in self._store.load().items():
            if name in self._pipelines:
                self._pipelines[name].apply(route)

    async def run(self) -> None:
        """Dial, follow, dial again with back-off; runs until cancelled."""
        timing = self._settings.timing
        backoff = Backoff(timing.reconnect_seconds, timing.reconnect_max_seconds)
        said = ""
        while True:
            try:
                link = await dial(self._settings, self._coordinator)
                said = ""
                log.info("connected to the coordinator")
                await self._session(link, backoff)
            except (LinkError, FrameError) as error:
                if str(error) != said:  # a coordinator that stays away is one line, not one a second
                    said = str(error)
                    log.warning("the coordinator is away, the last routes stand: %s", error)
            await asyncio.sleep(backoff.next_seconds())

    async def _session(self, link: Link, backoff: Backoff) -> None:
        self.connected = True
        heard: dict[str, int] = {}
        try:
            await until_first_ends(self._receive(link, heard, backoff), self._report(link, heard))
        finally:
            self.connected = False
            link.close("the gateway ends the session")

    async def _receive(self, link: Link, heard: dict[str, int], backoff: Backoff) -> None:
        """Follow routes; `heard` gets the epoch of each pipeline that the coordinator has named on this link."""
        while True:
            frame = await link.receive()
            if frame.type is not FrameType.ROUTE:
                raise FrameError(f"{frame.type.name} from the coordinator")
            route = decode_route(frame.body)
            backoff.reset()  # not before: each session that fails at once is two events in the coordinator's history
            pipeline = self._pipelines.get(route.pipeline)
            if pipeline is None:
                log.warning("a route for pipeline %.80r, which is not in gateway.json", route.pipeline)
                continue
            log.info("route", extra={"fields": _shown(route)})
            heard[route.pipeline] = route.epoch
            pipeline.apply(route)
            if route.state == "serving":
                await asyncio.to_thread(self._store.save, route)

    async def _report(self, link: Link, heard: Mapping[str, int]) -> None:
        """Say DRAINED once for every epoch under which nothing is open any more, anew on every link."""
        told: dict[str, int] = {}
        wake = asyncio.Event()
        with ExitStack() as watches:
            for pipeline in self._pipelines.values():
                watches.enter_context(pipeline.news.watched(wake))
            while True:
                wake.clear()
                for name in list(heard):
                    epoch = self._pipelines[name].drained_epoch
                    if epoch > told.get(name, 0):
                        told[name] = epoch
                        await link.send(Frame(FrameType.DRAINED, encode_control(Drained(name, epoch))))
                await wake.wait()


def _shown(route: Route) -> dict[str, object]:
    return {
        "pipeline": route.pipeline,
        "epoch": route.epoch,
        "state": route.state,
        "reason": route.reason,
        "first_stage": route.first_stage,
        "planned": route.planned,
    }
