"""What operators order of a pipeline: boxes are drained and undrained, durably, one order after the other."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace

from fleet.coordinator.context import Context
from fleet.coordinator.database import StoreError
from fleet.coordinator.decide import Situation
from fleet.coordinator.planner import Planner
from fleet.coordinator.standing import box_state
from fleet.coordinator.state import BoxState, members
from fleet.coordinator.switching import Switching
from fleet.planning.spec import Refusal


class DrainRefused(Exception):
    """No plan fits without the box."""

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(refusal.reason)
        self.refusal = refusal


class Orders:
    """Takes orders; the pipeline's own driver does what follows from them.

    Args:
        switching, planner, context: of the pipeline.
        look: the situation now, with the planner up to date.
        changed: called when there is something to do.
        leased: box that has a lease, so that it may go at any moment; empty: none has.

    Attributes:
        turn: held while an order is taken: of two at once, the second must know of the first.
    """

    def __init__(
        self,
        switching: Switching,
        planner: Planner,
        context: Context,
        look: Callable[[], Situation],
        changed: Callable[[], None],
        *,
        leased: Callable[[], str],
    ) -> None:
        self._spec = switching.spec
        self._switching = switching
        self._planner = planner
        self._context = context
        self._look = look
        self._changed = changed
        self._leased = leased
        self.turn = asyncio.Lock()

    async def drain(self, box: BoxState) -> None:
        """An operator wants nothing on a box; durable when this returns.

        Raises:
            DrainRefused: no plan fits without it.
            StoreError: it can't be written down.
        """
        async with self.turn:
            if box.name in members(self._switching.plan) and not box.record.drained:
                await self.check_rest(box)
            await self._set_drained(box, "drain-requested", drained=True)

    async def undrain(self, box: BoxState) -> None:
        """The box may be used again; durable when this returns.

        Raises:
            StoreError: it can't be written down.
        """
        async with self.turn:
            await self._set_drained(box, "undrain-requested", drained=False)

    async def check_rest(self, box: BoxState) -> None:
        """Whether the others can do without a box; DrainRefused if not. Called with the turn held."""
        views = self._look().boxes
        leased = self._leased()
        alive = frozenset(name for name, view in views.items() if view.usable and name not in (box.name, leased))
        note = f"; {leased} has a lease for a restart" if leased not in ("", box.name) else ""
        if not alive:
            others = [self._context.boxes[name] for name in self._spec.boxes if name != box.name]
            states = {other.name: box_state(other, self._switching, self._context)[0] for other in others}
            why = ", ".join(f"{name} is {state}" for name, state in states.items())
            reason = f"pipeline {self._spec.name}: no other box can take over" + (f": {why}" if why else "")
            raise DrainRefused(Refusal({}, reason + note))
        answer = await self._planner.think("merge", alive)
        if isinstance(answer, Refusal):
            raise DrainRefused(replace(answer, reason=answer.reason + note))

    async def _set_drained(self, box: BoxState, kind: str, *, drained: bool) -> None:
        store = self._context.store
        if not await store.works():
            raise StoreError(store.refused)
        before = box.record.drained
        if before != drained:
            box.record = replace(box.record, drained=drained)
            self._context.keep(box)
            self._context.event(kind, f"{box.name}: asked by the operator", pipeline=self._spec.name, box=box.name)
            self._changed()
        try:
            await store.commit()
        except StoreError:
            box.record = replace(box.record, drained=before)  # who asked hears that it is not so
            self._context.keep(box)
            raise
