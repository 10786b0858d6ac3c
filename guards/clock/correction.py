"""What brings a clock right: commands for chronyd, as argument vectors."""

from __future__ import annotations

from enum import Enum

from guards.clock.limits import TimeLimits
from guards.clock.reading import ClockReading
from guards.clock.verdict import Sync, Verdict
from guards.guard import ActionFailed
from guards.roots import Roots
from guards.settings import ClockSettings
from guards.tools import ToolFailed, ToolMissing, run_tool

BURST_SAMPLES = "4/4"  # good measurements wanted / tried at most


class Method(str, Enum):
    """How a clock is corrected."""

    MAKESTEP = "makestep"  # what chronyd still has to correct is set at once
    BURST = "burst"  # chronyd measures anew, and corrects by what it finds


def method_for(
    verdict: Verdict,
    reading: ClockReading,
    limits: TimeLimits,
    settings: ClockSettings,
    *,
    degraded_seconds: float,
    unexplained_step: bool,
) -> Method | None:
    """How chronyd, where there is one with sources, is to correct the clock; None: there is nothing that it should do.

    Args:
        degraded_seconds: largest offset that is fine.
        unexplained_step: somebody has set the clock, and chronyd may not know of it.
    """
    tracking = reading.chrony.tracking
    if tracking is None or not reading.chrony.sources:
        return None
    offset = verdict.offset_seconds
    if unexplained_step:
        return Method.BURST  # what chronyd still wants to correct is of before the step
    sure_seconds = 0.0 if offset is None else abs(offset) - (verdict.uncertainty_seconds or 0.0)
    if verdict.keeper == "chrony" and offset is not None and sure_seconds > settings.step_milliseconds / 1e3:
        # a source that would set the clock to a time that can't be is wrong itself
        return Method.MAKESTEP if limits.sane(reading.wall.unix_seconds - offset) else None
    if sure_seconds > degraded_seconds or verdict.sync is Sync.INSANE:
        return Method.BURST
    return None


def correction_argv(method: Method) -> tuple[str, ...]:
    """The command. `burst` without an address asks all sources."""
    if method is Method.MAKESTEP:
        return ("chronyc", "-n", "makestep")
    return ("chronyc", "-n", "burst", BURST_SAMPLES)


def correct(roots: Roots, method: Method, *, box: str, deadline_seconds: float) -> str:
    """Run it, and say what was done.

    Raises:
        ActionFailed: chronyd refused, as it does to everyone but root and its own user, or did not answer; the message
            says what a person does instead.
    """
    argv = correction_argv(method)
    instead = f"set the clock by `fleet time push {box}`"
    try:
        output = run_tool(roots, *argv, deadline_seconds=deadline_seconds)
    except ToolMissing:
        raise ActionFailed(f"chronyc is not installed; {instead}") from None
    except ToolFailed as error:
        raise ActionFailed(f"{error}; {instead}") from None
    lines = [line for line in output.text.splitlines() if line.strip()]
    answer = lines[-1].strip()[:100] if lines else output.error[:100] or f"exit code {output.code}"
    if output.code != 0 or answer != "200 OK":
        raise ActionFailed(f"{' '.join(argv)}: {answer}; {instead}")
    return f"{' '.join(argv)}: {answer}"
