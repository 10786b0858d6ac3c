"""What the coordinator remembers of boxes, gateways and switches while it runs."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

from fleet.coordinator.config import BoxConfig
from fleet.coordinator.hold_down import HoldDown
from fleet.coordinator.judge import ChannelState, Verdict
from fleet.coordinator.peers import Peer
from fleet.coordinator.records import BoxRecord, EpochRecord
from fleet.planning.cost import BoxCost
from fleet.planning.plan import PipelinePlan
from stage_runtime.link.membership import Heartbeat, Vote

LOOPBACKS = ("127.", "::1")


@dataclass
class BoxState:
    """One stage box; times are of the coordinator's awake clock.

    Attributes:
        record: what is kept on disk. hold_down: the live form of its hold-down.
        peer: its link; None while there is none.
        known: whether it has registered since this coordinator started.
        channel: and since when.
        heartbeat: the last of this connection. heard_at, progressed_at: when it came, and when its progress changed.
        well_since: when it was last found well after not being so; None while it isn't.
        condemned: why it counts as lost for the plan that serves, and since when; empty otherwise.
        doomed: how: "dead" or "hung"; empty unless condemned or, without a plan, judged so.
        unfit: why it can't hold what it was given; empty otherwise.
        leaving: why it stops; empty otherwise. let_go: it was told that it may.
        short_bytes: memory that a vote said it lacks beyond what was known; believed until `short_until`.
        gave_up: last epoch whose ring it gave up while it served, and when; 0: none.
        out: it was lost, and has not been taken back. silent_seconds: how long nothing had come when its link ended.
        slow_since: since when its steps have been far above its history; None while they aren't.
        verdict: the last one. since: when its state, as shown, began.
    """

    name: str
    config: BoxConfig
    pipeline: str
    record: BoxRecord
    hold_down: HoldDown
    peer: Peer | None = None
    known: bool = False
    channel: ChannelState = "never"
    channel_since: float = 0.0
    ring_port: int = 0
    heartbeat: Heartbeat | None = None
    heard_at: float = 0.0
    progressed_at: float = 0.0
    well_since: float | None = None
    condemned: str = ""
    condemned_at: float = 0.0
    doomed: Literal["", "dead", "hung"] = ""
    unfit: str = ""
    leaving: str = ""
    let_go: bool = False
    short_bytes: int = 0
    short_until: float = 0.0
    gave_up: int = 0
    gave_up_at: float = 0.0
    out: bool = False
    silent_seconds: float = 0.0
    slow_since: float | None = None
    verdict: Verdict = field(default_factory=lambda: Verdict("waiting", "it has not registered since the start"))
    shown: str = "never-seen"
    since: float = 0.0

    @property
    def address(self) -> str:
        """host:port of its ring, as others reach it.

        The coordinator sees a stage on its own machine at loopback, where nobody else would find it.
        """
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def host(self) -> str:
        """The host of `address`, without brackets."""
        host = self.record.address
        return self.config.host if not host or host.startswith(LOOPBACKS) else host

    @property
    def port(self) -> int:
        """The port of `address`."""
        return self.ring_port or self.config.ring_port

    @property
    def cost(self) -> BoxCost:
        """Nominal cost, with what was measured in its place."""
        nominal, record = self.config.cost, self.record
        return replace(
            nominal,
            memory_bytes=record.memory_bytes or nominal.memory_bytes,
            keep_free_bytes=nominal.keep_free_bytes + self.short_bytes,
            layer_seconds=record.layer_seconds,
            head_seconds=record.head_seconds,
        )


@dataclass
class GatewayState:
    """One gateway. `drained`: pipeline → epoch up to which nothing of it is open."""

    peer: Peer
    drained: dict[str, int] = field(default_factory=dict)


@dataclass
class Phases:
    """When the parts of a switch ended, in seconds of the awake clock; milliseconds for its event."""

    began: float
    milliseconds: dict[str, int] = field(default_factory=dict)

    def ended(self, phase: str, now: float) -> float:
        """A phase ends and the next begins; returns its seconds."""
        seconds = now - self.began
        self.milliseconds[phase] = round(seconds * 1000)
        self.began = now
        return seconds


@dataclass
class Switch:
    """A switch that waits for votes.

    Attributes:
        record: its epoch and plan. deadline: votes must be there by then. votes: box → its yes.
        failed: why it can't succeed; empty while it can.
    """

    record: EpochRecord
    reason: str
    began: float
    deadline: float
    phases: Phases
    votes: dict[str, Vote] = field(default_factory=dict)
    failed: str = ""
    committing: bool = False

    @property
    def voters(self) -> list[str]:
        """Members of the new plan."""
        return members(self.record.plan)

    @property
    def waiting_for(self) -> list[str]:
        """Voters that have not said yes."""
        return [box for box in self.voters if box not in self.votes]


@dataclass
class Serving:
    """The committed epoch.

    Attributes:
        record: epoch and plan. confirmed: members that have it in their log. repeat_at: deliver it again then.
        phases: of the switch, until its ring is ready; None afterwards, and after a restart of the coordinator.
    """

    record: EpochRecord
    committed_at: float
    confirmed: set[str] = field(default_factory=set)
    repeat_at: float = 0.0
    phases: Phases | None = None
    reason: str = ""


@dataclass
class Draining:
    """The epoch before, after a planned switch: open for what began under it, until `deadline`.

    Attributes:
        lonely_until: while no gateway is connected, one may still dial until then.
    """

    record: EpochRecord
    deadline: float
    lonely_until: float


def members(plan: PipelinePlan | None) -> list[str]:
    """The boxes of a plan in ring order."""
    return [] if plan is None else [stage.box for stage in plan.stages]
