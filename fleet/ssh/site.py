"""What the connections of one run share: deadlines, host keys, the start rate, and the switch that ends them all."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from fleet.inventory.sitefile import SiteFile
from fleet.ssh.deadlines import Deadlines
from fleet.ssh.hostkeys import HostKeyStore
from fleet.ssh.pool import Cancellation, StartLimiter


@dataclass(frozen=True)
class SshSite:
    """Shared by all boxes of a run."""

    deadlines: Deadlines
    host_keys: HostKeyStore
    starts: StartLimiter
    cancellation: Cancellation

    @classmethod
    def of(
        cls,
        site_file: SiteFile,
        *,
        report: Callable[[str], None],
        accept_host_keys: Iterable[str] = (),
        remember_host_keys: bool = True,
    ) -> SshSite:
        """From the inventory.

        Args:
            report: takes one line, e.g. that a host key was pinned.
            accept_host_keys: boxes whose changed host key replaces the pinned one (`--accept-host-key BOX`).
            remember_host_keys: False with `--check`, which writes nothing.
        """
        timing = site_file.site.timing
        return cls(
            Deadlines.of(timing),
            HostKeyStore(
                site_file.state_directory / "known_hosts",
                accept=frozenset(accept_host_keys),
                report=report,
                accept_command=f"fleet provision {site_file.file} --accept-host-key {{box}}",
                remember=remember_host_keys,
            ),
            StartLimiter(site_file.site.rollout.ssh_starts_per_second),
            Cancellation(),
        )
