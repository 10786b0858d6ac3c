"""A provisioning run: every box in parallel to its desired state, then the site's readiness gate."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from fleet.errors import FleetError
from fleet.inventory.sitefile import SiteFile
from fleet.planning.spec import PipelineSpec
from fleet.provision.desired import DesiredState
from fleet.provision.diff import Change, diff
from fleet.provision.pki import (
    SiteAuthority,
    ensure_authority,
    ensure_operator,
    load_authority,
    sign_request,
)
from fleet.provision.ports import gateway_box, site_ports
from fleet.provision.release import read_library
from fleet.provision.render import RenderInputs, needs_cores, render
from fleet.provision.render_bundle import BundleView
from fleet.provision.render_etc import external_pipelines
from fleet.provision.render_layout import check_local_prefix
from fleet.provision.rollout_checks import check_box
from fleet.provision.rollout_gate import wait_until_ready, wait_until_spread
from fleet.provision.rollout_state import (
    ENDPOINTS_FILE,
    api_keys_file,
    client_key,
    endpoints,
    known_cores,
    last_failures,
    remember_cores,
    remember_failures,
)
from fleet.provision.rollout_targets import coordinator_target, gateway_target
from fleet.provision.sending import files_to_send
from fleet.provision.session import BoxSession, open_session
from fleet.provision.state_directory import write_private_json
from fleet.provision.step_lines import StepLines
from fleet.provision.table import BoxReport, Gate, RunReport
from fleet.provision.turns import Turns
from fleet.ssh.pool import run_on_boxes
from fleet.ssh.results import BoxError, HostResult, HostStatus
from fleet.ssh.site import SshSite

NO_CA_YET = b"# the first `fleet provision` makes the site CA\n"


@dataclass(frozen=True)
class RolloutOptions:
    """How to run.

    Attributes:
        check: change nothing anywhere. texts: bring small text files for diffs.
        forks: boxes at once. accept_host_keys: boxes whose changed ssh host key is accepted.
        at_once: restart programs on all boxes at the same time, even while the site serves.
        every_step: report short steps too.
    """

    check: bool
    texts: bool
    forks: int
    accept_host_keys: tuple[str, ...] = ()
    at_once: bool = False
    every_step: bool = False


@dataclass(frozen=True)
class Prepared:
    """What a run works from; `authority` is None with `--check` as long as the site has none."""

    inputs: RenderInputs
    authority: SiteAuthority | None


@dataclass(frozen=True)
class _Run:
    """What all boxes of a run share."""

    prepared: Prepared
    options: RolloutOptions
    turns: Turns


@dataclass
class _Progress:
    """What is known of a box so far, for its row even when a later step fails."""

    changes: tuple[Change, ...] = ()
    seconds: float = 0.0
    cores: int | None = None


def prepare(site_file: SiteFile, bundle: BundleView, specs: Mapping[str, PipelineSpec], *, keep: bool) -> Prepared:
    """Ports, site CA, operator's certificate, API key; with `keep` what is new is written down.

    Args:
        specs: every pipeline of our engine as the coordinator gets it.
        keep: False with `--check`: nothing is made, nothing is written.

    Raises:
        FleetError: a prefix that cannot work, damaged state directory, wrong clock, no free port, unreadable wheel.
    """
    check_local_prefix(site_file)
    state = site_file.state_directory
    name = site_file.site.site
    library = read_library(bundle.wheel_path)
    authority = ensure_authority(state, name) if keep else load_authority(state, name)
    if keep and authority is not None:
        ensure_operator(authority, state)
    cores = known_cores(state)
    for box, spec in site_file.site.boxes.items():
        if spec.connection == "local":
            cores[box] = len(os.sched_getaffinity(0))
    inputs = RenderInputs(
        site_file=site_file,
        bundle=bundle,
        library=library,
        specs=specs,
        ports=site_ports(site_file, keep=keep),
        ca_pem=NO_CA_YET if authority is None else authority.certificate_pem,
        ca_sha256="" if authority is None else authority.sha256,
        api_keys=api_keys_file(site_file, client_key(site_file, create=keep)),
        cores=cores,
        uid=os.getuid(),
    )
    if keep:
        write_private_json(state / ENDPOINTS_FILE, endpoints(site_file, inputs.ports))
    return Prepared(inputs, authority)


def roll_out(
    prepared: Prepared, boxes: Sequence[str], options: RolloutOptions, report: Callable[[str], None]
) -> RunReport:
    """Bring boxes to their desired state, or with `check` only compare.

    Args:
        boxes: chosen boxes, in inventory order.
        report: takes one line of progress.

    Raises:
        KeyboardInterrupt: after all sessions were closed; every box finishes or undoes its own step.
    """
    site_file = prepared.inputs.site_file
    ssh = SshSite.of(
        site_file,
        report=report,
        accept_host_keys=options.accept_host_keys,
        remember_host_keys=not options.check,
    )
    known, timing = {box: _Progress() for box in boxes}, site_file.site.timing
    switch_seconds = timing.settle_seconds + timing.prepare_seconds + timing.switch_drain_seconds
    turns = Turns(
        coordinator_target(prepared.inputs),
        prepared.inputs.specs,
        at_once=options.at_once,
        seconds=timing.ready_gate_seconds + switch_seconds,
        cancellation=ssh.cancellation,
        report=report,
    )
    run = _Run(prepared, options, turns)

    def work(box: str) -> HostResult:
        start = time.monotonic()
        try:
            lines = StepLines(lambda line: report(f"{box}: {line}"), every_step=options.every_step)
            with open_session(site_file, box, ssh, lines) as session:
                return _bring(run, box, session, known[box])
        except BoxError:
            raise
        except FleetError as error:  # of rendering or signing: this box fails, the others go on
            raise BoxError(box, "prepare", error.message, hint=error.hint, exit_code=error.exit_code) from error
        finally:
            known[box].seconds = time.monotonic() - start

    results = run_on_boxes(boxes, work, forks=options.forks, cancellation=ssh.cancellation)
    if not options.check:
        _remember(site_file, known, results)
    gate, message = _gate(prepared, boxes, results, options, report)
    reports = tuple(BoxReport(result, known[result.box].changes, known[result.box].seconds) for result in results)
    return RunReport(reports, options.check, gate, message)


def _bring(run: _Run, box: str, session: BoxSession, known: _Progress) -> HostResult:
    """One box: ask, judge, compare, change."""
    prepared, options, inputs = run.prepared, run.options, run.prepared.inputs
    site = inputs.site_file.site
    desired = render(inputs, box)
    facts = session.facts(desired, texts=options.texts, hold_lock=not options.check)
    cores = facts.system.cores
    if needs_cores(inputs.site_file, box) and site.boxes[box].connection == "ssh" and cores != inputs.cores.get(box):
        known.cores = cores
        desired = render(replace(inputs, cores={**inputs.cores, box: cores}), box)
        facts = session.facts(desired, texts=options.texts, hold_lock=not options.check)
    changes = diff(desired, facts)
    known.changes = changes
    check_box(box, site.device_profiles[site.boxes[box].profile], desired, facts, changes)
    if not changes:
        return HostResult(box, HostStatus.OK)
    if not options.check:
        inputs.bundle.verify(files_to_send(desired, changes))
        with run.turns.of(box, changes) as turn:
            session.apply(desired, changes, sign=lambda request: _sign(prepared, desired, request), begin=turn.begin)
    return HostResult(box, HostStatus.CHANGED, changes=len(changes))


def _sign(prepared: Prepared, desired: DesiredState, request_pem: str) -> str:
    """Sign what a box asks for, with the names that we hold for it."""
    if prepared.authority is None:
        raise FleetError(f"{desired.box}: asks for a certificate in a run that signs none")
    identity = desired.identity
    return sign_request(prepared.authority, request_pem, identity.common_name, identity.subject_alternative_names)


def _remember(site_file: SiteFile, known: dict[str, _Progress], results: Sequence[HostResult]) -> None:
    measured = {box: progress.cores for box, progress in known.items() if progress.cores is not None}
    if measured:
        remember_cores(site_file.state_directory, measured)
    bad = {result.box for result in results if result.status in (HostStatus.FAILED, HostStatus.UNREACHABLE)}
    left_out = set(last_failures(site_file.state_directory)) - set(known)
    remember_failures(site_file.state_directory, bad | left_out)


def gate_skipped(site_file: SiteFile, boxes: Sequence[str], results: Sequence[HostResult], *, check: bool) -> str:
    """Why the readiness gate has nothing to judge; empty if it has. Pure."""
    if check:
        return "no readiness gate: --check changes nothing"
    gateway = gateway_box(site_file)
    if gateway is None:
        return "no readiness gate: the site has no gateway"
    external = external_pipelines(site_file)
    pipelines = {name: line for name, line in site_file.site.pipelines.items() if name not in external}
    needed = {gateway, *(box for pipeline in pipelines.values() for box in pipeline.boxes)}
    missing = sorted(needed - set(boxes))
    if missing:
        return f"no readiness gate: this run left out {', '.join(missing)}"
    bad = [result for result in results if result.box in needed and result.status is HostStatus.UNREACHABLE]
    bad += [result for result in results if result.box in needed and result.status is HostStatus.FAILED]
    if bad:
        why = ", ".join(f"{result.box} {result.status.value}" for result in bad)
        return f"no readiness gate: {why}"
    return ""


def _gate(
    prepared: Prepared,
    boxes: Sequence[str],
    results: Sequence[HostResult],
    options: RolloutOptions,
    report: Callable[[str], None],
) -> tuple[Gate, str]:
    site_file, target = prepared.inputs.site_file, gateway_target(prepared.inputs)
    skipped = gate_skipped(site_file, boxes, results, check=options.check)
    if skipped or target is None:
        return Gate.SKIPPED, skipped
    longest = site_file.site.timing.ready_gate_seconds
    reason = wait_until_ready(target, seconds=longest, report=report)
    if reason is not None:
        return Gate.NOT_READY, f"not ready after {longest:.0f} s: gateway on {gateway_box(site_file)} says: {reason}"
    coordinator = coordinator_target(prepared.inputs)
    spread = wait_until_spread(coordinator, seconds=longest, report=report) if coordinator else None
    said = f"ready: https://{target.host}:{target.port} answers for {', '.join(sorted(site_file.site.models))}"
    return Gate.READY, said if spread is None else f"{said}; the plan is not at rest yet: {spread}"
