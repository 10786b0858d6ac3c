"""What chronyd knows of the clock, asked by `chronyc`.

Field orders are those of the formats in chrony's client.c (`process_cmd_tracking`, `process_cmd_sources`), the same
from 3.0 to 4.x; `-c` writes them as comma-separated values, `-m` takes several commands at once, so that a round costs
one process. Both commands are allowed to any local user; `makestep` and `burst` only over the Unix socket, which root
and chrony's own user may open.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum

from guards.roots import Roots
from guards.tools import ToolFailed, ToolMissing, run_tool

QUERY = ("chronyc", "-c", "-n", "-m", "tracking", "sources")
TRACKING_FIELDS = 14
SOURCE_FIELDS = 10
# reference of `local stratum N`: the server has no source, and hands out its own clock (chrony.conf(5), "local")
LOCAL_REFERENCE = "7F7F0101"
LEAPS = ("Normal", "Insert second", "Delete second", "Not synchronised")
NEVER_SECONDS = 2**32 - 1  # last sample of a source that never answered
UNSYNCHRONISED_STRATUM = 16
ERROR_LINE = re.compile(r"^5\d\d [A-Z]")

_DECIMAL = re.compile(r"-?\d{1,20}\.\d{1,20}")  # more digits no clock has
_WHOLE = re.compile(r"\d{1,20}")
_SIGNED = re.compile(r"-?\d+")
_OCTAL = re.compile(r"[0-7]{1,3}")
_REFERENCE = re.compile(r"[0-9A-F]{8}")


class ChronyUnreadable(Exception):
    """chronyc's answer can't be used; the message is one line for people."""


class SourceState(str, Enum):
    """What chronyd makes of a source: second column of `sources`."""

    SELECTED = "*"
    COMBINED = "+"
    NOT_COMBINED = "-"
    FALSETICKER = "x"
    TOO_VARIABLE = "~"
    UNUSABLE = "?"


@dataclass(frozen=True)
class Source:
    """A time source of chronyd.

    Attributes:
        mode: "^" server, "=" peer, "#" reference clock.
        reach: its last eight polls as bits, the newest lowest; 0: none was answered.
        sample_seconds_ago: age of its last measurement; None: there is none.
        error_seconds: estimated error of that measurement.
    """

    mode: str
    state: SourceState
    name: str
    stratum: int
    reach: int
    sample_seconds_ago: int | None
    error_seconds: float


@dataclass(frozen=True)
class Tracking:
    """How the clock stands by chronyd.

    Attributes:
        reference: id in hexadecimal. name: address of the source, or the name of a reference clock; may be empty.
        offset_seconds: of the box's clock to the source's time, positive: ahead. It is what chronyd still has to
            correct (the field "System time", whose sign is the reverse: positive is slow).
        last_offset_seconds, rms_offset_seconds: at the last update, and its long-term average.
        frequency_ppm: by which the clock would run fast without correction. skew_ppm: its error bound.
        root_delay_seconds, root_dispersion_seconds: to the reference clock at the top.
    """

    reference: str
    name: str
    stratum: int
    offset_seconds: float
    last_offset_seconds: float
    rms_offset_seconds: float
    frequency_ppm: float
    skew_ppm: float
    root_delay_seconds: float
    root_dispersion_seconds: float
    leap: str

    @property
    def synchronised(self) -> bool:
        """chronyd follows something, if only its own clock (`free_running`)."""
        return self.leap != "Not synchronised" and 0 < self.stratum < UNSYNCHRONISED_STRATUM

    @property
    def free_running(self) -> bool:
        """chronyd hands out its own clock for want of a source."""
        return self.synchronised and self.reference == LOCAL_REFERENCE


@dataclass(frozen=True)
class ChronyReading:
    """One look. `tracking` is None if chronyd is not there or could not be understood; then `reason` says why."""

    tracking: Tracking | None
    sources: tuple[Source, ...] = ()
    reason: str = ""

    @property
    def reachable(self) -> bool:
        """Some source has answered one of its last eight polls."""
        return any(source.reach for source in self.sources)

    @property
    def sample_seconds_ago(self) -> int | None:
        """Age of the newest measurement of the selected source; of any if none is selected; None: there is none."""
        selected = [source for source in self.sources if source.state is SourceState.SELECTED]
        ages = [each.sample_seconds_ago for each in selected or self.sources if each.sample_seconds_ago is not None]
        return min(ages, default=None)


def read_chrony(roots: Roots, *, deadline_seconds: float) -> ChronyReading:
    """Ask chronyd. Never raises: what is missing is said in the reading."""
    try:
        output = run_tool(roots, *QUERY, deadline_seconds=deadline_seconds)
        return parse_answer(output.text)
    except ToolMissing:
        return ChronyReading(None, reason="chronyc is not installed")
    except (ToolFailed, ChronyUnreadable) as error:
        return ChronyReading(None, reason=str(error))


def parse_answer(text: str) -> ChronyReading:
    """The answer to `QUERY`.

    Raises:
        ChronyUnreadable: chronyd could not be asked, or the text is cut short or of a version we don't know.
    """
    lines = text.splitlines()
    if not lines:
        raise ChronyUnreadable("chronyc answered nothing")
    complaint = next((line for line in lines if ERROR_LINE.match(line)), None)
    if complaint is not None:
        raise ChronyUnreadable(f"chronyc: {complaint[:100]}")
    if not text.endswith("\n"):
        raise ChronyUnreadable("chronyc's answer is cut short")
    return ChronyReading(parse_tracking(lines[0]), tuple(parse_source(line) for line in lines[1:]))


def parse_tracking(line: str) -> Tracking:
    """One line of `chronyc -c tracking`.

    Raises:
        ChronyUnreadable: it is none.
    """
    fields = _fields(line, TRACKING_FIELDS, "tracking")
    if not _REFERENCE.fullmatch(fields[0]):
        raise ChronyUnreadable(f"chronyc tracking: reference {fields[0]!r} is no hexadecimal id")
    if fields[13] not in LEAPS:
        raise ChronyUnreadable(f"chronyc tracking: leap status {fields[13]!r} is unknown")
    _number(fields[3], "reference time")
    _number(fields[8], "residual frequency")
    _number(fields[12], "update interval")
    return Tracking(
        reference=fields[0],
        name=fields[1],
        stratum=_whole(fields[2], "stratum"),
        offset_seconds=-_number(fields[4], "system time"),
        last_offset_seconds=_number(fields[5], "last offset"),
        rms_offset_seconds=_number(fields[6], "RMS offset"),
        frequency_ppm=_number(fields[7], "frequency"),
        skew_ppm=_number(fields[9], "skew"),
        root_delay_seconds=_number(fields[10], "root delay"),
        root_dispersion_seconds=_number(fields[11], "root dispersion"),
        leap=fields[13],
    )


def parse_source(line: str) -> Source:
    """One line of `chronyc -c sources`.

    Raises:
        ChronyUnreadable: it is none.
    """
    mode, state, name, stratum, poll, reach, ago, adjusted, measured, error = _fields(line, SOURCE_FIELDS, "sources")
    if mode not in ("^", "=", "#") or state not in [each.value for each in SourceState]:
        raise ChronyUnreadable(f"chronyc sources: mode {mode!r}, state {state!r} are unknown")
    if not _OCTAL.fullmatch(reach.strip()) or not _SIGNED.fullmatch(poll.strip()):
        raise ChronyUnreadable(f"chronyc sources: reach {reach!r} or poll {poll!r} is no number")
    _number(adjusted, "adjusted offset")
    _number(measured, "measured offset")
    seconds_ago = _whole(ago, "last sample")
    return Source(
        mode=mode,
        state=SourceState(state),
        name=name,
        stratum=_whole(stratum, "stratum"),
        reach=int(reach, 8),
        sample_seconds_ago=None if seconds_ago == NEVER_SECONDS else seconds_ago,
        error_seconds=_number(error, "error"),
    )


def _fields(line: str, count: int, what: str) -> list[str]:
    fields = line.split(",")
    if len(fields) != count:
        raise ChronyUnreadable(f"chronyc {what}: {len(fields)} fields instead of {count}")
    return fields


def _number(text: str, what: str) -> float:
    """A decimal number; nan and inf, which C prints too, are none."""
    if not _DECIMAL.fullmatch(text):
        raise ChronyUnreadable(f"chronyc: {what} {text[:40]!r} is no number")
    return float(text)


def _whole(text: str, what: str) -> int:
    if not _WHOLE.fullmatch(text):
        raise ChronyUnreadable(f"chronyc: {what} {text[:40]!r} is no whole number")
    return int(text)
