"""Stopping a local site: every supervisord with its programs, box by box in parallel."""

from __future__ import annotations

import os
from collections.abc import Callable

from fleet.errors import FleetError
from fleet.inventory.sitefile import SiteFile
from fleet.provision.desired import DesiredState, IdentitySpec, SupervisorSpec
from fleet.provision.render_layout import layout_of
from fleet.provision.session import open_session
from fleet.provision.step_lines import StepLines
from fleet.ssh.pool import run_on_boxes
from fleet.ssh.results import HostResult, HostStatus
from fleet.ssh.site import SshSite


def require_local(site_file: SiteFile) -> None:
    """Refuse a site that has boxes over ssh.

    Raises:
        FleetError: names them.
    """
    remote = [name for name, box in site_file.site.boxes.items() if box.connection != "local"]
    if remote:
        raise FleetError(
            f"{site_file.file}: fleet down stops local sites only; reached over ssh: {', '.join(remote)}",
            hint=f"on one box: systemctl stop fleet-supervisord (`fleet provision {site_file.file}` starts it again)",
        )


def bare_state(site_file: SiteFile, box: str, uid: int) -> DesiredState:
    """What a box's agent must know to find its supervisord; nothing is managed. Needs no bundle."""
    layout = layout_of(site_file, box, uid)
    return DesiredState(
        box=box,
        prefix=layout.prefix,
        privileged=not layout.local,
        user=layout.user,
        packages=(),
        directories=(),
        files=(),
        trees=(),
        environments=(),
        links=(),
        identity=IdentitySpec(layout.tls["key"], layout.tls["certificate"], box, site_file.site.site, (), ""),
        supervisor=SupervisorSpec(layout.supervisor_config, "", layout.supervisor_socket, None, ""),
        programs=(),
        health_gate_seconds=site_file.site.timing.health_gate_seconds,
    )


def stop_site(
    site_file: SiteFile, report: Callable[[str], None]
) -> tuple[dict[str, tuple[str, ...]], tuple[HostResult, ...]]:
    """Stop everything of a local site and wait until its processes are gone.

    Returns:
        Names of the stopped programs by box, in inventory order, and the outcome of each box.
    """
    ssh = SshSite.of(site_file, report=report)
    stopped: dict[str, tuple[str, ...]] = {}

    def work(box: str) -> HostResult:
        with open_session(site_file, box, ssh, StepLines(lambda line: report(f"{box}: {line}"))) as session:
            stopped[box] = session.stop(bare_state(site_file, box, os.getuid()))
        return HostResult(box, HostStatus.CHANGED if stopped[box] else HostStatus.OK)

    boxes = tuple(site_file.site.boxes)
    results = run_on_boxes(boxes, work, forks=site_file.site.rollout.forks, cancellation=ssh.cancellation)
    return {box: stopped[box] for box in boxes if box in stopped}, results


def down_line(box: str, programs: tuple[str, ...]) -> str:
    """What was stopped on a box, in words."""
    return f"{box}: stopped {', '.join(programs)}" if programs else f"{box}: no program was running"
