"""What a coordinator that starts makes of kept epochs."""

from __future__ import annotations

from typing import Literal

import pytest

from fleet.coordinator.records import EpochRecord
from fleet.coordinator.recovery import Recovered, recovered
from tests.coordinator.test_decide import plan

BOXES = ("box1", "box2", "box3")
State = Literal["preparing", "committed", "aborted", "retired"]


def record(epoch: int, state: State, *boxes: str, planned: bool = False) -> EpochRecord:
    return EpochRecord(epoch, plan(*(boxes or BOXES)), state, planned)


FIRST = record(1, "committed")
UNPLANNED = record(2, "committed", "box1", "box3")
PLANNED = record(3, "committed", planned=True)
OPEN = record(4, "preparing")
GONE = record(5, "committed", "box1", "box9")


@pytest.mark.parametrize(
    ("kept", "found"),
    [
        ((), Recovered(None, None, (), (), ())),
        ((OPEN,), Recovered(None, None, (OPEN,), (), ())),
        ((FIRST,), Recovered(FIRST, None, (), (), ())),
        ((FIRST, UNPLANNED), Recovered(UNPLANNED, None, (), (FIRST,), ())),
        ((FIRST, UNPLANNED, PLANNED, OPEN), Recovered(PLANNED, UNPLANNED, (OPEN,), (FIRST,), ())),
        ((FIRST, GONE), Recovered(None, None, (), (FIRST,), (GONE,))),
        ((GONE, FIRST), Recovered(FIRST, None, (), (), (GONE,))),
        ((GONE,), Recovered(None, None, (), (), (GONE,))),
        ((record(1, "aborted"), record(2, "retired")), Recovered(None, None, (), (), ())),
    ],
)
def test_kept_epochs_are_sorted(kept: tuple[EpochRecord, ...], found: Recovered) -> None:
    assert recovered(kept, BOXES) == found
