"""REGISTER and HEARTBEAT: how this stage stands, for the coordinator."""

from __future__ import annotations

import secrets
import time
from dataclasses import dataclass, field

import psutil

from stage_runtime.link.membership import Heartbeat, Register
from stage_runtime.server.epochs import Epochs
from stage_runtime.server.memory import box_memory
from stage_runtime.server.state import StageState

PROCESS_ID_BYTES = 16


@dataclass
class Pulse:
    """Reads what others keep.

    Attributes:
        state: of the stage.
        ring_port: where its ring listens.
        layer_seconds, head_seconds: one decode step of one row, measured at the start.
        process_id: random, drawn once.
    """

    state: StageState
    ring_port: int
    layer_seconds: float | None
    head_seconds: float | None
    process_id: str = field(default_factory=lambda: secrets.token_hex(PROCESS_ID_BYTES))

    def register(self, epochs: Epochs) -> Register:
        """The recovery scan."""
        state, history = self.state, epochs.history
        return Register(
            state.config.pipeline,
            state.incarnation,
            self.process_id,
            self.ring_port,
            history.committed_epoch,
            history.later_epoch,
            state.epoch,
            box_memory().total,
            self.layer_seconds,
            self.head_seconds,
        )

    def heartbeat(self, *, wall_clock: bool) -> Heartbeat:
        """The pulse.

        Args:
            wall_clock: whether the coordinator takes the box's time.
        """
        state, work, memory = self.state, self.state.compute.work, box_memory()
        serving, guards = state.serving, state.guards
        most = serving.prepare.plan.max_sequences if serving else 1
        load = max(
            work.busy_share(state.compute.busy_seconds),
            1.0 - memory.available / memory.total,
            state.open_sequences / most,
        )
        return Heartbeat(
            epoch=state.epoch,
            state=state.state,
            reason=state.reason,
            start=serving.stage.start if serving else 0,
            end=serving.stage.end if serving else 0,
            ready_layers=len(state.layers_held),
            load=min(1.0, max(0.0, load)),
            open_sequences=state.open_sequences,
            progress=work.finished,
            working_seconds=state.compute.working_seconds,
            step_seconds=work.step_seconds,
            usual_step_seconds=work.usual_step_seconds,
            memory_available_bytes=memory.available,
            resident_bytes=psutil.Process().memory_info().rss,
            temperature_celsius=guards.temperature_celsius,
            guard_state=guards.state,
            wall_unix_seconds=time.time() if wall_clock else None,
        )
