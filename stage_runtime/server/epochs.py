"""What the coordinator's orders do to this box: epochs are prepared, committed, aborted and retired.

Every order may come again, late, or for an epoch that is over; it is answered the same way each time. Orders are taken
one after another by whoever holds the control channel; only getting ready goes on beside them.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Coroutine
from typing import Any

from fleet.errors import FleetError
from stage_runtime.link.endpoints import LinkSettings
from stage_runtime.link.membership import Abort, Commit, Prepare, Retire, Standby, Vote
from stage_runtime.link.tasks import within
from stage_runtime.model.store import Piece, pieces_of
from stage_runtime.server.changes import Changes
from stage_runtime.server.ending import END_SECONDS, STOP_END_SECONDS, end_within
from stage_runtime.server.epoch import Epoch
from stage_runtime.server.history import History
from stage_runtime.server.loader import Loader, NoMemory
from stage_runtime.server.plan_checks import Expected, prepare_problem
from stage_runtime.server.plan_log import PlanLogError
from stage_runtime.server.preparing import Preparer
from stage_runtime.server.standby import StandbyKeeper, standby_pieces
from stage_runtime.server.state import StageState

log = logging.getLogger(__name__)

# One serves, the one before it finishes what is open.
COMMITTED_AT_ONCE = 2


class Epochs:
    """All epochs of the process.

    Args:
        state: what others see.
        settings: this side of ring links.
        expected: what plans must agree with.
        loader: gets weights.
        history: what was promised.

    Attributes:
        live: epochs that are prepared or serve, by number.
        changes: something about them has changed.
        on_vote: takes a vote as soon as it is cast.
    """

    def __init__(
        self, state: StageState, settings: LinkSettings, expected: Expected, loader: Loader, history: History
    ) -> None:
        self.live: dict[int, Epoch] = {}
        self.changes = Changes()
        self.history = history
        self.on_vote: Callable[[Vote], None] = lambda vote: None
        self._state = state
        self._settings = settings
        self._preparer = Preparer(state, loader)
        self._standby = StandbyKeeper(loader, self._needed, self._note_bug)
        self._expected = expected
        self._bug: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._getting_ready: dict[int, asyncio.Task[None]] = {}
        self._late: set[asyncio.Task[None]] = set()  # of epochs that have ended; their loads have not

    async def run(self) -> None:
        """Load what the committed plan needs, so that a return is quick; then own every epoch, until cancelled.

        Raises:
            Exception: a bug in an epoch's tasks.
        """
        self._standby.want(())
        freeing = asyncio.ensure_future(self._preparer.run())
        try:
            await self._bug
        finally:
            freeing.cancel()
            for task in (freeing, *self._getting_ready.values(), *self._late):
                await end_within(STOP_END_SECONDS, task)
            with contextlib.suppress(asyncio.TimeoutError):  # a piece is being loaded: nobody needs it any more
                await within(STOP_END_SECONDS, self._standby.pause())
            await asyncio.gather(*(epoch.end("the stage stops", STOP_END_SECONDS) for epoch in self.live.values()))

    # --- orders: PlanLogError passes through, and the coordinator gives the order again ---------------------------

    async def prepare(self, prepare: Prepare) -> None:
        """PREPARE: begin to get ready; the vote follows."""
        number, epoch = prepare.epoch, self.live.get(prepare.epoch)
        if epoch is not None and epoch.prepare == prepare:
            if epoch.voted:  # else its vote is under way
                self.on_vote(Vote(number, True, "", 0, 0.0))
            return
        newer = next((other for other in self.live if other > number), 0)
        problem = f"epoch {number} is older than epoch {newer}" if newer else self.history.stale_problem(prepare)
        if problem := problem or prepare_problem(prepare, self._expected) or self._state.hung_problem:
            log.warning("PREPARE of epoch %d is declined: %s", number, problem)
            self.on_vote(Vote(number, False, problem, 0, 0.0))
            return
        await self._end_uncommitted(f"epoch {number} is prepared instead")
        if not prepare.planned:
            try:
                await self.history.fence(number)
            finally:
                for older in [epoch for epoch in self.live.values() if epoch.number < number]:
                    await self._end(older, f"epoch {older.number} is fenced by epoch {number}")
        epoch = self._begin(prepare)
        self._own(epoch, self._get_ready(epoch))

    async def commit(self, commit: Commit) -> bool:
        """COMMIT: serve this epoch; False if nothing was promised under it here."""
        number, epoch = commit.epoch, self.live.get(commit.epoch)
        if epoch is not None and epoch.view.committed:
            return True
        if epoch is not None and epoch.voted:
            await self.history.commit(epoch.prepare)
            self._preparer.drop_kept(unless=epoch.view.stage)
            epoch.commit()
        else:
            promised = self.history.logged(number)
            if epoch is not None or promised is None or self.history.over_problem(number):
                return False
            if problem := prepare_problem(promised, self._expected):
                log.error("COMMIT of epoch %d, whose plan in the log does not fit: %s", number, problem)
                return False
            await self.history.commit(promised)  # promised before the process restarted
            await self._end_uncommitted(f"epoch {number} is committed")
            epoch = self._begin(promised)
            epoch.commit()
            self._own(epoch, self._return(epoch))
        committed = sorted(other for other, live in self.live.items() if live.view.committed)
        for old in committed[:-COMMITTED_AT_ONCE]:
            await self._end(self.live[old], f"epoch {old} is retired: epoch {number} is the second after it")
        self._standby.restart()
        self.changes.notify()
        return True

    async def abort(self, abort: Abort) -> None:
        """ABORT: forget a prepared epoch."""
        epoch = self.live.get(abort.epoch)
        if epoch is not None and epoch.view.committed:
            log.warning("ABORT of epoch %d, which is committed, is ignored", abort.epoch)
            return
        if epoch is not None or self.history.logged(abort.epoch) is not None:
            try:
                await self.history.abort(abort.epoch)
            finally:
                if epoch is not None:  # a later one may be under way already
                    await self._end(epoch, f"epoch {abort.epoch} is aborted: {abort.reason}")

    async def retire(self, retire: Retire) -> None:
        """RETIRE: stop this epoch and older ones, and free what only they needed."""
        # an order about epochs that nobody has heard of here must not rule out those that come
        last = min(retire.epoch, max(self.history.newest_epoch, *self.live, 0))
        reason = f"epoch {retire.epoch} is retired: {retire.reason}"
        try:
            await self.history.retire(last)
        finally:
            await self._end_retired(last, reason)

    async def _end_retired(self, last: int, reason: str) -> None:
        if any(number <= last and not epoch.view.committed for number, epoch in self.live.items()):
            await self._end_uncommitted(reason)
        for epoch in [epoch for number, epoch in self.live.items() if number <= last]:
            await self._end(epoch, reason, keep=False)  # what was open has moved to a ring of its own
        if not self.live:
            self._state.idle_reason = reason
            self._preparer.drop_kept()
        self._standby.restart()
        self._state.changed()

    def standby(self, standby: Standby) -> None:
        """STANDBY: what to keep beside the own layers.

        Raises:
            ValueError: the model has no such layer.
        """
        self._standby.want(standby_pieces(standby, self._expected.layers))

    async def drain(self, seconds: float) -> None:
        """Without a coordinator: wait until what is open has ended."""
        await asyncio.gather(*(epoch.drain(seconds) for epoch in list(self.live.values())))

    # --- getting ready ------------------------------------------------------------------------------------------

    def _begin(self, prepare: Prepare) -> Epoch:
        epoch = Epoch(prepare, self._settings, self._state, self._note_bug)
        self.live[prepare.epoch] = epoch
        self._state.epochs[prepare.epoch] = epoch.view
        self._state.failure = ""
        self._state.changed()
        self.changes.notify()
        return epoch

    async def _get_ready(self, epoch: Epoch) -> None:
        """Load, join the ring, and vote; an epoch that can't be voted for ends here."""
        started = time.monotonic()
        missing, problem = 0, ""
        try:
            await self._load(epoch)
            problem = await epoch.fit() if epoch.prepare.planned else ""
            if not problem:
                await self.history.vote(epoch.prepare)
                epoch.voted = True
        except NoMemory as error:
            missing, problem = error.missing_bytes, str(error)
        except FleetError as error:
            log.error("%s", error.message, extra={"hint": error.hint})
            problem = self._state.failure = error.message
        except PlanLogError as error:
            problem = str(error)
        if problem:
            self._state.idle_reason = f"epoch {epoch.number} can't be served: {problem}"
            await self._end(epoch, problem)
        self.on_vote(Vote(epoch.number, not problem, problem, missing, time.monotonic() - started))
        self._standby.restart()

    async def _return(self, epoch: Epoch) -> None:
        """After a restart, of an epoch that is committed already: load and join the ring again."""
        try:
            await self._load(epoch)
        except (NoMemory, FleetError) as error:
            log.error("epoch %d can't be served again: %s", epoch.number, error)
            epoch.view.enter("failed", str(error))
        self._standby.restart()

    async def _load(self, epoch: Epoch) -> None:
        await self._standby.pause()
        engine = await self._preparer.engine(epoch, self._live_pieces(), background=self._state.serving is not None)
        epoch.start(engine)
        self.changes.notify()

    # --- ending -------------------------------------------------------------------------------------------------

    async def _end_uncommitted(self, reason: str) -> None:
        """Whatever is prepared and not committed ends."""
        for epoch in [epoch for epoch in self.live.values() if not epoch.view.committed]:
            await self._end(epoch, reason)

    async def _end(self, epoch: Epoch, reason: str, *, keep: bool = True) -> None:
        """End one epoch; its layers stay in memory until the next commit.

        Args:
            keep: its caches wait for an epoch with the same layers.
        """
        await self._stop_getting_ready(epoch.number)
        self.live.pop(epoch.number, None)
        self._state.epochs.pop(epoch.number, None)
        put_away = await epoch.end(reason, END_SECONDS)
        if keep and put_away and epoch.view.engine is not None:
            self._preparer.keep(epoch.view.stage, epoch.view.engine)
        self._state.changed()
        self.changes.notify()

    async def _stop_getting_ready(self, number: int) -> None:
        task = self._getting_ready.get(number)
        if task is not None and task is not asyncio.current_task():  # an epoch that can't get ready ends itself
            del self._getting_ready[number]
            task.cancel()
            _, late = await asyncio.wait([task], timeout=END_SECONDS)
            self._late |= late  # a piece is being loaded; what is loaded next waits for it, orders do not

    def _needed(self) -> frozenset[Piece]:
        """Pieces of all live epochs and of the plan in force."""
        stage = self.history.stage_in_force(self._expected)
        return self._live_pieces() | frozenset(pieces_of(stage) if stage is not None else ())

    def _live_pieces(self) -> frozenset[Piece]:
        return frozenset(piece for epoch in self.live.values() for piece in pieces_of(epoch.view.stage))

    def _own(self, epoch: Epoch, coroutine: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(coroutine)
        self._getting_ready[epoch.number] = task
        task.add_done_callback(self._note_end)

    def _note_end(self, task: asyncio.Task[None]) -> None:
        self._getting_ready = {number: other for number, other in self._getting_ready.items() if other is not task}
        self._late.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._note_bug(error)

    def _note_bug(self, error: BaseException) -> None:
        if not self._bug.done():
            self._bug.set_exception(error)
