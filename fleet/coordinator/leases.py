"""Leases: a box asks to be taken out of its pipeline for a restart. One box of a pipeline at a time, and only while the
others serve and can do without it. Kept in memory alone: after a restart of the coordinator, the box that is out keeps
others from getting one, as whoever is away or comes back does anyhow."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass

from fleet.coordinator.context import Context
from fleet.coordinator.decide import Situation
from fleet.coordinator.orders import DrainRefused, Orders
from fleet.coordinator.routes import pipeline_state
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
    """

    def __init__(self, switching: Switching, context: Context, orders: Orders, look: Callable[[], Situation]) -> None:
        self._switching, self._context, self._orders, self._look = switching, context, orders, look
        self._held: Lease | None = None

    async def take(self, box: BoxState, because: str, seconds: float) -> Lease:
        """A lease for a box; one that it holds already begins anew.

        Raises:
            LeaseRefused: another box has one, is away or comes back, or the others can't do without this one.
        """
        async with self._orders.turn:
            if (held := self.held) is not None and held.box != box.name:
                raise LeaseRefused(f"{held.box} has the lease")
            self._check_calm(box)
            if box.name in members(self._switching.plan):
                try:
                    await self._orders.check_rest(box)
                except DrainRefused as error:
                    raise LeaseRefused(error.refusal.reason) from None
            now = self._context.clock.now()
            again = held is not None
            self._held = Lease(held.id if held else secrets.token_hex(ID_BYTES), box.name, now + seconds)
            if not again:
                self._event("lease-taken", box.name, f"{box.name}: for {seconds:g} s at most: {because}")
            return self._held

    def give_back(self, box: BoxState, lease_id: str) -> bool:
        """Whether the box held this lease; it does not any more."""
        held = self.held
        if held is None or (held.box, held.id) != (box.name, lease_id):
            return False
        self._held = None
        self._event("lease-returned", box.name, f"{box.name}: given back")
        return True

    @property
    def held(self) -> Lease | None:
        """The lease that holds now."""
        held = self._held
        if held is not None and self._context.clock.now() >= held.until:
            self._held = None
            self._event("lease-ended", held.box, f"{held.box}: not given back in time")
        return self._held

    def _check_calm(self, box: BoxState) -> None:
        """Whether everyone else of the pipeline serves and nothing is under way; LeaseRefused if not."""
        switching = self._switching
        state, reason = pipeline_state(switching.spec, switching, None, self._context.boxes)
        if state == "replanning":
            raise LeaseRefused(f"pipeline {switching.spec.name} is replanning: {reason}")
        if switching.switch is not None or switching.draining is not None:
            raise LeaseRefused(f"pipeline {switching.spec.name} is in a switch")
        for name, view in self._look().boxes.items():
            if name != box.name and view.expected:
                raise LeaseRefused(f"{name} is away, and is waited for")

    def _event(self, kind: str, box: str, text: str) -> None:
        self._context.event(kind, text, pipeline=self._switching.spec.name, box=box)
