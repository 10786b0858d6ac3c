"""What a box's refusal to load its range says about the memory that plans may count on. Pure."""

from __future__ import annotations

from fleet.planning.plan import StagePlan
from fleet.planning.spec import PipelineSpec
from fleet.planning.whole import table_of


def short_bytes(spec: PipelineSpec, stage: StagePlan, own: StagePlan | None, usable: int, missing: int) -> int:
    """How much less a box can use than was planned with, by its own word.

    A stage compares with what is free, no reserve taken off: a range fits there once it needs less by all that was
    missing.

    Args:
        stage: that did not fit. own: what it serves now, if that goes on beside: two epochs at once don't fit, but what
            it serves does, and a merge must be able to count on that.
        usable: bytes that were planned with. missing: bytes that the box lacks.
    """
    table = table_of(spec)
    slack = max(0, usable - table.needed_bytes(stage.start, stage.end))
    most = slack + missing if own is None else max(0, usable - table.needed_bytes(own.start, own.end))
    return min(slack + missing, most)
