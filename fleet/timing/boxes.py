"""Looks at the clocks of many boxes at once, and corrects those that it should."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fleet import RELEASED_UNIX_SECONDS
from fleet.errors import ExitCode, FleetError
from fleet.inventory.sitefile import SiteFile
from fleet.ssh.pool import run_on_boxes
from fleet.ssh.results import HostResult, HostStatus
from fleet.ssh.site import SshSite
from fleet.timing import record
from fleet.timing.estimate import Offset, Verdict, decide
from fleet.timing.session import BoxClock


@dataclass(frozen=True)
class Clock:
    """What was seen of a box, and done.

    Attributes:
        keeper: what keeps its clock to a source; empty: nothing. before: its offset. after: once it was set.
        hardware_clock: what became of it; empty if the clock wasn't set.
    """

    keeper: str
    before: Offset
    after: Offset | None = None
    hardware_clock: str = ""

    @property
    def verdict(self) -> Verdict:
        """See `decide`."""
        return decide(self.before, self.keeper)


def check_own_clock(unix_seconds: float) -> None:
    """Refuse an operator's clock that can't be right.

    Raises:
        FleetError: it says a time before this release was made.
    """
    if unix_seconds < RELEASED_UNIX_SECONDS:
        shown = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(unix_seconds))
        raise FleetError(
            f"the clock of this machine says {shown}, before this release of fleet was made: no box is set by it",
            hint="set this machine's clock first: sudo date -s 'YYYY-MM-DD HH:MM:SS'",
        )


def remote_boxes(site_file: SiteFile, names: Sequence[str]) -> list[str]:
    """The boxes with a clock of their own among `names`, or among all if none is named.

    Raises:
        FleetError: a named one is unknown, or is a directory of this machine.
    """
    from fleet.inventory.problems import nearest

    boxes = site_file.site.boxes
    for name in names:
        if name not in boxes:
            message = f"{site_file.file}: no box {name}; {nearest(name, list(boxes))}"
            raise FleetError(message, hint=f"fleet inventory show {site_file.file}", exit_code=ExitCode.USAGE)
        if boxes[name].connection == "local":
            message = f"{name} is a directory of this machine (connection: local) and has no clock of its own"
            raise FleetError(message, hint="set this machine's clock: sudo date -s 'YYYY-MM-DD HH:MM:SS'")
    return [name for name in (dict.fromkeys(names) or boxes) if boxes[name].connection != "local"]


def look(site_file: SiteFile, ssh: SshSite, boxes: Sequence[str]) -> tuple[dict[str, Clock], tuple[HostResult, ...]]:
    """Measure all; nothing is changed."""

    def work(clock: BoxClock) -> Clock:
        return Clock(clock.keeper(), clock.offset())

    return _on_all(site_file, ssh, boxes, work)


def push(site_file: SiteFile, ssh: SshSite, boxes: Sequence[str]) -> tuple[dict[str, Clock], tuple[HostResult, ...]]:
    """Measure again, set what is off and kept by nothing, and measure what came of it; what was done is recorded.

    Raises:
        FleetError: the record can't be written.
    """

    def work(clock: BoxClock) -> Clock:
        seen = Clock(clock.keeper(), clock.offset())
        if seen.verdict is not Verdict.SET:
            return seen
        hardware = clock.correct(seen.before)
        return Clock(seen.keeper, seen.before, clock.offset(), hardware)

    clocks, results = _on_all(site_file, ssh, boxes, work)
    done = [{"unix_seconds": round(time.time(), 3), "box": box, **as_data(one)} for box, one in clocks.items()]
    if changed := [entry for entry in done if entry["after_seconds"] is not None]:
        record.add(site_file.state_directory, changed)
    return clocks, results


def as_data(clock: Clock) -> dict[str, Any]:
    """For JSON; seconds, positive: the box is ahead of the operator."""
    after = clock.after
    return {
        "verdict": clock.verdict.value,
        "keeper": clock.keeper,
        "before_seconds": clock.before.seconds,
        "before_uncertainty_seconds": clock.before.uncertainty_seconds,
        "after_seconds": None if after is None else after.seconds,
        "after_uncertainty_seconds": None if after is None else after.uncertainty_seconds,
        "hardware_clock": clock.hardware_clock,
    }


def refusals(clocks: Mapping[str, Clock]) -> list[HostResult]:
    """The boxes that are off, and whose clock is another's business."""
    return [
        HostResult(
            box,
            HostStatus.FAILED,
            f"{box}: {clock.before} off, but {clock.keeper}: the next correction would undo a push",
            f"mend that source, then on {box}: chronyc makestep" if "chronyd" in clock.keeper else "mend that server",
            ExitCode.FAILED,
        )
        for box, clock in clocks.items()
        if clock.verdict is Verdict.KEPT
    ]


def _on_all(
    site_file: SiteFile, ssh: SshSite, boxes: Sequence[str], work: Callable[[BoxClock], Clock]
) -> tuple[dict[str, Clock], tuple[HostResult, ...]]:
    found: dict[str, Clock] = {}

    def one(box: str) -> HostResult:
        with BoxClock(site_file, box, ssh) as clock:
            seen = work(clock)
        found[box] = seen
        changed = seen.after is not None
        return HostResult(box, HostStatus.CHANGED if changed else HostStatus.OK, changes=int(changed))

    results = run_on_boxes(boxes, one, forks=site_file.site.rollout.forks, cancellation=ssh.cancellation)
    return {box: found[box] for box in boxes if box in found}, results
