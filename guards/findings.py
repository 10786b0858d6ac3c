"""What guards say: findings of how things stand, and actions that would mend them. Data only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Generic, TypeVar

Value = float | int | str | bool | None
MemoryT = TypeVar("MemoryT")


class State(str, Enum):
    """How a thing stands; worse ones later, so that the worst of several is their maximum by `severity`."""

    UNSUPPORTED = "unsupported"  # this box has no such thing
    HEALTHY = "healthy"
    INITIALISING = "initialising"  # not enough seen yet to say
    DEGRADED = "degraded"  # works, but worse than it should, or can't be measured although it is there
    UNHEALTHY = "unhealthy"  # needs an action, ours or a person's

    @property
    def severity(self) -> int:
        """0 for the best."""
        return list(State).index(self)


class Repair(str, Enum):
    """What mends a finding. The first ones are done by guards, the others by people."""

    NONE = "none"
    LIMIT_BATCH = "limit-batch"
    LIMIT_DUTY = "limit-duty"
    SHED_SEQUENCES = "shed-sequences"
    TRIM_MEMORY = "trim-memory"
    RESTART_PROGRAM = "restart-program"
    KILL_PROGRAM = "kill-program"
    START_PROGRAM = "start-program"
    CORRECT_CLOCK = "correct-clock"
    DROP_OLD_LOGS = "drop-old-logs"
    CHECK_COOLING = "check-cooling"
    CHECK_POWER = "check-power"
    CHECK_NETWORK = "check-network"
    CHECK_STORAGE = "check-storage"
    CHECK_TIME_SERVER = "check-time-server"
    CHECK_SENSOR = "check-sensor"
    CHECK_PROGRAM = "check-program"
    FREE_MEMORY = "free-memory"


@dataclass(frozen=True)
class Finding:
    """How one thing stands.

    Attributes:
        part: what was looked at, unique within its guard, e.g. "soc", "nic/eth0".
        state: how it stands.
        reason: one line for people: what was seen, against which bound.
        evidence: the figures behind it, unit in each key; None: could not be measured, never a made-up number.
        repair: what mends it.
    """

    part: str
    state: State
    reason: str = ""
    evidence: Mapping[str, Value] = field(default_factory=dict)
    repair: Repair = Repair.NONE


@dataclass(frozen=True)
class Action:
    """Something a guard wants done on its own box.

    Attributes:
        repair: what.
        target: on what, e.g. a program's name.
        because: one line for people.
        arguments: for whoever does it, unit in each key.
        budget: name of the budget that pays for it (`guards/budgets.py`); empty: gentle, costs nothing.
    """

    repair: Repair
    target: str
    because: str
    arguments: Mapping[str, Value] = field(default_factory=dict)
    budget: str = ""


@dataclass(frozen=True)
class Decision(Generic[MemoryT]):
    """What a guard makes of a reading.

    Attributes:
        findings: one for every part that was looked at.
        actions: in the order in which they are to be done.
        memory: what the guard wants to be given the next time.
    """

    findings: tuple[Finding, ...]
    actions: tuple[Action, ...]
    memory: MemoryT
