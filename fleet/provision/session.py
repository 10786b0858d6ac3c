"""A conversation with the agent of one box: facts, then (perhaps) apply, in one connection and one command.

    ssh = SshSite.of(site_file, report=progress, accept_host_keys=())        # once a run
    def work(box: str) -> HostResult:
        with open_session(site_file, box, ssh, report=lambda line: progress(f"{box}: {line}")) as session:
            facts = session.facts(desired, texts=show_diff, hold_lock=not check)
            changes = diff(desired, facts)                                   # fleet.provision.diff
            if check or not changes:
                return HostResult(box, HostStatus.OK, changes=len(changes))
            session.apply(desired, changes, sign=lambda request_pem: certificate_pem)
            return HostResult(box, HostStatus.CHANGED, changes=len(changes))
    results = run_on_boxes(boxes, work, forks=site.rollout.forks, cancellation=ssh.cancellation)   # fleet.ssh.pool
    return exit_code(results)                                                # fleet.ssh.results

`run_on_boxes` turns `BoxError`, `BoxUnreachable` and bugs into results. All calls block; one thread a box.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType

from fleet.inventory.sitefile import SiteFile
from fleet.provision.desired import DesiredState
from fleet.provision.diff import Changes
from fleet.provision.facts import Facts
from fleet.ssh.site import SshSite

Report = Callable[[str], None]  # one line of progress
Sign = Callable[[str], str]  # certificate request (PEM) → certificate (PEM), by the site CA


@dataclass(frozen=True)
class ApplyResult:
    """What an apply that succeeded did.

    Attributes:
        changes: number of changes made.
        restarted: programs that were started or restarted.
        bytes_sent: payload bytes that travelled, after compression.
    """

    changes: int
    restarted: tuple[str, ...]
    bytes_sent: int


class BoxSession:
    """One agent on one box. Use as a context manager; leaving it ends the agent and closes the connection."""

    def facts(self, desired: DesiredState, *, texts: bool = False, hold_lock: bool = True) -> Facts:
        """Ask what the box has of what is managed. Writes nothing on the box, but the run lock below /run.

        Args:
            texts: bring small text files too, for unified diffs.
            hold_lock: take the box's run lock until the session ends; False for `--check`.

        Raises:
            BoxError: locked by another run (exit code 4), or the agent failed. BoxUnreachable: silence.
        """
        raise NotImplementedError

    def apply(self, desired: DesiredState, changes: Changes, *, sign: Sign) -> ApplyResult:
        """Make the changes, activate, and wait for the health gate.

        Raises:
            BoxError: a step failed; exit code 5 if the health gate failed and the previous release is active again
                (`detail` holds the failed programs' logs).
        """
        raise NotImplementedError

    def stop(self, desired: DesiredState) -> tuple[str, ...]:
        """Shut supervisord and its programs down, and wait until their processes are gone.

        Returns:
            Names of the programs that were stopped; empty if nothing ran.
        """
        raise NotImplementedError

    def __enter__(self) -> BoxSession:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        raise NotImplementedError


def open_session(site_file: SiteFile, box: str, ssh: SshSite, report: Report) -> BoxSession:
    """Start the agent on a box: over ssh, or as a local process for `connection: local`.

    Raises:
        BoxUnreachable: no connection within its deadlines. BoxError: host key changed, sudo asks for a password,
            no usable Python.
    """
    raise NotImplementedError
