"""One pipeline: takes evidence in, judges its boxes, decides, and drives the switch. One task owns every decision."""

from __future__ import annotations

import asyncio
from typing import NoReturn

from fleet.coordinator.context import Context
from fleet.coordinator.decide import (
    Action,
    GiveUp,
    LetGo,
    Planned,
    Refuse,
    Situation,
    Start,
    Wanted,
    available,
    conclude,
    want,
)
from fleet.coordinator.judge import Thresholds
from fleet.coordinator.judging import Judging
from fleet.coordinator.leases import Leases
from fleet.coordinator.orders import Orders
from fleet.coordinator.planner import Planner
from fleet.coordinator.reports import Reports
from fleet.coordinator.routes import route_of
from fleet.coordinator.situation import situation_of
from fleet.coordinator.standing import note_states
from fleet.coordinator.state import BoxState, GatewayState, Phases, members
from fleet.coordinator.switching import Switching
from fleet.planning.spec import PipelineSpec, Refusal
from stage_runtime.link.frames import FrameType
from stage_runtime.link.membership import Heartbeat, LinkReport, Register, Route, Standby, Vote
from stage_runtime.link.tasks import until_first_ends


class Pipeline:
    """One pipeline.

    Attributes:
        switching: its epochs. planner: its plans. orders: takes what operators want. leases: and what guards ask for.
        refusal: why no plan fits; None while one does. route: what gateways were told last.
    """

    def __init__(self, spec: PipelineSpec, context: Context) -> None:
        timing = context.config.timing
        self.spec = spec
        self.reports = Reports()
        self.switching = Switching(spec, context, self.reports)
        self.planner = Planner(spec)
        self.refusal: Refusal | None = None
        self.route: Route | None = None
        self._context = context
        self._first_seen_at: float | None = None  # by this coordinator, or since no box was seen
        thresholds = Thresholds(
            timing.hung_seconds, timing.ring_trouble_seconds, timing.redial_seconds, timing.dial_seconds
        )
        self._judging = Judging(context, spec, self.switching, self.reports, thresholds)
        self._changed = asyncio.Event()
        self.orders = Orders(self.switching, self.planner, context, self._look, self._changed.set, leased=self._leased)
        self.leases = Leases(self.switching, context, self.orders, self._look)
        self._outlook_wanted = asyncio.Event()
        self._outlook_of: tuple[int, frozenset[str]] = (0, frozenset())
        self._failing_since: float | None = None  # detection of the loss that is being mended

    async def run(self) -> None:
        """Judge, decide and act until cancelled."""
        await until_first_ends(self._drive(), self._look_ahead())

    # -- evidence -----------------------------------------------------------------------------------------------------

    def measured(self, box: BoxState, register: Register) -> None:
        """A stage that is registered says REGISTER again, with newer measurements."""
        self._judging.measured(box, register)
        self._changed.set()

    def registered(self, box: BoxState, register: Register) -> None:
        """A stage has registered on a new link, which is `box.peer` now."""
        self._judging.registered(box, register)
        if self._first_seen_at is None:
            self._first_seen_at = self._context.clock.now()
        self.switching.observe(register)
        self.switching.catch_up(box, register)
        self._post_standby(box)
        self._changed.set()

    def lost(self, box: BoxState, silent_seconds: float) -> None:
        """Its link has ended, after so long a silence (0: it was closed)."""
        self._judging.lost(box, silent_seconds)
        if not any(self._context.boxes[name].peer for name in self.spec.boxes):
            self._first_seen_at = None  # the whole site lost power: the first box to be back waits for the others
        self._changed.set()

    def heartbeat(self, box: BoxState, heartbeat: Heartbeat) -> None:
        """A pulse; it is looked at at once where it may change something."""
        last = box.heartbeat
        self._judging.heartbeat(box, heartbeat)
        if last is None or (last.state, last.epoch) != (heartbeat.state, heartbeat.epoch):
            self._changed.set()

    def link_report(self, box: BoxState, report: LinkReport) -> None:
        """What a stage sees of a neighbour; only boxes and epochs of this pipeline count."""
        switch, draining = self.switching.switch, self.switching.draining
        epochs = {self.switching.epoch, switch.record.epoch if switch else 0, draining.record.epoch if draining else 0}
        if report.box in self.spec.boxes and report.epoch in epochs:
            self.reports.add(box.name, report, self._context.clock.now())
            self._changed.set()

    def vote(self, box: BoxState, vote: Vote) -> None:
        """A vote."""
        self.switching.vote(box, vote)
        self._changed.set()

    def committed(self, box: BoxState, epoch: int) -> None:
        """The stage has the commit in its log."""
        self.switching.committed(box, epoch)

    def leaving(self, box: BoxState, reason: str) -> None:
        """The stage was told to stop."""
        box.leaving = reason or "it was told to stop"
        self._changed.set()

    def drained(self, gateway: GatewayState, epoch: int) -> None:
        """A gateway has nothing open up to this epoch."""
        gateway.drained[self.spec.name] = max(epoch, gateway.drained.get(self.spec.name, 0))
        self._changed.set()

    def gateway_joined(self, gateway: GatewayState) -> None:
        """Tell it where requests go."""
        route = self.route or self._route()
        gateway.peer.post(FrameType.ROUTE, route, route.epoch)

    # -- the driver ---------------------------------------------------------------------------------------------------

    async def _drive(self) -> NoReturn:
        while True:
            self._changed.clear()
            while await self._step():
                pass
            later = asyncio.get_running_loop().call_later(self._context.tick_seconds, self._changed.set)
            try:
                await self._changed.wait()
            finally:
                later.cancel()

    async def _step(self) -> bool:
        """Look at everything once; True if something happened meanwhile and it should look again."""
        now, switching = self._context.clock.now(), self.switching
        self._judging.judge_all(now)
        switching.check_votes(now)
        self.leases.check()
        self._send_route()
        switch = switching.switch
        if switch is not None and not switch.failed and not switch.waiting_for:
            if await switching.commit(switch):
                self.refusal, self._failing_since = None, None
            self._send_route()
            return True
        situation = self._look()
        self._want_outlook(situation)
        wanted = want(situation)
        if isinstance(wanted, GiveUp):
            switching.abort(wanted.reason)
            return True
        if wanted is not None:
            answered = await self._answers(wanted)
            if answered is None or await self._act(conclude(situation, wanted, *answered), now):
                return True
        switching.check_drained(now)
        switching.repeat(now)
        self._let_spares_go()
        self._check_ring(now)
        self._send_route()
        note_states((self._context.boxes[name] for name in self.spec.boxes), switching, self._context)
        return False

    def _look(self) -> Situation:
        """The situation now, with the planner up to date for questions about it."""
        now = self._context.clock.now()
        if self._use_costs(now):
            self._outlook_wanted.set()
        return self._situation(now)

    def _leased(self) -> str:
        return self.leases.held.box if self.leases.held is not None else ""

    def _use_costs(self, now: float) -> bool:
        for box in (self._context.boxes[name] for name in self.spec.boxes):
            if box.short_bytes and now >= box.short_until:
                box.short_bytes = 0  # whatever took the memory may have gone: ask it again
        costs = {name: self._context.boxes[name].cost for name in self.spec.boxes}
        return self.planner.use(costs, self.switching.plan)

    async def _answers(self, wanted: Wanted) -> tuple[Planned, Planned] | None:
        """The planner's answers if they are known; else they are worked out, and the situation is to be seen anew."""
        answers: list[Planned] = []
        for alive in (wanted.alive, wanted.last_resort):
            if not self.planner.known(wanted.how, alive):
                await self.planner.think(wanted.how, alive)
                return None
            answers.append(self.planner.answer(wanted.how, alive))
            if not isinstance(answers[-1], Refusal):
                break
        return answers[0], answers[-1]

    async def _act(self, action: Action, now: float) -> bool:
        """Do it; True if a switch began."""
        if isinstance(action, Start):
            if not await self._context.store.works():
                return False  # its commit could not be written down; what serves is left alone meanwhile
            phases = Phases(now)
            if not action.planned and self._failing_since is None:
                self._failing_since = self._judging.detected_since(now)
                seconds = now - self._failing_since
                phases.milliseconds["detect"] = round(seconds * 1000)
                self._context.metrics.phases.labels("detect").observe(seconds)
            self.switching.start(action.plan, action.reason, phases, planned=action.planned)
            return True
        if isinstance(action, Refuse):
            if self.refusal != action.refusal:
                self.refusal = action.refusal
                text = f"{action.reason}: {action.refusal.reason}"
                self._context.event("plan-refused", text, pipeline=self.spec.name)
            return False
        if isinstance(action, LetGo):
            for box in (self._context.boxes[name] for name in action.boxes):
                if not box.let_go:
                    self.switching.let_go(box, f"no plan fits without it: {action.refusal.reason}")
        return False

    def _situation(self, now: float) -> Situation:
        return situation_of(self.spec, self.switching, self._context, self._first_seen_at, now)

    def _let_spares_go(self) -> None:
        """A box that leaves and holds nothing need not wait."""
        switching = self.switching
        held = {*members(switching.plan), *(switching.switch.voters if switching.switch else ())}
        held |= set(members(switching.draining.record.plan)) if switching.draining else set()
        for box in (self._context.boxes[name] for name in self.spec.boxes):
            if box.leaving and not box.let_go and box.peer is not None and box.name not in held:
                switching.let_go(box, "no plan needs it")

    def _check_ring(self, now: float) -> None:
        """The ring of a new plan is ready: the switch is over for its users."""
        serving = self.switching.serving
        if serving is None or serving.phases is None:
            return
        heartbeat = self._context.boxes[serving.record.plan.stages[0].box].heartbeat
        if heartbeat is not None and heartbeat.epoch == serving.record.epoch and heartbeat.state == "ready":
            phases, serving.phases = serving.phases, None
            self._context.metrics.phases.labels("ring").observe(phases.ended("ring", now))
            text = f"epoch {serving.record.epoch} is ready, after: {serving.reason}"
            self._context.event("plan-serving", text, pipeline=self.spec.name, milliseconds=phases.milliseconds)

    # -- routes and standby -------------------------------------------------------------------------------------------

    def _route(self) -> Route:
        return route_of(self.spec, self.switching, self.refusal, self._context.boxes)

    def _send_route(self) -> None:
        """Tell the gateways, if anything changed; and the metrics."""
        metrics, name = self._context.metrics, self.spec.name
        if (route := self._route()) == self.route:
            return
        self.route = route
        for gateway in self._context.gateways:
            gateway.peer.post(FrameType.ROUTE, route, route.epoch)
        metrics.plan_epoch.labels(name).set(self.switching.epoch)
        metrics.serving.labels(name).set(int(route.state == "serving"))
        metrics.refused.labels(name).set(int(route.state == "refused"))
        missing = self.refusal.missing_bytes if self.refusal else {}
        for box in self.spec.boxes:
            metrics.missing_bytes.labels(box).set(missing.get(box, 0))

    def _want_outlook(self, situation: Situation) -> None:
        seen = (self.switching.epoch, available(situation))
        if seen != self._outlook_of:
            self._outlook_of = seen
            self._outlook_wanted.set()

    async def _look_ahead(self) -> NoReturn:
        """Work out every single loss beforehand, and tell the boxes what to keep ready for it."""
        while True:
            await self._outlook_wanted.wait()
            self._outlook_wanted.clear()
            await self.planner.look_ahead(self._outlook_of[1])
            for name in self.spec.boxes:
                self._post_standby(self._context.boxes[name])

    def _post_standby(self, box: BoxState) -> None:
        holding = self.planner.outlook.standby.get(box.name)
        if holding is not None and box.peer is not None:
            message = Standby(holding.layers, holding.head, holding.embedding)
            box.peer.post(FrameType.STANDBY, message, self.switching.epoch)
