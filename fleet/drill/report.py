"""A drill's report as rows, lines and JSON; pure."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from fleet.drill.breaking import Kind
from fleet.drill.judge import StreamVerdict
from fleet.drill.rehearsal import Report
from fleet.observe.draining import Span
from fleet.observe.event_rows import phases

COLUMNS = (
    "stream",
    "tokens",
    "completed",
    "lost",
    "repeated",
    "changed",
    "near-tie",
    "longest pause ms",
    "usual ms",
    "error",
)
DOES = {
    "kill": "kills the stage process of {box}; supervisord starts it again at once",
    "hang": "stops the stage process of {box} (SIGSTOP) and lets it go on after {seconds:g} s",
    "link-cut": "cuts all traffic between {box} and the other boxes, silently, for {seconds:g} s",
    "power-cut": "cuts {box} off silently for {seconds:g} s and kills its stage, as if its power were gone",
    "heat": "lets the guards of {box} read a temperature above their threshold until its stage's limits fall",
    "disk-full": "fills the disk of the prefix of {box} until its guards call it full",
    "clock": "sets the clock of {box} 5 s ahead until its guards say so",
}


def announcement(kind: Kind, span: Span | None, streams: int, seconds: float, *, box: str) -> str:
    """What will be done, and what users may notice."""
    layers = "" if span is None else f" (layers {span.start}-{span.end - 1})"
    does = DOES[kind].format(box=f"{box}{layers}", seconds=seconds)
    lines = [f"This {does}. Meanwhile {streams} answers of its own run."]
    if kind != "kill":
        lines.append("The box undoes that itself, even if this machine goes away.")
    lines.append(
        "Users may notice a pause of up to a few seconds in answers that run, once at the break; the site is slower "
        f"until {box} is back, after its hold-down."
    )
    return "\n".join(lines)


def row(one: StreamVerdict) -> tuple[str, ...]:
    """As `COLUMNS`."""
    return (
        one.name,
        str(one.tokens),
        "yes" if one.completed else "NO",
        str(one.lost),
        str(one.repeated),
        str(one.changed),
        "yes" if one.near_tie else "",
        f"{one.longest_pause_milliseconds:.0f}",
        f"{one.usual_pause_milliseconds:.0f}",
        one.error,
    )


def lines(report: Report, box: str) -> list[str]:
    """What the table does not say."""
    said = [f"{event.text or event.kind}: {phases(event)} ms" for event in report.switches if event.milliseconds]
    if not report.switches:
        said.append("no new plan was needed: nobody took the layers over")
    for one in report.streams:
        if one.margin is not None:
            word = "a near-tie, which `exact` admits" if one.near_tie else "no near-tie"
            said.append(f"{one.name}: another token at {one.first_difference}: {word} ({one.margin})")
    pause = max((one.longest_pause_milliseconds for one in report.streams), default=0.0)
    if report.noticed:
        said.append("users would have noticed failed, lost, repeated or changed output: see the table")
    else:
        but = " and another wording from a near-tie on" if any(one.near_tie for one in report.streams) else ""
        said.append(f"users would have noticed a pause of {pause:.0f} ms{but or ' and nothing else'}")
    if report.whole_after_seconds is None:
        said.append(f"the site is not whole again: {report.missing}")
    else:
        said.append(f"{box} takes part again and the plan is whole, {report.whole_after_seconds:.1f} s after the break")
    return said


def as_data(report: Report, kind: Kind, box: str) -> dict[str, Any]:
    """For `-o json`."""
    data = asdict(report)
    return {"kind": kind, "box": box, **data, "exit_code": int(report.exit_code)}
