"""What a stage knows about itself: source of /health, /metrics and the admin socket."""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any, Literal

import psutil

from fleet import __version__
from stage_runtime.engine.stage import StageEngine
from stage_runtime.server.compute import ComputeThread
from stage_runtime.server.config import StageConfig

log = logging.getLogger(__name__)

RATE_WINDOW_SECONDS = 10.0
HEALTH_SCHEMA = 1
StateName = Literal["loading", "loaded", "ready", "failed"]
STATES: tuple[StateName, ...] = ("loading", "loaded", "ready", "failed")


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
class StageState:
    """Mutable, owned by the event loop.

    Attributes:
        state: loading → loaded (own layers are ready) → ready (the ring's probe passed); failed stays.
        reason: why it is not ready, for people.
        batch_limit: sequences in one micro-batch that this box allows now.
        largest_logit_difference: δ of the ring's last probe.
        tokens: outputs that passed here.
    """

    config: StageConfig
    compute: ComputeThread
    engine: StageEngine | None = None
    state: StateName = "loading"
    reason: str = "the model is being loaded"
    kernel: str = ""
    weight_bytes: int = 0
    kernel_difference: float | None = None
    batch_limit: int = 0
    largest_logit_difference: float | None = None
    load_seconds: float | None = None
    warm_up_seconds: float | None = None
    tokens: RateMeter = field(default_factory=RateMeter)
    micro_batches: int = 0
    rows: int = 0
    connections_refused: int = 0
    rings_formed: int = 0
    rings_lost: int = 0

    def __post_init__(self) -> None:
        self.batch_limit = self.config.max_batch_sequences

    def enter(self, state: StateName, reason: str = "") -> None:
        """Change state and log it; `failed` is final, until the process restarts."""
        if self.state == "failed" or (self.state, self.reason) == (state, reason):
            return
        self.state, self.reason = state, reason
        log.info("state %s%s", state, f": {reason}" if reason else "", extra={"state": state})

    @property
    def finite_logit_difference(self) -> float | None:
        """`largest_logit_difference` for JSON, which has no infinities; `reason` says so where it is infinite."""
        difference = self.largest_logit_difference
        return difference if difference is not None and math.isfinite(difference) else None

    @property
    def kv_bytes(self) -> int:
        """Bytes of all KV caches here."""
        return self.engine.kv_bytes if self.engine else 0

    def health(self) -> dict[str, Any]:
        """The body of /health."""
        stage = self.config.stage
        return {
            "schema": HEALTH_SCHEMA,
            "box": self.config.box,
            "state": self.state,
            "reason": self.reason,
            "version": __version__,
            "pipeline": self.config.pipeline,
            "layers": [stage.start, stage.end],
            "embedding": stage.embedding,
            "head": stage.head,
            "epoch": self.config.epoch,
            "policy": self.config.plan.policy,
            "model_digest": self.config.model_digest,
            "kernel": self.kernel,
            "kernel_relative_difference": self.kernel_difference,
            "weight_bytes": self.weight_bytes,
            "kv_bytes": self.kv_bytes,
            "open_sequences": self.engine.open_sequences if self.engine else 0,
            "rss_bytes": psutil.Process().memory_info().rss,
            "tokens_per_second": self.tokens.per_second(),
            "batch_limit_sequences": self.batch_limit,
            "largest_logit_difference": self.finite_logit_difference,
            "clock_synchronised": self.config.tls.clock_synchronised,
            "timings_seconds": {"load": self.load_seconds, "warm_up": self.warm_up_seconds},
        }
