"""`fleet drill`: rehearse a failure on a live site."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import click

from fleet.cli.options import inventory_option, output_option

if TYPE_CHECKING:
    from fleet.drill.breaking import Kind, Strain
    from fleet.drill.guarded import GuardReport
    from fleet.drill.rehearsal import Report
    from fleet.inventory.sitefile import SiteFile

EPILOG = """
\b
Examples:
  fleet drill kill box2 --show -i inventory/local.yaml
  fleet drill power-cut pi-2 --seconds 30 --yes
  fleet drill link-cut pi-2 --streams 8 -o json --yes
  fleet drill heat pi-2 --yes
  fleet drill hang box1 -i inventory/local.yaml
"""
STRAINS = ("heat", "disk-full", "clock")
KINDS = ("power-cut", "kill", "hang", "link-cut", *STRAINS, "leak")
TRIP_SECONDS = 300.0  # within which a guard must have tripped
ANSWER_TOKENS = 120  # long enough to break in the middle, short enough to wait for twice
MARGIN_SECONDS = 60.0  # longest wait for a whole site beyond what the inventory's timing allows each part
LOCK_NAME = "drill.lock"


@click.command(epilog=EPILOG)
@click.argument("kind", type=click.Choice(KINDS))
@click.argument("box")
@inventory_option
@click.option(
    "--seconds",
    type=click.FloatRange(1, 3600),
    default=20.0,
    show_default=True,
    help="How long; not for kill, heat, disk-full, clock.",
)
@click.option("--streams", type=click.IntRange(1, 64), default=4, show_default=True, help="Answers that run meanwhile.")
@click.option("--show", is_flag=True, help="Show the first disturbed answer as it comes, on stderr.")
@click.option("--yes", is_flag=True, help="Do not ask before something is broken.")
@output_option
def drill(
    *, kind: Kind, box: str, inventory: Path, seconds: float, streams: int, show: bool, yes: bool, output: str
) -> int:
    """Break BOX for a while on a live site, and report what users would have noticed.

    \b
    power-cut  silence, then its stage is gone (real boxes only)
    link-cut   silence between it and the other boxes (real boxes only)
    kill       its stage process is killed
    hang       its stage process is stopped
    heat       its guards read a temperature that no chip has, until the stage's limits fall
    disk-full  a file without a name fills the disk of its prefix, until its guards say so
    clock      its clock jumps 5 s ahead, until its guards say so (real boxes only, as root)
    leak       always refused, with the reason: no stage can be made to leak from outside

    Exit code 0: no answer failed, nothing was lost or repeated (nor changed, under policy exact, but at a near-tie),
    and the site is whole again. 2: nobody to say yes (add --yes); 3: the coordinator is not reached; 4: another drill
    runs; else 1, also if you say no.
    """
    import asyncio

    from fleet.cli.output import print_json, print_table, progress
    from fleet.cli.site_verbs import known_box
    from fleet.drill.report import COLUMNS, as_data, lines, row
    from fleet.inventory.loader import load_site
    from fleet.provision.state_directory import site_lock

    site_file = load_site(inventory)
    known_box(site_file, box, inventory)
    wanted = _Wanted(site_file, inventory, kind, box, 0.0 if kind == "kill" else seconds, streams)
    with site_lock(site_file.state_directory, LOCK_NAME):
        _confirm(wanted, asyncio.run(_look(wanted)), yes=yes)
        if kind in STRAINS:
            return _guards_tested(wanted, output)
        report = asyncio.run(_rehearse(wanted, _Screen(show=show)))
    if output == "json":
        print_json("drill", as_data(report, kind, box))
    else:
        print_table(f"{kind} of {box}: {report.done}", COLUMNS, [row(one) for one in report.streams])
        for line in lines(report, box):
            progress(line)
    return int(report.exit_code)


def _guards_tested(wanted: _Wanted, output: str) -> int:
    """The drills of the guards."""
    import asyncio
    from dataclasses import asdict

    from fleet.cli.output import print_json, print_table, progress
    from fleet.drill.report import COLUMNS, row

    report = asyncio.run(_test_guards(wanted))
    if output == "json":
        data = {"kind": wanted.kind, "box": wanted.box, **asdict(report), "exit_code": int(report.exit_code)}
        print_json("drill", data)
        return int(report.exit_code)
    print_table(f"{wanted.kind} of {wanted.box}: {report.done}", COLUMNS, [row(one) for one in report.streams])
    for what, seconds in (("tripped", report.tripped_after_seconds), ("well again", report.back_after_seconds)):
        progress(f"{what}: {'not in time' if seconds is None else f'after {seconds:.0f} s'}")
    progress("users would have noticed more than a pause" if report.noticed else "users would have noticed nothing")
    return int(report.exit_code)


async def _test_guards(wanted: _Wanted) -> GuardReport:
    from fleet.cli.output import progress
    from fleet.drill.breaking import Breaker, strain_order
    from fleet.drill.guarded import GuardDrill
    from fleet.drill.streams import specs, users_of
    from fleet.errors import FleetError
    from fleet.observe.site_access import api_key, client_context, load_endpoints
    from fleet.ssh.site import SshSite

    site_file, kind = wanted.site_file, cast("Strain", wanted.kind)
    endpoints = load_endpoints(site_file)
    if endpoints.gateway is None or wanted.box not in endpoints.guards:
        message = f"{wanted.inventory}: there is no gateway to ask, or no guards run on {wanted.box}"
        raise FleetError(message, hint=f"fleet provision {wanted.inventory}")
    pipeline = site_file.site.pipelines[wanted.pipeline]
    drill = GuardDrill(
        kind=kind,
        box=wanted.box,
        policy=pipeline.policy,
        specs=specs(wanted.streams, min(ANSWER_TOKENS, pipeline.max_tokens_per_sequence // 2)),
        longest_seconds=TRIP_SECONDS,
        guards=endpoints.guards[wanted.box],
        context=client_context(site_file, with_certificate=True),
        report=progress,
    )
    ssh = SshSite.of(site_file, report=progress)
    order = strain_order(site_file, wanted.box, kind, TRIP_SECONDS + MARGIN_SECONDS)
    context = client_context(site_file, with_certificate=False)
    async with users_of(endpoints.gateway, context, api_key(site_file), pipeline.model) as users:
        return await drill.run(users, lambda: Breaker(site_file, wanted.box, ssh, order))


@dataclass(frozen=True)
class _Wanted:
    """What was asked for; seconds is 0 where the break ends by itself."""

    site_file: SiteFile
    inventory: Path
    kind: Kind
    box: str
    seconds: float
    streams: int

    @property
    def status(self) -> str:
        """The command that shows more."""
        return f"fleet status -i {self.inventory}"

    @property
    def whole_again_seconds(self) -> float:
        """The longest wait for a site that becomes whole by itself."""
        timing = self.site_file.site.timing
        back = timing.hold_down_max_seconds + timing.settle_seconds
        return back + timing.prepare_seconds + timing.switch_drain_seconds + MARGIN_SECONDS

    @property
    def pipeline(self) -> str:
        """The pipeline of the box."""
        pipelines = self.site_file.site.pipelines
        return next(name for name, line in pipelines.items() if self.box in line.boxes)


async def _look(wanted: _Wanted) -> dict[str, Any]:
    """Refuse what can't be rehearsed now, after a wait for what passes; the coordinator's document otherwise."""
    import asyncio
    import time

    from fleet.cli.output import progress
    from fleet.cli.site_verbs import coordinator
    from fleet.drill.checks import inventory_refusal, site_refusal
    from fleet.drill.rehearsal import POLL_SECONDS
    from fleet.errors import FleetError

    said, started = "", time.monotonic()
    refusal = inventory_refusal(wanted.site_file.site, wanted.pipeline, wanted.box, wanted.kind, wanted.streams)
    while refusal is None or (refusal.passes and time.monotonic() - started < wanted.whole_again_seconds):
        if refusal is not None:
            if refusal.message != said:
                said = refusal.message
                progress(f"waiting for a whole site, at most {wanted.whole_again_seconds:.0f} s: {said}")
            await asyncio.sleep(POLL_SECONDS)
        async with coordinator(wanted.site_file, wanted.inventory) as reached:
            document = await reached.site()
        refusal = site_refusal(document, wanted.box, wanted.status)
        if refusal is None:
            return document
    raise FleetError(f"no {wanted.kind} of {wanted.box} now: {refusal.message}", hint=refusal.hint)


def _confirm(wanted: _Wanted, document: dict[str, Any], *, yes: bool) -> None:
    """Say what will happen, and ask."""
    from fleet.drill.report import announcement
    from fleet.errors import ExitCode, FleetError
    from fleet.observe.draining import span_of

    if yes:
        return
    click.echo(
        announcement(wanted.kind, span_of(document, wanted.box), wanted.streams, wanted.seconds, box=wanted.box),
        err=True,
    )
    if not sys.stdin.isatty():
        raise FleetError("nobody is here to say yes", hint="add --yes", exit_code=ExitCode.USAGE)
    if not click.confirm("Go on?", err=True):
        raise FleetError("nothing was broken: the answer was no")


class _Screen:
    """Lines of progress, and between them an answer as it comes; a line never begins in the middle of another."""

    def __init__(self, *, show: bool) -> None:
        self._show = show
        self._in_line = False

    def line(self, text: str) -> None:
        """A line of progress."""
        from fleet.cli.output import progress

        progress(f"\n{text}" if self._in_line else text)
        self._in_line = False

    def text(self, piece: str) -> None:
        """A piece of the answer."""
        if self._show:
            sys.stderr.write(piece)
            sys.stderr.flush()
            self._in_line = not piece.endswith("\n")


async def _rehearse(wanted: _Wanted, screen: _Screen) -> Report:
    from fleet.cli.site_verbs import coordinator
    from fleet.drill.breaking import Breaker, order_of
    from fleet.drill.rehearsal import Rehearsal
    from fleet.drill.streams import specs, users_of
    from fleet.errors import FleetError
    from fleet.observe.site_access import api_key, client_context, load_endpoints
    from fleet.ssh.site import SshSite

    site_file = wanted.site_file
    gateway = load_endpoints(site_file).gateway
    if gateway is None:
        raise FleetError(f"{wanted.inventory}: the site has no gateway to ask", hint="give a box the role gateway")
    pipeline = site_file.site.pipelines[wanted.pipeline]
    rehearsal = Rehearsal(
        box=wanted.box,
        pipeline=wanted.pipeline,
        policy=pipeline.policy,
        specs=specs(wanted.streams, min(ANSWER_TOKENS, pipeline.max_tokens_per_sequence // 2)),
        lasts_seconds=wanted.seconds,
        longest_seconds=wanted.seconds + wanted.whole_again_seconds,
        status=wanted.status,
        report=screen.line,
        on_text=screen.text,
    )
    ssh = SshSite.of(site_file, report=screen.line)
    order = order_of(site_file, wanted.box, wanted.kind, wanted.seconds)
    context = client_context(site_file, with_certificate=False)
    async with (
        coordinator(site_file, wanted.inventory) as reached,
        users_of(gateway, context, api_key(site_file), pipeline.model) as users,
    ):
        return await rehearsal.run(users, reached, lambda: Breaker(site_file, wanted.box, ssh, order))
