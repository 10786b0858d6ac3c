"""Keeps the evidence on a pipeline's boxes, and what follows from a verdict: condemned, held down, taken back."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from typing import Literal

from fleet.coordinator.context import Context
from fleet.coordinator.judge import Thresholds, Verdict, judge, ring_trouble
from fleet.coordinator.reports import Reports, evidence_of
from fleet.coordinator.state import BoxState, members
from fleet.coordinator.switching import Switching
from fleet.planning.spec import PipelineSpec
from stage_runtime.link.membership import Heartbeat, Register


class Judging:
    """Verdicts on the boxes of one pipeline."""

    def __init__(
        self, context: Context, spec: PipelineSpec, switching: Switching, reports: Reports, thresholds: Thresholds
    ) -> None:
        self._context = context
        self._spec = spec
        self._switching = switching
        self._reports = reports
        self._thresholds = thresholds
        self._boxes = [context.boxes[name] for name in spec.boxes]
        self._trouble_before: Counter[str] = Counter()  # box → its part in trouble of rings, of which the last was at
        self._trouble_at = -math.inf
        self._beats = {name: context.metrics.heartbeats.labels(name) for name in spec.boxes}

    # -- what comes in ------------------------------------------------------------------------------------------------

    def measured(self, box: BoxState, register: Register) -> None:
        """Memory and seconds of a box, as its stage measured them; what it has not measured stays as it was."""
        record = replace(
            box.record,
            memory_bytes=register.memory_total_bytes or box.record.memory_bytes,
            layer_seconds=register.layer_seconds or box.record.layer_seconds,
            head_seconds=register.head_seconds or box.record.head_seconds,
        )
        if record != box.record:
            box.record = record
            self._context.keep(box)

    def registered(self, box: BoxState, register: Register) -> None:
        """A new link of a box: the same process again, or a new one, which has lost what the last one held."""
        now, record = self._context.clock.now(), box.record
        assert box.peer is not None  # noqa: S101 - the membership sets it before
        restarted = bool(record.process_id) and register.process_id != record.process_id
        if record.address and record.address != box.peer.address:
            self._event("box-moved", box, f"{box.name}: was at {record.address}, is at {box.peer.address}")
        if restarted or not box.known or box.doomed:
            self._event("box-joined", box, f"{box.name}: incarnation {register.incarnation}, at {box.peer.address}")
        if restarted:
            self._restarted(box, register, now)
        box.record = replace(
            box.record,
            incarnation=register.incarnation,
            process_id=register.process_id,
            address=box.peer.address,
        )
        self.measured(box, register)
        self._context.keep(box)
        box.known, box.ring_port = True, register.ring_port
        box.channel, box.channel_since = "open", now
        box.heartbeat, box.heard_at, box.progressed_at, box.silent_seconds = None, now, now, 0.0
        self._context.clocks.forget(box.name)

    def lost(self, box: BoxState, silent_seconds: float) -> None:
        """The link of a box has ended."""
        now = self._context.clock.now()
        box.peer, box.channel, box.channel_since, box.silent_seconds = None, "lost", now, silent_seconds
        self._context.clocks.forget(box.name)
        if box.leaving and not box.condemned:
            self._condemn(box, "dead", "it stopped, as it was told", now)

    def heartbeat(self, box: BoxState, heartbeat: Heartbeat) -> None:
        """A pulse."""
        now, last = self._context.clock.now(), box.heartbeat
        if last is None or heartbeat.progress != last.progress or heartbeat.working_seconds == 0:
            box.progressed_at = now
        box.heartbeat, box.heard_at = heartbeat, now
        self._beats[box.name].inc()
        if heartbeat.wall_unix_seconds is not None:
            self._context.clocks.heard(box.name, heartbeat.wall_unix_seconds)

    # -- verdicts -----------------------------------------------------------------------------------------------------

    def judge_all(self, now: float) -> None:
        """Judge every box that has been seen or is needed."""
        switching = self._switching
        serving = frozenset(members(switching.plan))
        needed = {*serving, *(switching.switch.voters if switching.switch else ())}
        heard = {box.name for box in self._boxes if box.channel == "open"}
        for box in self._boxes:
            if box.channel == "never" and box.name not in needed:
                continue
            said = self._reports.about(box.name, switching.epoch, heard, now)
            witness = len(heard) > (box.name in heard)
            verdict = judge(evidence_of(box, said, witness=witness, now=now), self._thresholds)
            self._apply(box, verdict, now, member=box.name in serving)
        self._leave_out_quitters(now)
        self._leave_out_trouble(now)

    def detected_since(self, now: float) -> float:
        """When the trouble began that the last loss came from, as far as anyone has told."""
        lost = [box for box in self._boxes if box.condemned and box.name in members(self._switching.plan)]
        if not lost:
            return now
        box = max(lost, key=lambda each: each.condemned_at)
        if box.doomed == "hung":
            return box.progressed_at
        told = [self._reports.first_trouble(box.name, self._switching.epoch)]
        told += [box.channel_since - box.silent_seconds] if box.channel == "lost" else []
        return min((at for at in told if at is not None), default=now)

    def _apply(self, box: BoxState, verdict: Verdict, now: float, *, member: bool) -> None:
        verdict = self._if_it_lasts(box, verdict, now)
        before, box.verdict = box.verdict, verdict
        metrics = self._context.metrics
        if verdict.slow and not before.slow:
            metrics.verdicts.labels(box.name, "slow").inc()
            self._event("box-slow", box, f"{box.name}: its steps take far longer than they used to")
        if (before.kind, before.slow) != (verdict.kind, verdict.slow):
            metrics.box_alive.labels(box.name).set(int(verdict.kind == "alive"))
            metrics.box_slow.labels(box.name).set(int(verdict.slow))
        if verdict.kind != "alive":
            box.well_since = None
            if verdict.kind != "waiting" and not box.condemned:
                # of a box that this process has never seen, nobody knows whether it died or the whole site did
                how: Literal["dead", "hung"] = "hung" if verdict.kind == "hung" else "dead"
                self._condemn(box, how, verdict.reason, now, counts=box.known)
            return
        if box.well_since is None:
            box.well_since = now
        if box.condemned and not member:
            box.condemned, box.doomed = "", ""
            if left := box.hold_down.remaining(now):
                self._event("box-held-down", box, f"{box.name}: is back, but held down for {left:.0f} s")
        if box.out and not box.condemned and (member or self._settled(box, now)):
            box.out = False
            self._event("box-returned", box, f"{box.name}: may hold layers again")

    def _if_it_lasts(self, box: BoxState, verdict: Verdict, now: float) -> Verdict:
        """Slow is only who is slow for `hung_seconds` on end: a few long prompts are no defect."""
        if not verdict.slow:
            box.slow_since = None
            return verdict
        box.slow_since = now if box.slow_since is None else box.slow_since
        return replace(verdict, slow=now - box.slow_since >= self._thresholds.hung)

    def _settled(self, box: BoxState, now: float) -> bool:
        long_enough = box.well_since is not None and now - box.well_since >= self._context.config.timing.settle_seconds
        return long_enough and box.hold_down.remaining(now) == 0

    def _restarted(self, box: BoxState, register: Register, now: float) -> None:
        """Another process than the last one: the old one is dead, if nobody has noticed yet."""
        switch = self._switching.switch
        self._reports.forget_box(box.name)
        if switch is not None and box.name in switch.voters:
            switch.failed = switch.failed or f"{box.name} restarted while it prepared"
        member = box.name in members(self._switching.plan)
        if not box.condemned and (box.known or (member and register.serving_epoch != self._switching.epoch)):
            # found at the coordinator's own start, it may as well have been a power cut of the whole site
            self._condemn(box, "dead", "its process restarted", now, counts=box.known)
        box.short_bytes, box.unfit, box.leaving, box.let_go = 0, "", "", False
        box.well_since = None

    def _leave_out_trouble(self, now: float) -> None:
        """The ring can't form although its boxes live: leave one of them out."""
        serving = self._switching.serving
        order = members(self._switching.plan)
        if serving is None or self._switching.switch is not None:
            return
        alive = {box.name for box in self._boxes if box.verdict.kind == "alive" and not box.condemned}
        if not set(order) <= alive:
            return
        reports = self._reports.of_ring(serving.record.epoch, serving.committed_at, now)
        if now - self._trouble_at >= self._context.config.timing.hold_down_forget_seconds:
            self._trouble_before.clear()
        if trouble := ring_trouble(reports, order, alive, self._thresholds, self._trouble_before):
            self._trouble_before.update(trouble.involved)
            self._trouble_at = now
            self._condemn(self._context.boxes[trouble.box], "dead", trouble.reason, now)

    def _leave_out_quitters(self, now: float) -> None:
        """Who gives up the plan that serves gets a new one once; who does it again soon is left out."""
        switching, forget = self._switching, self._context.config.timing.hold_down_forget_seconds
        if switching.switch is not None and not switching.switch.record.planned:
            return  # its PREPARE is what makes members stop the ring that serves
        for box in self._boxes:
            if box.name not in switching.fenced_by or box.gave_up == switching.epoch:
                continue
            if box.gave_up and now - box.gave_up_at < forget and not box.condemned:
                reason = f"it gave up epoch {switching.epoch}, which serves, as it had epoch {box.gave_up}"
                self._condemn(box, "dead", reason, now)
            box.gave_up, box.gave_up_at = switching.epoch, now

    def _condemn(
        self, box: BoxState, how: Literal["dead", "hung"], reason: str, now: float, *, counts: bool = True
    ) -> None:
        box.condemned, box.condemned_at, box.doomed, box.out, box.well_since = reason, now, how, True, None
        if box.leaving:
            return  # an orderly stop is no death
        if counts:
            box.hold_down.died(now)
        self._context.keep(box)
        self._context.metrics.verdicts.labels(box.name, how).inc()
        self._event(f"box-{how}", box, f"{box.name}: {reason}")

    def _event(self, kind: str, box: BoxState, text: str) -> None:
        self._context.event(kind, text, pipeline=self._spec.name, box=box.name)
