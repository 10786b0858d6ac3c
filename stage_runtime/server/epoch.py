"""One epoch on this box: its plan, its engine, its part in the ring."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import replace

from stage_runtime.engine.stage import StageEngine
from stage_runtime.link.connection import Link
from stage_runtime.link.endpoints import LinkSettings
from stage_runtime.link.membership import Prepare
from stage_runtime.link.messages import Hello
from stage_runtime.server.ending import end_within
from stage_runtime.server.first import FirstStage
from stage_runtime.server.follower import Follower
from stage_runtime.server.plan_checks import neighbours, own_stage
from stage_runtime.server.state import EpochState, StageState

log = logging.getLogger(__name__)


class Epoch:
    """Owns the tasks of one epoch's ring.

    Args:
        prepare: what the coordinator sent; without problems.
        settings: this side of links.
        state: of the process.
        on_bug: told of an error that nothing handles.

    Attributes:
        view: what others see.
        voted: this box has said yes.
    """

    def __init__(
        self,
        prepare: Prepare,
        settings: LinkSettings,
        state: StageState,
        on_bug: Callable[[BaseException], None],
    ) -> None:
        self.prepare = prepare
        self.number = prepare.epoch
        self.view = EpochState(prepare, own_stage(prepare, state.config.box), state.changed)
        self.voted = False
        self._settings = replace(settings, own=replace(settings.own, epoch=prepare.epoch))
        self._state = state
        self._on_bug = on_bug
        self._neighbours = neighbours(prepare, state.config.box)
        self._role: FirstStage | Follower | None = None
        self._task: asyncio.Task[None] | None = None

    @property
    def is_first(self) -> bool:
        """Whether this box is the first stage."""
        return self.view.stage.embedding

    @property
    def loaded(self) -> bool:
        """Whether links can be served."""
        return self._role is not None

    def start(self, engine: StageEngine) -> None:
        """The layers are in memory: take part in the ring."""
        self.view.engine = engine
        stages = self.prepare.plan.stages
        successor = self._neighbours.successor
        if self.is_first:
            alone = len(stages) == 1
            role: FirstStage | Follower = FirstStage(
                self._settings, None if alone else successor, engine, self.view, self._state
            )
        else:
            last = stages[-1].box == self.view.stage.box
            role = Follower(self._settings, successor, engine, self.view, self._state, last=last)
        self._role = role
        self.view.enter("loaded", "layers are loaded")
        self._task = asyncio.ensure_future(role.run())
        self._task.add_done_callback(self._note_bug)
        if self.view.committed:
            role.commit()

    async def fit(self) -> str:
        """Wait until a planned epoch can be voted for; why it can't, or nothing."""
        return await self._role.fit() if self._role is not None else "the layers are not loaded"

    def commit(self) -> None:
        """The coordinator has decided: serve."""
        self.view.committed = True
        if self._role is not None:
            self._role.commit()
        self._state.changed()

    async def end(self, reason: str, seconds: float) -> bool:
        """End the ring; the caches stay in the engine.

        Args:
            reason: for neighbours and gateways.
            seconds: how long the compute thread may take to put the caches away; links are closed before that.

        Returns:
            Whether they are put away.
        """
        log.info("epoch %d ends here: %s", self.number, reason)
        role, self._role = self._role, None
        if isinstance(role, FirstStage):
            role.announce_end(reason)
        put_away = self._task is None or await end_within(seconds, self._task)
        if role is not None:
            put_away = await role.end(reason, seconds) and put_away
        if not put_away:
            log.warning("epoch %d has ended, but its compute thread is still in a call", self.number)
        return put_away

    async def drain(self, seconds: float) -> None:
        """Without a coordinator: admit nothing more, and wait for the end of what is open."""
        if self._role is not None:
            await self._role.drain(seconds)

    def hello_problem(self, peer: Hello) -> str:
        """Why a link of this epoch is refused; empty if it is welcome."""
        box, stages = self.view.stage.box, self.prepare.plan.stages
        if peer.role == "gateway":
            return "" if self.is_first else f"gateways talk to the first stage, {stages[0].box!r}"
        if len(stages) == 1:
            return f"{box} is not part of a ring"
        expected = self._neighbours.predecessor
        return "" if peer.box == expected else f"the predecessor is {expected!r}, not {peer.box!r}"

    async def serve_link(self, link: Link) -> None:
        """Serve a link of this epoch until it ends."""
        if self._role is None:
            link.close(f"epoch {self.number} is over")
        elif link.peer.role == "gateway":
            await self._role.serve_gateway(link)
        else:
            await self._role.serve_stage(link)

    def _note_bug(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._on_bug(error)
