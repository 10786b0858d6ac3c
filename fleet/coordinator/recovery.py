"""What a coordinator that starts makes of the epochs that an earlier one kept. Pure."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from fleet.coordinator.records import EpochRecord
from fleet.coordinator.state import members


@dataclass(frozen=True)
class Recovered:
    """How things stand.

    Attributes:
        serving: the committed epoch. draining: the one before, where a planned switch let it finish what is open.
        aborted: never committed, so they never were. retired: over, because a later plan serves.
        foreign: over, because boxes of them are not in the pipeline any more.
    """

    serving: EpochRecord | None
    draining: EpochRecord | None
    aborted: tuple[EpochRecord, ...]
    retired: tuple[EpochRecord, ...]
    foreign: tuple[EpochRecord, ...]


def recovered(kept: Sequence[EpochRecord], boxes: Collection[str]) -> Recovered:
    """Sort what was kept.

    Args:
        kept: oldest first. boxes: of the pipeline now.
    """
    committed = [record for record in kept if record.state == "committed"]
    foreign = tuple(record for record in committed if not set(members(record.plan)) <= set(boxes))
    live = [record for record in committed if record not in foreign]
    # where the newest one is foreign a whole new plan follows: what was only finishing under it serves nobody anew
    newest = live[-1] if live and live[-1] is committed[-1] else None
    older, serving = live[:-1] if newest else live, newest
    draining = older[-1] if older and serving is not None and serving.planned else None
    return Recovered(
        serving,
        draining,
        aborted=tuple(record for record in kept if record.state == "preparing"),
        retired=tuple(record for record in older if record is not draining),
        foreign=foreign,
    )
