"""What a stage knows about itself: source of /health, /metrics and the admin socket."""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import psutil

from fleet import __version__
from fleet.planning.plan import StagePlan
from stage_runtime.engine.stage import StageEngine
from stage_runtime.link.membership import LinkReport, Prepare, StageStateName
from stage_runtime.link.steps import SHEDDING_LIMIT
from stage_runtime.server.compute import ComputeThread
from stage_runtime.server.config import StageConfig

log = logging.getLogger(__name__)

RATE_WINDOW_SECONDS = 10.0
HEALTH_SCHEMA = 1
STATES: tuple[StageStateName, ...] = ("loading", "loaded", "ready", "failed")
NO_PLAN = "no plan yet"


class RateMeter:
    """Events per second over the last `RATE_WINDOW_SECONDS`, by the monotonic clock."""

    def __init__(self) -> None:
        self.total = 0
        self._events: deque[tuple[float, int]] = deque()

    def add(self, count: int) -> None:
        """Some events happened now."""
        if count:
            self.total += count
            self._events.append((time.monotonic(), count))
            self._forget()

    def per_second(self) -> float:
        """The rate now."""
        self._forget()
        return sum(count for _, count in self._events) / RATE_WINDOW_SECONDS

    def _forget(self) -> None:
        oldest = time.monotonic() - RATE_WINDOW_SECONDS
        while self._events and self._events[0][0] < oldest:
            self._events.popleft()


@dataclass
class EpochState:
    """How one epoch stands on this box.

    Attributes:
        prepare: what the coordinator sent. stage: this box's part of it.
        changed: called after every change.
        engine: None until its layers are loaded.
        committed: whether the coordinator said so.
        state, reason: loading → loaded (own layers are there) → ready (it serves); failed stays.
        largest_logit_difference: δ of the ring's last probe.
    """

    prepare: Prepare
    stage: StagePlan
    changed: Callable[[], None]
    engine: StageEngine | None = None
    committed: bool = False
    state: StageStateName = "loading"
    reason: str = "layers are being loaded"
    largest_logit_difference: float | None = None

    @property
    def number(self) -> int:
        """The epoch."""
        return self.prepare.epoch

    def enter(self, state: StageStateName, reason: str = "") -> None:
        """Change state; `failed` is final for the epoch."""
        if self.state != "failed" and (self.state, self.reason) != (state, reason):
            self.state, self.reason = state, reason
            self.changed()

    @property
    def finite_logit_difference(self) -> float | None:
        """`largest_logit_difference` for JSON, which has no infinities; `reason` says so where it is infinite."""
        difference = self.largest_logit_difference
        return difference if difference is not None and math.isfinite(difference) else None


@dataclass(frozen=True)
class Guarded:
    """What the box's guards said last. `state`: for people. until: monotonic seconds; then it says nothing any more."""

    state: str = ""
    temperature_celsius: float | None = None
    until: float = math.inf


@dataclass
class StageState:
    """Mutable, owned by the event loop.

    Attributes:
        epochs: live ones, by number.
        starting: why nothing can be prepared yet, for people; empty once it can.
        failure: why this stage can't serve at all, or what stopped the last plan here; empty otherwise.
        idle_reason: why no plan is in force.
        batch_limit: sequences in one micro-batch that this box allows now.
        shedding: no new sequences, as memory is short here.
        guarded: what the box's guards said last.
        incarnation: starts of the stage on this box.
        coordinator_reason: why the coordinator is not connected; empty while it is.
        layers_held: decoder layers in memory.
        kept_engine: of an epoch that ended; its KV caches wait to be taken over.
        tokens: outputs that passed here.
        on_change: called when state, reason or epoch changed.
        on_link: told what is seen of ring neighbours.
    """

    config: StageConfig
    compute: ComputeThread
    epochs: dict[int, EpochState] = field(default_factory=dict)
    starting: str = "the kernels are being tried"
    failure: str = ""
    idle_reason: str = NO_PLAN
    kernel: str = ""
    weight_bytes: int = 0
    kernel_difference: float | None = None
    batch_limit: int = 0
    shedding: bool = False
    guarded: Guarded = Guarded()
    incarnation: int = 0
    coordinator_reason: str = "not connected yet"
    layers_held: frozenset[int] = frozenset()
    kept_engine: StageEngine | None = None
    load_seconds: float | None = None
    warm_up_seconds: float | None = None
    tokens: RateMeter = field(default_factory=RateMeter)
    micro_batches: int = 0
    rows: int = 0
    connections_refused: int = 0
    rings_formed: int = 0
    rings_lost: int = 0
    on_change: Callable[[], None] = lambda: None
    on_link: Callable[[LinkReport], None] = lambda report: None

    def __post_init__(self) -> None:
        self.batch_limit = self.config.max_batch_sequences
        self._shown: tuple[StageStateName, str, int] = ("loading", "", 0)

    def changed(self) -> None:
        """Something that state, reason or epoch follow from has changed: log it, and tell the coordinator."""
        now = (self.state, self.reason, self.epoch)
        if now != self._shown:
            self._shown = now
            text = f": {self.reason}" if self.reason else ""
            log.info("state %s%s", self.state, text, extra={"state": self.state, "epoch": self.epoch})
            self.on_change()

    @property
    def serving(self) -> EpochState | None:
        """The newest committed epoch that lives here."""
        committed = [number for number, epoch in self.epochs.items() if epoch.committed]
        return self.epochs[max(committed)] if committed else None

    @property
    def prepared(self) -> EpochState | None:
        """The epoch that is being prepared, or waits for its commit."""
        open_ones = [number for number, epoch in self.epochs.items() if not epoch.committed]
        return self.epochs[max(open_ones)] if open_ones else None

    @property
    def draining_epoch(self) -> int | None:
        """An older committed epoch whose sequences finish beside the one that serves."""
        committed = sorted(number for number, epoch in self.epochs.items() if epoch.committed)
        return committed[-2] if len(committed) > 1 else None

    @property
    def epoch(self) -> int:
        """Of the plan in force; 0 before any."""
        return self.serving.number if self.serving else 0

    @property
    def state(self) -> StageStateName:
        """Of the epoch that serves, else of the process."""
        if self.serving is not None:
            return self.serving.state
        if self.failure:
            return "failed"
        if self.starting or (self.prepared is not None and self.prepared.state == "loading"):
            return "loading"
        return "loaded"

    @property
    def reason(self) -> str:
        """Why it is not ready, for people; also why a ready one computes nothing."""
        return "; ".join(filter(None, (self.hung_problem, self._plan_reason)))

    @property
    def _plan_reason(self) -> str:
        if self.serving is not None:
            return self.serving.reason
        if self.failure or self.starting:
            return self.failure or self.starting
        if self.prepared is not None:
            return f"epoch {self.prepared.number} is prepared: {self.prepared.reason}"
        return self.idle_reason

    @property
    def hung_problem(self) -> str:
        """Why nothing can be computed here any more; empty while the compute thread works.

        A call is a micro-batch, or a part of one: none takes as long as a whole stop may.
        """
        seconds = self.compute.held_seconds
        if seconds < self.config.drain_seconds:
            return ""
        return f"the compute thread of {self.config.box} has been in one call for {seconds:.0f} s"

    @property
    def engines(self) -> list[StageEngine]:
        """All that may hold KV caches."""
        live = [epoch.engine for epoch in self.epochs.values() if epoch.engine is not None]
        return live if self.kept_engine is None else [*live, self.kept_engine]

    @property
    def ring_limit(self) -> int:
        """The batch limit that travels in the ring; `SHEDDING_LIMIT` while this box sheds."""
        return SHEDDING_LIMIT if self.shedding else self.batch_limit

    @property
    def guards(self) -> Guarded:
        """What the guards say now."""
        return self.guarded if time.monotonic() < self.guarded.until else Guarded("silent")

    @property
    def kv_bytes(self) -> int:
        """Bytes of all KV caches here, kept ones included."""
        return sum(engine.kv_bytes for engine in self.engines)

    @property
    def open_sequences(self) -> int:
        """Sequences that are computed here."""
        return sum(engine.open_sequences for engine in self.engines)

    @property
    def finite_logit_difference(self) -> float | None:
        """Of the epoch that serves, or of the one that is prepared."""
        epoch = self.serving or self.prepared
        return epoch.finite_logit_difference if epoch else None

    @property
    def largest_logit_difference(self) -> float | None:
        """The same, infinite where a logit was."""
        epoch = self.serving or self.prepared
        return epoch.largest_logit_difference if epoch else None

    def health(self) -> dict[str, Any]:
        """The body of /health."""
        stage = self.serving.stage if self.serving else StagePlan(self.config.box, 0, 0, embedding=False, head=False)
        served = {layer for epoch in self.epochs.values() for layer in range(epoch.stage.start, epoch.stage.end)}
        return {
            "schema": HEALTH_SCHEMA,
            "box": self.config.box,
            "state": self.state,
            "reason": self.reason,
            "version": __version__,
            "pipeline": self.config.pipeline,
            "layers": [stage.start, stage.end],
            "standby_layers": sorted(self.layers_held - served),
            "embedding": stage.embedding,
            "head": stage.head,
            "epoch": self.epoch,
            "draining_epoch": self.draining_epoch,
            "incarnation": self.incarnation,
            "coordinator": {"connected": not self.coordinator_reason, "reason": self.coordinator_reason},
            "policy": self.config.policy,
            "model_digest": self.config.model_digest,
            "kernel": self.kernel,
            "kernel_relative_difference": self.kernel_difference,
            "weight_bytes": self.weight_bytes,
            "kv_bytes": self.kv_bytes,
            "working_seconds": self.compute.working_seconds,
            "progress": self.compute.work.finished,
            "open_sequences": self.open_sequences,
            "rss_bytes": psutil.Process().memory_info().rss,
            "tokens_per_second": self.tokens.per_second(),
            "batch_limit_sequences": self.batch_limit,
            "max_batch_sequences": self.config.max_batch_sequences,
            "duty_limit_percent": self.compute.duty_percent,
            "shedding": self.shedding,
            "largest_logit_difference": self.finite_logit_difference,
            "clock_synchronised": self.config.tls.clock_synchronised,
            "timings_seconds": {"load": self.load_seconds, "warm_up": self.warm_up_seconds},
        }
