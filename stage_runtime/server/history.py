"""What this box knows of epochs: which are over, which it has promised. In memory as in the plan log."""

from __future__ import annotations

from fleet.planning.plan import StagePlan
from stage_runtime.link.membership import Prepare
from stage_runtime.server.plan_checks import Expected, own_stage, prepare_problem
from stage_runtime.server.plan_log import PlanLog, Recovered


class History:
    """Every promise is on disk before it is made; each method raises PlanLogError when it can't be.

    `vote` and `commit` have changed nothing then. What rules epochs out (`fence`, `abort`, `retire`) holds all the same
    as long as this process lives: a disk that can't be written must not keep anything serving, and after a restart
    nothing serves before the coordinator says so.

    Args:
        log: on disk. recovered: what it held at the start.

    Attributes:
        committed: the last plan known as committed. prepared: a later one that was voted for.
        retired_epoch: this one and older ones are over.
    """

    def __init__(self, log: PlanLog, recovered: Recovered) -> None:
        self.committed = recovered.committed
        self.prepared = recovered.prepared
        self.retired_epoch = recovered.retired_epoch
        self._fenced = recovered.fenced_epoch
        self._aborted = 0
        self._log = log

    @property
    def committed_epoch(self) -> int:
        """The last epoch known as committed."""
        return self.committed.epoch if self.committed else 0

    @property
    def prepared_epoch(self) -> int:
        """A later one that was voted for, else 0."""
        return self.prepared.epoch if self.prepared and self.prepared.epoch > self.committed_epoch else 0

    @property
    def newest_epoch(self) -> int:
        """The highest epoch that was ever heard of here."""
        return max(self.committed_epoch, self.prepared_epoch, self._fenced, self.retired_epoch, self._aborted)

    @property
    def later_epoch(self) -> int:
        """The highest epoch above the committed one that was ever heard of here, prepared or not; else 0."""
        return self.newest_epoch if self.newest_epoch > self.committed_epoch else 0

    def stage_in_force(self, expected: Expected) -> StagePlan | None:
        """This box's part of the committed plan, unless that is over, or the box has got another model since."""
        committed = self.committed
        if committed is None or self.over_problem(committed.epoch) or prepare_problem(committed, expected):
            return None
        return own_stage(committed, expected.box)

    def over_problem(self, epoch: int) -> str:
        """Why an epoch never serves here again; empty if it may."""
        if epoch < self._fenced:
            return f"epoch {epoch} is fenced by epoch {self._fenced}"
        if epoch <= self.retired_epoch:
            return f"epoch {epoch} is retired"
        return ""

    def stale_problem(self, prepare: Prepare) -> str:
        """Why a PREPARE comes too late; empty if it does not."""
        number = prepare.epoch
        if number < 1:
            return "epoch 0 is no plan"
        if problem := self.over_problem(number):
            return problem
        if number == self._aborted:
            return f"epoch {number} is aborted"
        if number < self.newest_epoch:
            return f"epoch {number} is older than epoch {self.newest_epoch}"
        logged = self.logged(number)
        return f"epoch {number} has another plan here" if logged is not None and logged != prepare else ""

    def logged(self, epoch: int) -> Prepare | None:
        """What was promised under this epoch."""
        return next((p for p in (self.committed, self.prepared) if p is not None and p.epoch == epoch), None)

    async def fence(self, epoch: int) -> None:
        """Older epochs never serve here again."""
        if epoch > self._fenced:
            self._fenced = epoch
            await self._log.fence(epoch)

    async def vote(self, prepare: Prepare) -> None:
        """This box votes yes."""
        await self._log.prepare(prepare)
        self.prepared = prepare

    async def commit(self, prepare: Prepare) -> None:
        """A plan is committed."""
        await self._log.commit(prepare)
        self.committed, self.prepared = prepare, None

    async def abort(self, epoch: int) -> None:
        """A prepared plan is aborted."""
        self._aborted = max(self._aborted, epoch)
        if self.prepared is not None and self.prepared.epoch == epoch:
            self.prepared = None
            await self._log.forget_prepared()

    async def retire(self, epoch: int) -> None:
        """This epoch and older ones are over."""
        if epoch > self.retired_epoch:
            self.retired_epoch = epoch
            await self._log.retire(epoch)
