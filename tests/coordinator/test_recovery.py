"""What a coordinator that starts makes of kept epochs."""

from __future__ import annotations

from typing import Literal

import pytest

from fleet.coordinator.records import EpochRecord
from fleet.coordinator.recovery import recovered
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
    ("kept", "serving", "draining", "aborted", "retired", "foreign"),
    [
        ((), None, None, (), (), ()),
        ((OPEN,), None, None, (OPEN,), (), ()),
        ((FIRST,), FIRST, None, (), (), ()),
        ((FIRST, UNPLANNED), UNPLANNED, None, (), (FIRST,), ()),
        ((FIRST, UNPLANNED, PLANNED, OPEN), PLANNED, UNPLANNED, (OPEN,), (FIRST,), ()),
        ((FIRST, GONE), FIRST, None, (), (), (GONE,)),
        ((GONE,), None, None, (), (), (GONE,)),
        ((record(1, "aborted"), record(2, "retired")), None, None, (), (), ()),
    ],
)
def test_kept_epochs_are_sorted(
    kept: tuple[EpochRecord, ...],
    serving: EpochRecord | None,
    draining: EpochRecord | None,
    aborted: tuple[EpochRecord, ...],
    retired: tuple[EpochRecord, ...],
    foreign: tuple[EpochRecord, ...],
) -> None:
    found = recovered(kept, BOXES)
    assert (found.serving, found.draining) == (serving, draining)
    assert (found.aborted, found.retired, found.foreign) == (aborted, retired, foreign)
