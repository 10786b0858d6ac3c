"""The two-phase switch of one pipeline: prepare, votes, the durable commit, delivery, and the end of the epoch before.

Presumed abort: an epoch that is not committed in the store never was. Everything is idempotent and delivered again to
whoever registers with less than it should know.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from fleet.coordinator.context import Context
from fleet.coordinator.database import StoreError
from fleet.coordinator.hold_down import MOST_DOUBLINGS
from fleet.coordinator.numbers import EpochNumbers
from fleet.coordinator.records import EpochRecord
from fleet.coordinator.recovery import recovered
from fleet.coordinator.reports import Reports
from fleet.coordinator.state import BoxState, Draining, Phases, Serving, Switch, members
from fleet.planning.heal import transition_missing
from fleet.planning.plan import PipelinePlan
from fleet.planning.shortage import short_bytes
from fleet.planning.spec import PipelineSpec
from fleet.planning.whole import same_model
from stage_runtime.link.frames import FrameType
from stage_runtime.link.membership import Abort, Commit, Prepare, Register, Retire, Vote

# A COMMIT that nobody confirms is delivered again so often; the link itself loses nothing while it lives.
COMMIT_AGAIN_SECONDS = 1.0


class Switching:
    """Epochs of one pipeline.

    Attributes:
        serving: the committed epoch. draining: the one before, after a planned switch. switch: waits for votes.
        fenced_by: members that run no ring of the epoch that serves, and can't any more: e.g. they stopped that ring
            for an epoch that was never committed.
        calm_after: no better split before then: a loss was mended just now.
        improve_after: no planned switch that only improves things before then: the last one failed.
    """

    def __init__(self, spec: PipelineSpec, context: Context, reports: Reports) -> None:
        self.spec = spec
        self.serving: Serving | None = None
        self.draining: Draining | None = None
        self.switch: Switch | None = None
        self.fenced_by: set[str] = set()
        self.calm_after = -math.inf
        self.improve_after = -math.inf
        self._context = context
        self._reports = reports
        self._numbers = EpochNumbers(spec.name, context.store)
        self._failures = 0  # planned switches that failed since the last commit

    @property
    def fenced(self) -> bool:
        """Whether the ring of the epoch that serves can't go on."""
        return bool(self.fenced_by)

    @property
    def epoch(self) -> int:
        """The committed epoch; 0 is none."""
        return self.serving.record.epoch if self.serving else 0

    @property
    def plan(self) -> PipelinePlan | None:
        """The committed plan."""
        return self.serving.record.plan if self.serving else None

    async def restore(self, kept: list[EpochRecord], reserved: int) -> None:
        """Take up what an earlier process left: prepared epochs are aborted, committed ones are delivered again.

        Raises:
            StoreError: the epochs to give out can't be reserved.
        """
        now, store, found = self._context.clock.now(), self._context.store, recovered(kept, self.spec.boxes)
        for record in found.aborted:
            store.epoch_state(self.spec.name, record.epoch, "aborted")
            self._event("plan-aborted", f"epoch {record.epoch}: the coordinator stopped before it was committed")
        for record in found.foreign:
            strangers = ", ".join(name for name in members(record.plan) if name not in self.spec.boxes)
            self._event("plan-retired", f"epoch {record.epoch}: {strangers} not in the pipeline any more")
        for record in (*found.foreign, *found.retired):
            store.epoch_state(self.spec.name, record.epoch, "retired")
        if found.serving is not None:
            self.serving = Serving(found.serving, committed_at=now)
        if found.draining is not None:
            self._drain(found.draining, now)
        self._numbers.restore(max([reserved, *(record.epoch for record in kept)]))
        await store.commit()

    def observe(self, register: Register) -> None:
        """A stage knows these epochs: none of them is ever given out again."""
        self._numbers.seen(max(register.committed_epoch, register.prepared_epoch, register.serving_epoch))

    def catch_up(self, box: BoxState, register: Register) -> None:
        """Recovery scan: tell a stage that has just registered what it has missed."""
        serving, switch = self.serving, self.switch
        known = max(self.epoch, register.committed_epoch)
        if switch is not None and box.name in switch.voters:
            switch.votes.pop(box.name, None)
            self._prepare(switch, box)
        elif register.prepared_epoch > known:
            reason = f"epoch {register.prepared_epoch} was never committed"
            self._post(box, FrameType.ABORT, Abort(register.prepared_epoch, reason), register.prepared_epoch)
        if serving is None:
            return
        if box.name in members(serving.record.plan):
            if register.committed_epoch < self.epoch == register.prepared_epoch:
                self._post(box, FrameType.COMMIT, Commit(self.epoch), self.epoch)
            elif register.serving_epoch == self.epoch:
                serving.confirmed.add(box.name)
            else:
                self.fenced_by.add(box.name)  # whatever it was that stopped its ring, nothing starts this one again
        last_live = self.draining.record.epoch if self.draining else self.epoch
        if 0 < register.serving_epoch < last_live:
            self._post(box, FrameType.RETIRE, Retire(last_live - 1, "a later plan serves"), last_live - 1)

    # -- prepare ------------------------------------------------------------------------------------------------------

    def start(self, plan: PipelinePlan, reason: str, phases: Phases, *, planned: bool) -> None:
        """Send PREPARE to the members of a plan; whatever switch was under way has been aborted."""
        context, now = self._context, self._context.clock.now()
        record = EpochRecord(self._numbers.take(), plan, "preparing", planned)
        context.store.epoch(self.spec.name, record)  # reserved durably before, so nobody waits for this write
        switch = Switch(record, reason, now, now + context.config.timing.prepare_seconds, phases)
        self.switch = switch
        for name in switch.voters:
            self._prepare(switch, context.boxes[name])
        context.metrics.phases.labels("plan").observe(phases.ended("plan", context.clock.now()))
        kind = "planned" if planned else "unplanned"
        self._event("plan-preparing", f"epoch {record.epoch}, {kind}, {reason}: {describe(plan)}")

    def abort(self, reason: str) -> None:
        """Give the switch under way up."""
        switch, self.switch = self.switch, None
        if switch is None:
            return
        epoch = switch.record.epoch
        self._context.store.epoch_state(self.spec.name, epoch, "aborted")
        self._reports.forget_epoch(epoch)
        for name in switch.voters:
            self._post(self._context.boxes[name], FrameType.ABORT, Abort(epoch, reason[:500]), epoch)
        if switch.record.planned and switch.failed:
            timing, doubled = self._context.config.timing, 2 ** min(self._failures, MOST_DOUBLINGS)
            self.improve_after = self._context.clock.now() + min(
                timing.prepare_seconds * doubled, max(timing.prepare_seconds, timing.hold_down_max_seconds)
            )
            self._failures += 1
        self._event("plan-aborted", f"epoch {epoch}: {reason}")

    def vote(self, box: BoxState, vote: Vote) -> None:
        """A vote came in."""
        switch = self.switch
        if switch is None or vote.epoch != switch.record.epoch or box.name not in switch.voters:
            if not vote.yes and 0 < vote.epoch == self.epoch and box.name in members(self.plan):
                self.fenced_by.add(box.name)  # so it answers a COMMIT of which its log knows nothing
            elif vote.yes and vote.epoch == self.epoch:  # it prepared before its link broke, and votes again
                self._post(box, FrameType.COMMIT, Commit(self.epoch), self.epoch)
            elif vote.yes and vote.epoch > self.epoch:
                self._post(box, FrameType.ABORT, Abort(vote.epoch, "it was given up"), vote.epoch)
        elif vote.yes:
            switch.votes[box.name] = vote
        else:
            self._refused(switch, box, vote)

    def check_votes(self, now: float) -> None:
        """Give up on voters that do not answer in time."""
        switch = self.switch
        if switch is None or switch.failed or now < switch.deadline or not switch.waiting_for:
            return
        seconds = self._context.config.timing.prepare_seconds
        switch.failed = f"no vote from {', '.join(switch.waiting_for)} within {seconds:g} s"
        for name in switch.waiting_for:
            self._unfit(switch, self._context.boxes[name], "it did not get ready in time")

    def _refused(self, switch: Switch, box: BoxState, vote: Vote) -> None:
        switch.failed = f"{box.name} votes no: {vote.reason}"
        stage, timing = switch.record.plan.stage_of(box.name), self._context.config.timing
        if not vote.missing_bytes or stage is None or math.isinf(box.cost.usable_bytes):
            self._unfit(switch, box, vote.reason)
            return
        own = self.plan.stage_of(box.name) if self.plan and switch.record.planned else None
        box.short_bytes += short_bytes(self.spec, stage, own, int(box.cost.usable_bytes), vote.missing_bytes)
        box.short_until = self._context.clock.now() + timing.hold_down_seconds

    def _unfit(self, switch: Switch, box: BoxState, reason: str) -> None:
        """It can't get ready: plans go without it for a while, unless it serves well now and this was a planned one."""
        if not (switch.record.planned and box.name in members(self.plan)):
            box.unfit = reason or "it refused a plan"
            box.hold_down.died(self._context.clock.now())
            self._context.keep(box)

    def _prepare(self, switch: Switch, box: BoxState) -> None:
        record, boxes = switch.record, self._context.boxes
        addresses = {name: boxes[name].address for name in switch.voters}
        message = Prepare(self.spec.name, record.epoch, record.plan, addresses, record.planned)
        self._post(box, FrameType.PREPARE, message, record.epoch)

    # -- commit -------------------------------------------------------------------------------------------------------

    async def commit(self, switch: Switch) -> bool:
        """Write the decision down and deliver it; the caller sends the routes in the same turn of the loop.

        Returns:
            Whether it is committed; False: the disk refused it, and the switch has failed.
        """
        context, name, record = self._context, self.spec.name, replace(switch.record, state="committed")
        now = context.clock.now()
        context.metrics.phases.labels("prepare").observe(switch.phases.ended("prepare", now))
        context.store.epoch(name, record)
        before = self.serving.record if self.serving else None
        if before is not None and not record.planned:
            context.store.epoch_state(name, before.epoch, "retired")
        self._numbers.reserve()
        switch.committing = True
        try:
            await context.store.commit()
        except StoreError as error:
            switch.committing, switch.failed = False, str(error)
            context.store.epoch(name, switch.record)  # as it was; what serves is live as before
            if before is not None:
                context.store.epoch(name, before)
            return False
        now = context.clock.now()
        context.metrics.phases.labels("commit").observe(switch.phases.ended("commit", now))
        self.switch, self._failures = None, 0
        self.fenced_by.clear()
        if before is not None and not record.planned:
            self.calm_after = now + context.config.timing.settle_seconds
        self.serving = Serving(
            record, now, repeat_at=now + COMMIT_AGAIN_SECONDS, phases=switch.phases, reason=switch.reason
        )
        for box in (context.boxes[each] for each in switch.voters):
            self._post(box, FrameType.COMMIT, Commit(record.epoch), record.epoch)
            if box.condemned_at < switch.began:  # taken back; who died after that is still lost
                box.condemned, box.doomed = "", ""
        self._end_before(before, switch, now)
        context.metrics.switches.labels(name, "planned" if record.planned else "unplanned").inc()
        self._event(
            "plan-committed", f"epoch {record.epoch}: {describe(record.plan)}", dict(switch.phases.milliseconds)
        )
        return True

    def _end_before(self, before: EpochRecord | None, switch: Switch, now: float) -> None:
        """What becomes of the epoch that served until now."""
        self.retire_draining("a later plan serves")
        if before is not None and switch.record.planned:
            self._drain(before, now)
            if self._cramped(before.plan, switch.record.plan):
                self.retire_draining("memory does not hold the caches of two plans; what is open moves")
            return
        self._reports.forget_before(switch.record.epoch)
        for name in self.spec.boxes:
            if name not in switch.voters:
                self._retire(self._context.boxes[name], switch.record.epoch - 1, switch.reason)
        if before is not None:
            self._event("plan-retired", f"epoch {before.epoch}: {switch.reason}")

    def _cramped(self, old: PipelinePlan, new: PipelinePlan) -> bool:
        """Whether a box of the new plan can't have both plans' caches full at once."""
        costs = {name: self._context.boxes[name].cost for name in self.spec.boxes}
        return same_model(self.spec, old) and bool(transition_missing(self.spec, old, new, costs))

    def committed(self, box: BoxState, epoch: int) -> None:
        """COMMITTED came."""
        if self.serving is not None and epoch == self.epoch:
            self.serving.confirmed.add(box.name)

    def repeat(self, now: float) -> None:
        """Deliver the commit again to members that have not confirmed it."""
        serving = self.serving
        if serving is None or now < serving.repeat_at:
            return
        serving.repeat_at = now + COMMIT_AGAIN_SECONDS
        for name in members(serving.record.plan):
            if name not in serving.confirmed and not (box := self._context.boxes[name]).condemned:
                self._post(box, FrameType.COMMIT, Commit(self.epoch), self.epoch)

    # -- the end of an epoch ------------------------------------------------------------------------------------------

    def _drain(self, record: EpochRecord, now: float) -> None:
        timing = self._context.config.timing
        self.draining = Draining(record, now + timing.switch_drain_seconds, now + timing.dial_seconds)

    def check_drained(self, now: float) -> None:
        """Retire the epoch before once every gateway has drained it, time is up, or its ring is broken anyway."""
        draining, gateways = self.draining, self._context.gateways
        if draining is None:
            return
        lost = [name for name in members(draining.record.plan) if self._context.boxes[name].condemned]
        epoch = draining.record.epoch
        if lost:
            self.retire_draining(f"{', '.join(lost)} lost")
        elif gateways and all(each.drained.get(self.spec.name, 0) >= epoch for each in gateways):
            self.retire_draining("nothing is open under it")
        elif now >= draining.deadline:
            self.retire_draining("time is up; what is open moves")
        elif not gateways and now >= draining.lonely_until:
            self.retire_draining("no gateway is connected")

    def retire_draining(self, reason: str) -> None:
        """End the epoch before the one that serves, at every stage that may know it."""
        draining, self.draining = self.draining, None
        if draining is None:
            return
        epoch = draining.record.epoch
        self._context.store.epoch_state(self.spec.name, epoch, "retired")
        for name in self.spec.boxes:
            self._retire(self._context.boxes[name], epoch, reason)
        self._reports.forget_before(epoch + 1)
        self._event("plan-retired", f"epoch {epoch}: {reason}")

    def let_go(self, box: BoxState, reason: str) -> None:
        """A leaving box need not wait any longer."""
        box.let_go = True
        self._retire(box, self.epoch, reason)

    def _retire(self, box: BoxState, epoch: int, reason: str) -> None:
        if box.leaving and box.name not in members(self.plan):
            box.let_go = True
        self._post(box, FrameType.RETIRE, Retire(epoch, reason[:500]), epoch)

    # -- small things -------------------------------------------------------------------------------------------------

    def _post(self, box: BoxState, kind: FrameType, message: Any, epoch: int) -> None:
        if box.peer is not None:
            box.peer.post(kind, message, epoch)

    def _event(self, kind: str, text: str, milliseconds: dict[str, int] | None = None) -> None:
        self._context.event(kind, text, pipeline=self.spec.name, milliseconds=milliseconds)


def describe(plan: PipelinePlan) -> str:
    """A plan in one line, layers inclusive as people count them: `box1 0-9, box2 10-19`."""
    return ", ".join(f"{stage.box} {stage.start}-{stage.end - 1}" for stage in plan.stages)
