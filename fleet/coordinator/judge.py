"""Evidence → verdict. Pure: what was seen of a box, and for how long, decides whether it lives."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from stage_runtime.link.membership import LinkReport

# A step so many times as long as the box's own usual one is slow (design: "10× slower"; reported well before that).
SLOW_FACTOR = 3.0

ChannelState = Literal["never", "open", "lost"]
VerdictKind = Literal["alive", "waiting", "dead", "hung"]
ReportKind = Literal["connected", "closed", "silent", "unreachable"]


@dataclass(frozen=True)
class Thresholds:
    """What evidence is measured by, in seconds of the coordinator's own awake time.

    Attributes:
        hung: work outstanding, or no heartbeat on an open channel, and no progress for so long.
        ring_trouble: two boxes that live and can't reach each other for so long.
        redial: whoever lives has dialled again by then. dial: the same for a box that nobody accuses.
    """

    hung: float
    ring_trouble: float
    redial: float
    dial: float


@dataclass(frozen=True)
class Accusation:
    """What a ring neighbour with an open channel said last about a box, and how long ago."""

    reporter: str
    kind: ReportKind
    seconds: float


@dataclass(frozen=True)
class Evidence:
    """What is known of one box.

    Attributes:
        channel: its control channel: "never" since this coordinator started, "open", "lost".
        channel_seconds: since that began.
        witness: another box of the pipeline can be heard, so it is not the coordinator itself that is cut off.
        said: by its neighbours, about the ring that serves.
        state, reason: of its last heartbeat; empty before the first.
        quiet_seconds: since its last heartbeat (or since its registration).
        still_seconds: since its progress changed. working_seconds: its own word on the age of its oldest work.
        step_seconds, usual_step_seconds: see Heartbeat.
    """

    channel: ChannelState
    channel_seconds: float
    witness: bool
    said: tuple[Accusation, ...] = ()
    state: str = ""
    reason: str = ""
    quiet_seconds: float = 0.0
    still_seconds: float = 0.0
    working_seconds: float = 0.0
    step_seconds: float | None = None
    usual_step_seconds: float | None = None


@dataclass(frozen=True)
class Verdict:
    """What a box is judged to be, and why."""

    kind: VerdictKind
    reason: str
    slow: bool = False


def judge(evidence: Evidence, thresholds: Thresholds) -> Verdict:
    """The verdict table of docs/architecture.md.

    A box that is cut off from the coordinator alone is "waiting": it works on and dials again.
    """
    if evidence.channel == "open":
        return _judge_open(evidence, thresholds)
    what = "its control channel is lost" if evidence.channel == "lost" else "it has not registered since the start"
    accused = next((each for each in evidence.said if each.kind != "connected"), None)
    if accused is not None and (evidence.channel == "lost" or evidence.channel_seconds >= thresholds.redial):
        return Verdict("dead", f"{what}, and {accused.reporter} reports its link {accused.kind}")
    if accused is not None:
        return Verdict("waiting", f"{what}; {accused.reporter} reports its link {accused.kind}")
    if not evidence.witness:
        return Verdict("waiting", f"{what}, and no other box of the pipeline is heard")
    if any(each.kind == "connected" for each in evidence.said):
        return Verdict("waiting", f"{what}, but its neighbours hear it")
    if evidence.channel_seconds >= thresholds.dial:
        return Verdict("dead", f"{what}, and it has not dialled again for {thresholds.dial:g} s")
    return Verdict("waiting", what)


def _judge_open(evidence: Evidence, thresholds: Thresholds) -> Verdict:
    slow = is_slow(evidence.step_seconds, evidence.usual_step_seconds)
    if evidence.state == "failed":
        return Verdict("dead", f"its stage failed: {evidence.reason}", slow)
    if evidence.working_seconds >= thresholds.hung and evidence.still_seconds >= thresholds.hung:
        return Verdict("hung", f"it has work and finished none for {evidence.still_seconds:.1f} s", slow)
    if evidence.quiet_seconds >= thresholds.hung:
        return Verdict("hung", f"its channel is open, but no heartbeat came for {evidence.quiet_seconds:.1f} s", slow)
    return Verdict("alive", "", slow)


def is_slow(step_seconds: float | None, usual_step_seconds: float | None) -> bool:
    """Whether a box's steps are far above its own history."""
    return bool(step_seconds and usual_step_seconds and step_seconds > SLOW_FACTOR * usual_step_seconds)


@dataclass(frozen=True)
class Trouble:
    """Two boxes that live but can't reach each other, and the one to leave out.

    Attributes:
        box: left out. involved: box → how many complaints it has a part in.
    """

    box: str
    reason: str
    involved: Mapping[str, int]


def ring_trouble(
    reports: Mapping[tuple[str, str], tuple[LinkReport, float]],
    order: Sequence[str],
    alive: Collection[str],
    thresholds: Thresholds,
    before: Mapping[str, int] = MappingProxyType({}),
) -> Trouble | None:
    """Who is left out when the ring of the plan that serves does not form although its boxes live.

    The box that most of its neighbours complain about (or complain with) is left out. Of two that are equal the one
    that had the larger part in earlier trouble: whoever can't reach one neighbour after the other, or says so, is what
    they have in common. Of two that are equal in that too the later one in ring order: the first stage holds the most.

    Args:
        reports: (reporter, about) → the last report and its age in seconds.
        order: the plan's boxes in ring order. alive: judged alive.
        before: box → its part in earlier trouble.
    """
    involved: Counter[str] = Counter()
    pairs: list[tuple[str, LinkReport]] = []
    for (reporter, about), (report, seconds) in sorted(reports.items(), key=lambda entry: entry[0]):
        lasting = report.kind != "connected" and seconds >= thresholds.ring_trouble
        if lasting and reporter in alive and about in alive and reporter in order and about in order:
            involved.update((reporter, about))
            pairs.append((reporter, report))
    if not pairs:
        return None
    box = max(involved, key=lambda name: (involved[name], before.get(name, 0), order.index(name)))
    reporter, report = next((who, said) for who, said in pairs if box in (who, said.box))
    return Trouble(
        box, f"{reporter} and {report.box} live but can't reach each other ({report.kind}: {report.text})", involved
    )
