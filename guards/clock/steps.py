"""Steps of the wall clock, from being seen until something explains them. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace

from guards.clock.reading import ClockReading
from guards.clock.verdict import Verdict
from guards.clock.wall import WallReading, step_seconds
from guards.findings import Finding, Repair, State, Value
from guards.settings import ClockSettings

PART = "wall-clock-steps"


@dataclass(frozen=True)
class Step:
    """Somebody has set the wall clock.

    Attributes:
        seconds: by how much, positive: forwards.
        boot_seconds: when it was seen, since boot.
        expected_offset_seconds: what the offset must be now, if the step came from nowhere: that of before, and the
            step. None: that of before was not known.
        explained: a measurement made since, or chronyd's own word, says how far off the clock is now.
    """

    seconds: float
    boot_seconds: float
    expected_offset_seconds: float | None
    explained: bool = False


def step_seen(
    before: WallReading | None, now: WallReading, offset_seconds: float | None, settings: ClockSettings
) -> Step | None:
    """Whether the clock was set since the last look.

    Args:
        offset_seconds: of the clock, at the last look; None: not known.
    """
    if before is None:
        return None
    seconds = step_seconds(before, now, settings.offset_milliseconds / 1e3)
    if not seconds:
        return None
    return Step(seconds, now.boot_seconds, None if offset_seconds is None else offset_seconds + seconds)


def explained(step: Step, reading: ClockReading, verdict: Verdict) -> Step:
    """The step, explained if it is by now.

    chronyd goes on saying the offset of its last measurement when somebody else sets the clock, for up to 17 minutes.
    It is believed when it has measured since, or when the step is the very one that it still had to make.
    """
    if step.explained or verdict.offset_seconds is None:
        return step
    if verdict.keeper != "chrony":
        return replace(step, explained=bool(reading.sntp and reading.sntp.answers))
    sample_seconds_ago = reading.chrony.sample_seconds_ago
    if sample_seconds_ago is not None and sample_seconds_ago < reading.wall.boot_seconds - step.boot_seconds:
        return replace(step, explained=True)
    if step.expected_offset_seconds is None:
        return step
    # had it come from nowhere, chronyd's word would be wrong by all of it; chronyd slews meanwhile, so not quite by 0
    apart_seconds = abs(verdict.offset_seconds - step.expected_offset_seconds)
    return replace(step, explained=apart_seconds <= abs(step.seconds) / 2)


def steps_finding(step: Step | None, now: WallReading, settings: ClockSettings) -> tuple[Finding, Step | None]:
    """What is to be said of the last step, and the step if it is to be kept in mind."""
    if step is None:
        return Finding(PART, State.HEALTHY), None
    ago_seconds = now.boot_seconds - step.boot_seconds
    if not 0 <= ago_seconds <= settings.step_kept_seconds:
        return Finding(PART, State.HEALTHY), None
    evidence: dict[str, Value] = {"step_seconds": round(step.seconds, 6), "seen_seconds_ago": round(ago_seconds, 3)}
    words = f"the clock was stepped by {step.seconds:+.6f} s"
    if not step.explained:
        return (
            Finding(
                PART, State.DEGRADED, f"{words}, and nothing has measured it since", evidence, Repair.CORRECT_CLOCK
            ),
            step,
        )
    if ago_seconds == 0:  # shown for one round, so that it becomes an event
        return Finding(PART, State.DEGRADED, words, evidence), step
    return Finding(PART, State.HEALTHY, words, evidence), step
