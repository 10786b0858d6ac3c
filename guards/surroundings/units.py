"""Units of systemd that have failed."""

from __future__ import annotations

from dataclasses import dataclass

from guards.findings import Finding, Repair, State
from guards.roots import Roots
from guards.settings import SurroundingsSettings
from guards.tools import ToolFailed, ToolMissing, run_tool

NO_SYSTEMD = ("not been booted with systemd", "Failed to connect to bus")
MOST_NAMED = 5


@dataclass(frozen=True)
class Units:
    """Names of failed units; None with the problem where they could not be found out. absent: no systemd here."""

    failed: tuple[str, ...] | None
    problem: str = ""
    absent: bool = False


def sense_units(roots: Roots, settings: SurroundingsSettings) -> Units:
    """Ask systemd; takes a process. Plain columns, because `--output=json` came with systemd 246 only and JetPack 5
    has 245."""
    if not (roots.run / "systemd/system").is_dir():  # sd_booted(3)
        return Units(None, "no systemd", absent=True)
    argv = ("systemctl", "list-units", "--failed", "--plain", "--no-legend", "--no-pager", "--full")
    try:
        answer = run_tool(roots, *argv, deadline_seconds=settings.tool_seconds)
    except ToolMissing:
        return Units(None, "no systemctl", absent=True)
    except ToolFailed as error:
        return Units(None, str(error))
    if answer.code != 0:
        absent = any(text in answer.error for text in NO_SYSTEMD)
        return Units(None, answer.error or f"systemctl: exit {answer.code}", absent=absent)
    return Units(parse_units(answer.text))


def parse_units(text: str) -> tuple[str, ...]:
    """First column of each line; systemd before 237 draws a bullet in front of it even so."""
    words = (line.replace("●", " ").split() for line in text.splitlines())
    return tuple(each[0] for each in words if each)


def judge_units(units: Units, settings: SurroundingsSettings) -> tuple[Finding, ...]:
    """One finding."""
    del settings  # one failed unit is one too many
    if units.failed is None:
        state = State.UNSUPPORTED if units.absent else State.DEGRADED
        repair = Repair.NONE if units.absent else Repair.CHECK_PROGRAM
        return (Finding("units", state, units.problem, {"failed_units": None}, repair),)
    evidence = {"failed_units": len(units.failed)}
    if not units.failed:
        return (Finding("units", State.HEALTHY, "", evidence),)
    more = len(units.failed) - MOST_NAMED
    reason = "failed: " + ", ".join(units.failed[:MOST_NAMED]) + (f" and {more} more" if more > 0 else "")
    return (Finding("units", State.DEGRADED, reason, evidence, Repair.CHECK_PROGRAM),)
