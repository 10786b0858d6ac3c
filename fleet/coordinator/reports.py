"""What stages said of their ring neighbours, and the evidence that follows for a box."""

from __future__ import annotations

from collections.abc import Callable, Collection

from fleet.coordinator.judge import Accusation, Evidence
from fleet.coordinator.state import BoxState
from stage_runtime.link.membership import LinkReport

Said = dict[tuple[str, int], tuple[LinkReport, float]]


class Reports:
    """The last report of every (neighbour, reporter, epoch), with the time when its trouble or its peace began."""

    def __init__(self) -> None:
        self._about: dict[str, Said] = {}

    def add(self, reporter: str, report: LinkReport, now: float) -> None:
        """A report came in; trouble that goes on, of whatever kind, keeps the time when it began."""
        said = self._about.setdefault(report.box, {})
        last = said.get((reporter, report.epoch))
        if last is not None and (last[0].kind == "connected") == (report.kind == "connected"):
            now = last[1]
        said[reporter, report.epoch] = (report, now)

    def forget_before(self, epoch: int) -> None:
        """Rings of older epochs say nothing any more."""
        self._keep(lambda _, of_epoch: of_epoch >= epoch)

    def forget_epoch(self, epoch: int) -> None:
        """The ring of an epoch that was given up: what was said of its links is no evidence on the one that serves."""
        self._keep(lambda _, of_epoch: of_epoch != epoch)

    def forget_box(self, box: str) -> None:
        """A new process of a box: what was said of the last one, or by it, is void."""
        self._about.pop(box, None)
        self._keep(lambda reporter, _: reporter != box)

    def about(self, box: str, epoch: int, reporters: Collection[str], now: float) -> tuple[Accusation, ...]:
        """The last word of each other box of `reporters` on a box, of rings of this epoch or a later one."""
        last: Said = {}
        for (reporter, of_epoch), (report, at) in self._about.get(box, {}).items():
            if (
                of_epoch >= epoch
                and reporter in reporters
                and reporter != box
                and ((reporter, 0) not in last or at >= last[reporter, 0][1])
            ):
                last[reporter, 0] = (report, at)
        return tuple(Accusation(reporter, report.kind, now - at) for (reporter, _), (report, at) in last.items())

    def first_trouble(self, box: str, epoch: int) -> float | None:
        """When the first trouble with a box began, the silence that was told included."""
        times = [
            at - report.silent_seconds
            for (_, of_epoch), (report, at) in self._about.get(box, {}).items()
            if of_epoch >= epoch and report.kind != "connected"
        ]
        return min(times, default=None)

    def of_ring(self, epoch: int, since: float, now: float) -> dict[tuple[str, str], tuple[LinkReport, float]]:
        """Reports of one ring, by reporter and neighbour, with their ages; none is older than the ring."""
        return {
            (reporter, about): (report, now - max(at, since))
            for about, said in self._about.items()
            for (reporter, of_epoch), (report, at) in said.items()
            if of_epoch == epoch
        }

    def _keep(self, wanted: Callable[[str, int], bool]) -> None:
        self._about = {
            about: {key: value for key, value in said.items() if wanted(*key)} for about, said in self._about.items()
        }


def evidence_of(box: BoxState, said: tuple[Accusation, ...], *, witness: bool, now: float) -> Evidence:
    """What is known of a box now."""
    heartbeat = box.heartbeat
    return Evidence(
        channel=box.channel,
        channel_seconds=now - box.channel_since,
        witness=witness,
        said=said,
        state=heartbeat.state if heartbeat else "",
        reason=heartbeat.reason if heartbeat else "",
        quiet_seconds=now - box.heard_at,
        still_seconds=now - box.progressed_at,
        working_seconds=heartbeat.working_seconds if heartbeat else 0.0,
        step_seconds=heartbeat.step_seconds if heartbeat else None,
        usual_step_seconds=heartbeat.usual_step_seconds if heartbeat else None,
    )
