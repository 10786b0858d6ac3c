"""Leases: a box asks to be taken out of its pipeline for a restart. One box of a pipeline at a time, and only while all
others serve and can do without it. A lease is durable: a coordinator that restarts knows who is out, or about to go."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass, replace

from fleet.coordinator.context import Context
from fleet.coordinator.database import StoreError
from fleet.coordinator.decide import Situation
from fleet.coordinator.orders import DrainRefused, Orders
from fleet.coordinator.state import BoxState, members
from fleet.coordinator.switching import Switching

ID_BYTES = 8
# A drain, an import of torch and a load from a slow card; whoever needs longer asks again.
LONGEST_SECONDS = 3600.0


class LeaseRefused(Exception):
    """Not now; the message says why."""


@dataclass(frozen=True)
class Lease:
    """Held by a box until it gives it back, or the awake clock says `until`."""

    id: str
    box: str
    until: float


class Leases:
    """Of a pipeline.

    Args:
        orders: takes turns with them, and knows whether the others can do without a box.
        look: the situation now.

    Attributes:
        held: the lease that holds; None: nobody has one.
    """

    def __init__(self, switching: Switching, context: Context, orders: Orders, look: Callable[[], Situation]) -> None:
        self._switching, self._context, self._orders, self._look = switching, context, orders, look
        self._boxes = [context.boxes[name] for name in switching.spec.boxes]
        self.held: Lease | None = None
        for box in self._boxes:
            if box.record.lease:  # how much of it had passed was not written: it begins anew
                self.held = Lease(box.record.lease, box.name, context.clock.now() + box.record.lease_seconds)

    async def take(self, box: BoxState, because: str, seconds: float) -> Lease:
        """A lease for a box, durable when this returns; one that it holds already begins anew.

        Args:
            seconds: it ends after so many at the latest, at most `LONGEST_SECONDS`.

        Raises:
            LeaseRefused: another box has one, or the pipeline is not whole without counting on this box.
            StoreError: it can't be written down.
        """
        async with self._orders.turn:
            self.check()
            again = self.held is not None and self.held.box == box.name
            if self.held is not None and not again:
                raise LeaseRefused(f"{self.held.box} has the lease")
            self._check_whole(box, again=again)
            if box.name in members(self._switching.plan):
                try:
                    await self._orders.check_rest(box)
                except DrainRefused as error:
                    raise LeaseRefused(error.refusal.reason) from None
                self._check_whole(box, again=again)  # the plan without it took time to be worked out
            return await self._give(box, because, seconds)

    def give_back(self, box: BoxState, lease_id: str) -> bool:
        """Whether the box held this lease; it does not any more."""
        self.check()
        if self.held is None or (self.held.box, self.held.id) != (box.name, lease_id):
            return False
        self._end("lease-returned", "given back")
        return True

    def check(self) -> None:
        """End a lease whose time has passed."""
        if self.held is not None and self._context.clock.now() >= self.held.until:
            self._end("lease-ended", "not given back in time")

    async def _give(self, box: BoxState, because: str, seconds: float) -> Lease:
        before, held = box.record, self.held
        lease_id = held.id if held else secrets.token_hex(ID_BYTES)
        store = self._context.store
        if not await store.works():
            raise StoreError(store.refused)
        box.record = replace(box.record, lease=lease_id, lease_seconds=seconds)
        self._context.keep(box)
        self.held = lease = Lease(lease_id, box.name, self._context.clock.now() + seconds)
        try:
            await store.commit()
        except StoreError:
            if self.held is lease:
                box.record = replace(box.record, lease=before.lease, lease_seconds=before.lease_seconds)
                self._context.keep(box)
                self.held = held  # who asked hears that it has none
            raise
        if held is None:
            self._event("lease-taken", box.name, f"{box.name}: for {seconds:g} s at most: {because}")
        return lease

    def _end(self, kind: str, text: str) -> None:
        assert self.held is not None  # noqa: S101 - for the type checker: callers looked
        box, self.held = self._context.boxes[self.held.box], None
        box.record = replace(box.record, lease="", lease_seconds=0.0)
        self._context.keep(box)
        self._event(kind, box.name, f"{box.name}: {text}")

    def _check_whole(self, box: BoxState, *, again: bool) -> None:
        """Whether all others of the pipeline serve and nothing is under way; LeaseRefused if not.

        Args:
            again: the box has the lease: a switch or drain that takes it out is what the lease is for.
        """
        switching, name = self._switching, self._switching.spec.name
        switch, serving = switching.switch, members(switching.plan)
        views = self._look().boxes
        if switching.serving is None:
            raise LeaseRefused(f"pipeline {name} has no plan yet")
        lost = [each for each in serving if views[each].condemned]
        if lost or switching.fenced or (switch is not None and not switch.record.planned):
            raise LeaseRefused(f"pipeline {name} is replanning")
        if not again and (switch is not None or switching.draining is not None):
            raise LeaseRefused(f"pipeline {name} is in a switch")
        now, patience = self._context.clock.now(), self._context.config.timing.prepare_seconds
        for each in (each for each in self._boxes if each is not box):
            view = views[each.name]
            if each.name in serving and not view.well:
                raise LeaseRefused(f"{each.name} serves, and is not heard")
            if view.expected:
                raise LeaseRefused(f"{each.name} is away, and is waited for")
            if each.channel == "never" and not view.drained and now - each.channel_since < patience:
                raise LeaseRefused(f"{each.name} has not been heard since the coordinator started")

    def _event(self, kind: str, box: str, text: str) -> None:
        self._context.event(kind, text, pipeline=self._switching.spec.name, box=box)
