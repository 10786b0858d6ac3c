"""What the coordinator, the stages and the gateways say to each other on the control channel; no torch here.

Every stage and every gateway keeps one link to the coordinator's port (`stage_runtime.link.endpoints.dial`, role
"stage" or "gateway"). The first frame after the hellos is REGISTER (stages) or nothing (gateways: routes come at once).
Bodies are these dataclasses as JSON (`link.control`). Epochs are those of one pipeline; 0 is "none yet".
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from fleet.planning.plan import PipelinePlan
from stage_runtime.link.control import later

# Key of a coordinator's Hello.extra: what it takes beyond the fields that every release of the protocol has.
TAKES_KEY = "takes"
TAKES_WALL_CLOCK = "wall_unix_seconds"
StageStateName = Literal["loading", "loaded", "ready", "failed"]


@dataclass(frozen=True)
class Register:
    """REGISTER, a stage's first frame: who it is and what its log holds (the recovery scan).

    Attributes:
        pipeline: that the box belongs to.
        incarnation: starts of the stage on this box, kept on its disk; a later start has a higher one.
        process_id: random, drawn at start: the same process dialling again is no second box.
        ring_port: where its ring listens; the host is the address that the coordinator sees.
        committed_epoch: last epoch that it knows as committed. prepared_epoch: a later one that it voted for, or that
            it has at least heard of: it takes no older plan any more, so that number is never given out again.
        serving_epoch: epoch whose ring it runs now.
        memory_total_bytes: of the box (or its cgroup), what plans are judged by.
        layer_seconds: one decode step of one own layer, one row, the quickest of the warm-up. head_seconds: of the
            head; None where this box holds none and has not measured one.
    """

    pipeline: str
    incarnation: int
    process_id: str
    ring_port: int
    committed_epoch: int
    prepared_epoch: int
    serving_epoch: int
    memory_total_bytes: int
    layer_seconds: float | None
    head_seconds: float | None


@dataclass(frozen=True)
class Heartbeat:
    """HEARTBEAT, a stage's pulse, every `heartbeat_seconds` and at once when its state or epoch changes.

    Attributes:
        epoch: whose ring it runs; the newest where it runs two.
        state, reason: as in its /health.
        start, end: layers that it serves; equal for a spare.
        ready_layers: layers in memory, standby layers included.
        load: 0…1, the largest of: share of time that it computed lately, used memory, open of possible sequences.
        open_sequences: with a KV cache here.
        progress: micro-batches finished since the process started; grows while it works.
        working_seconds: age of the oldest call of the compute thread that waits or runs; 0 when idle. Large and growing
            while `progress` stands still is a hung compute thread.
        step_seconds: median time of the last micro-batches, per micro-batch; None before the first.
        usual_step_seconds: the same over its whole history; what "slow" is measured against.
        memory_available_bytes: of the box. resident_bytes: of the process.
        temperature_celsius: None where no sensor is. guard_state: of the box's guards, empty where none run, "silent"
            where they have stopped to say anything.
        wall_unix_seconds: the box's wall clock when this was made, for comparison only; None where the coordinator is
            of a release that does not take it.
    """

    epoch: int
    state: StageStateName
    reason: str
    start: int
    end: int
    ready_layers: int
    load: float
    open_sequences: int
    progress: int
    working_seconds: float
    step_seconds: float | None
    usual_step_seconds: float | None
    memory_available_bytes: int
    resident_bytes: int
    temperature_celsius: float | None
    guard_state: str
    wall_unix_seconds: float | None = later(None)


@dataclass(frozen=True)
class LinkReport:
    """LINK_REPORT, sent at once: what a stage sees of a ring neighbour (or, for the first stage, of the ring).

    Attributes:
        box: the neighbour. epoch: of the ring.
        kind: "connected"; "closed": the connection ended (the process died, or closed it); "silent": nothing came
            within the adaptive deadline; "unreachable": it can't be dialled.
        text: for people.
        silent_seconds: how long nothing had come (silent), else 0.
    """

    box: str
    epoch: int
    kind: Literal["connected", "closed", "silent", "unreachable"]
    text: str
    silent_seconds: float


@dataclass(frozen=True)
class Prepare:
    """PREPARE: get ready for a plan, then vote.

    An unplanned one fences every older epoch at once (its ring is dead anyway); a planned one leaves it serving.

    Attributes:
        addresses: box → "host:port" of its ring, for every box of the plan.
        planned: see above.
    """

    pipeline: str
    epoch: int
    plan: PipelinePlan
    addresses: dict[str, str]
    planned: bool


@dataclass(frozen=True)
class Vote:
    """VOTE, a stage's answer to PREPARE: yes once its layers are in memory and the epoch is in its log.

    Attributes:
        missing_bytes: memory that it lacks; 0 for yes and for other reasons.
        load_seconds: what getting the layers ready took.
    """

    epoch: int
    yes: bool
    reason: str
    missing_bytes: int
    load_seconds: float


@dataclass(frozen=True)
class Commit:
    """COMMIT: the coordinator has written the decision down; serve this epoch. Idempotent, delivered again until
    COMMITTED comes."""

    epoch: int


@dataclass(frozen=True)
class Committed:
    """COMMITTED: the stage has the commit in its log."""

    epoch: int


@dataclass(frozen=True)
class Abort:
    """ABORT: forget a prepared epoch; also the answer to a recovery scan whose epoch was never committed."""

    epoch: int
    reason: str


@dataclass(frozen=True)
class Retire:
    """RETIRE: stop every ring of an epoch at or below this one, and free what only it needed."""

    epoch: int
    reason: str


@dataclass(frozen=True)
class Standby:
    """STANDBY: what to keep in memory, beside the own layers, for a takeover; loaded in the background.

    Attributes:
        layers: decoder layers. head: norm and LM head. embedding: token embedding.
    """

    layers: tuple[int, ...]
    head: bool
    embedding: bool


@dataclass(frozen=True)
class Leaving:
    """LEAVING: the stage was told to stop (SIGTERM). It serves on until RETIRE of its epoch comes, after a planned
    switch without it, for `drain_seconds` at most."""

    reason: str


@dataclass(frozen=True)
class Challenge:
    """CHALLENGE: who holds this connection must answer at once: is the old one still alive?"""

    nonce: str


@dataclass(frozen=True)
class ChallengeAnswer:
    """ANSWER to CHALLENGE."""

    nonce: str


@dataclass(frozen=True)
class Route:
    """ROUTE, coordinator → gateway: where a pipeline's requests go now. Sent on connection and at every change.

    Attributes:
        state: "serving": submit to `first_stage` under `epoch`; "replanning": a plan is being made, wait;
            "refused": no plan fits, see `missing_mebibytes`; "none": no plan has been made yet, see `reason`.
        first_stage, host, port: ring address of the first stage; empty and 0 unless serving.
        max_sequences, max_tokens_per_sequence: of the plan.
        retry_after_seconds: what a refused client is told.
        missing_mebibytes: box → MiB that it lacks.
        degraded: serving with less than the whole site (a box is out), for people; empty otherwise.
        planned: this epoch follows the last one by a planned switch: what is open may finish under the last one.
    """

    pipeline: str
    epoch: int
    state: Literal["serving", "replanning", "refused", "none"]
    reason: str
    first_stage: str
    host: str
    port: int
    max_sequences: int
    max_tokens_per_sequence: int
    retry_after_seconds: float
    missing_mebibytes: dict[str, str]
    degraded: str
    planned: bool


@dataclass(frozen=True)
class Drained:
    """DRAINED, gateway → coordinator: no sequence of this gateway is open under this epoch or an older one."""

    pipeline: str
    epoch: int
