"""The links of one pipeline to its first stages: one an epoch, more than one only during a planned switch."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable

from stage_runtime.link.membership import Route
from stage_runtime.link.messages import FinishedEvent, GenerateRequest, Pipeline, TokenEvent

log = logging.getLogger(__name__)


class EpochLink:
    """One epoch's first stage, and how many sequences are open there.

    Args:
        route: where it is.
        pipeline: the link.
        emptied: called when the last open sequence has ended.
    """

    def __init__(self, route: Route, pipeline: Pipeline, emptied: Callable[[], None]) -> None:
        self.route = route
        self.pipeline = pipeline
        self.open = 0
        self.task: asyncio.Task[None] | None = None
        self._emptied = emptied

    def leads_to(self, route: Route) -> bool:
        """Whether a route means this very link."""
        own = (self.route.epoch, self.route.first_stage, self.route.host, self.route.port)
        return own == (route.epoch, route.first_stage, route.host, route.port)

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[TokenEvent | FinishedEvent, None]:
        """As `Pipeline.generate`, counted."""
        self.open += 1
        events = self.pipeline.generate(request)
        try:
            async for event in events:
                yield event
        finally:
            try:
                if isinstance(events, AsyncGenerator):
                    await events.aclose()
            finally:  # whoever is cancelled a second time in there is counted too: a switch waits for DRAINED
                self.open -= 1
                if not self.open:
                    self._emptied()


class EpochLinks:
    """All links of a pipeline; owns their tasks.

    Args:
        connect: makes the link for a route.
        changed: called when something may be different for those who wait.

    Attributes:
        serving: takes new sequences; None while no plan serves.
    """

    def __init__(self, connect: Callable[[Route], Pipeline], changed: Callable[[], None]) -> None:
        self.serving: EpochLink | None = None
        self._connect = connect
        self._changed = changed
        self._links: list[EpochLink] = []  # oldest first; the serving one is among them
        self._stopping: set[asyncio.Task[None]] = set()
        self._wake = asyncio.Event()

    @property
    def drained_epoch(self) -> int:
        """The newest epoch under which, and under all older ones, nothing is open; 0 if that is not known."""
        if self.serving is None:
            return 0
        return min([self.serving.route.epoch, *(link.route.epoch for link in self._links if link.open)]) - 1

    def follow(self, route: Route) -> None:
        """New sequences go where the route says.

        After a planned switch open ones finish on their old link. An unplanned one closes older links at once: what
        is open there moves, whatever a first stage that has not noticed yet may think.
        """
        if route.state != "serving":
            # open sequences stay: their ring may live a moment longer, and the first stage says when it ends
            self.serving = None
            return
        link = next((link for link in self._links if link.leads_to(route)), None)
        if link is None:
            link = EpochLink(route, self._connect(route), self._emptied)
            self._links.append(link)
        elif link is self.serving:
            return
        if not route.planned:
            for other in [other for other in self._links if other is not link]:
                self._stop(other)
        self.serving = link
        self._wake.set()

    async def run(self) -> None:
        """Run the links' tasks until cancelled; raises the bug that ended one."""
        try:
            while True:
                self._wake.clear()
                self._look_after()
                await self._wake.wait()
        finally:
            for link in list(self._links):
                self._stop(link)
            await asyncio.gather(*self._stopping, return_exceptions=True)

    def _look_after(self) -> None:
        """Start what has no task yet, stop what is empty and serves no more, raise what went wrong."""
        for link in list(self._links):
            if link.task is None:
                link.task = asyncio.ensure_future(link.pipeline.run())
                link.task.add_done_callback(lambda _: self._wake.set())
            elif link.task.done():
                link.task.result()
                raise RuntimeError(f"the link of epoch {link.route.epoch} ended by itself")
            if link is not self.serving and self.serving is not None and not link.open:
                self._stop(link)

    def _emptied(self) -> None:
        self._wake.set()
        self._changed()

    def _stop(self, link: EpochLink) -> None:
        self._links.remove(link)
        if self.serving is link:
            self.serving = None
        if link.task is not None:
            log.info("the link to %s of epoch %d is closed", link.route.first_stage, link.route.epoch)
            self._stopping.add(link.task)
            link.task.add_done_callback(self._stopping.discard)
            link.task.cancel()
