"""What keeps a box's clock to a source, by what the box says of itself. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from guards.clock.chrony import ChronyUnreadable, parse_answer


def keeper_of(facts: Mapping[str, Any]) -> str:
    """In words; empty where nothing does, so that the clock may be set by hand.

    A chronyd without a source that answers keeps no clock: it hands out its own. One whose words can't be read may
    keep it, and counts as doing so.
    """
    chrony = facts["chrony"]
    if isinstance(chrony, str):
        try:
            reading = parse_answer(chrony)
        except ChronyUnreadable as error:
            return f"chronyd may keep it: {error}"
        tracking = reading.tracking
        if tracking is not None and tracking.synchronised and not tracking.free_running and reading.reachable:
            return f"chronyd follows {tracking.name or tracking.reference}"
    return "systemd-timesyncd follows a time server" if facts["timesyncd"] else ""
