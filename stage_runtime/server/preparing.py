"""Getting an epoch's layers and engine ready: memory first, then weights, then what an older epoch has kept."""

from __future__ import annotations

import logging
import time

from fleet.planning.plan import StagePlan
from stage_runtime.engine.stage import StageEngine
from stage_runtime.model.store import Piece, pieces_of
from stage_runtime.server.epoch import Epoch
from stage_runtime.server.kept import KeptTimer
from stage_runtime.server.loader import Loader, NoMemory
from stage_runtime.server.state import StageState

log = logging.getLogger(__name__)


class Preparer:
    """Makes engines out of weights, and keeps the caches of the last epoch that ended.

    Args:
        state: what others see.
        loader: gets weights.
    """

    def __init__(self, state: StageState, loader: Loader) -> None:
        self._state = state
        self._loader = loader
        self._kept_stage: StagePlan | None = None
        self._timer = KeptTimer(state.compute)

    async def run(self) -> None:
        """Free kept caches that nobody takes over, until cancelled."""
        await self._timer.run()

    async def engine(self, epoch: Epoch, needed: frozenset[Piece], *, background: bool) -> StageEngine:
        """Load what the epoch's stage lacks and make its engine.

        Args:
            epoch: to get ready. needed: pieces of all epochs that live.
            background: another epoch serves meanwhile and goes first.

        Raises:
            NoMemory: it would take more than may be taken. Nothing was loaded.
            FleetError: a shard is missing or damaged.
        """
        started = time.monotonic()
        stage, plan = epoch.view.stage, epoch.prepare.plan
        pieces = pieces_of(stage)
        quickly = await self._make_room(pieces, needed, quickly=not background)
        await self._loader.load(pieces, background=background, quickly=quickly)
        engine = StageEngine(
            self._loader.store.config,
            self._loader.store.weights(stage),
            self._state.config.kv_block_tokens,
            plan.max_sequences,
            plan.max_tokens_per_sequence,
        )
        kept = self._state.kept_engine
        if kept is not None and self._kept_stage is not None and same_layers(self._kept_stage, stage):
            await self._state.compute.run(engine.take_over, kept)
            self.drop_kept()
        self._state.load_seconds = time.monotonic() - started
        log.info("layers %d to %d are loaded", stage.start, stage.end, extra={"epoch": epoch.number})
        return engine

    def keep(self, stage: StagePlan, engine: StageEngine) -> None:
        """An epoch was fenced: its caches wait for one with the same layers."""
        if engine.kept_sequences:
            self._kept_stage, self._state.kept_engine = stage, engine
            self._timer.start(engine)

    def drop_kept(self, *, unless: StagePlan | None = None) -> None:
        """Nobody will take over what was kept, unless it is of the same layers."""
        if unless is None or self._kept_stage is None or not same_layers(self._kept_stage, unless):
            self._kept_stage = self._state.kept_engine = None
            self._timer.stop()

    async def _make_room(self, pieces: tuple[Piece, ...], needed: frozenset[Piece], *, quickly: bool) -> bool:
        """Make sure that loading fits; whether it fits in the form that is ready soonest, which takes more."""
        if quickly and self._fits(pieces, quickly=True):
            return True
        if not self._fits(pieces, quickly=False):
            self.drop_kept()
            await self._loader.keep(needed | frozenset(pieces))
            self._loader.check(pieces)
        return False

    def _fits(self, pieces: tuple[Piece, ...], *, quickly: bool) -> bool:
        try:
            self._loader.check(pieces, quickly=quickly)
        except NoMemory:
            return False
        return True


def same_layers(one: StagePlan, other: StagePlan) -> bool:
    """Whether two stages' KV caches have the same layers."""
    return (one.start, one.end) == (other.start, other.end)
