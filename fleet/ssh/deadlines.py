"""Named deadlines of a connection, all in seconds."""

from __future__ import annotations

from dataclasses import dataclass

from fleet.inventory.model import Timing


@dataclass(frozen=True)
class Deadlines:
    """How long each part of a connection may take; see the fields of the same names in the inventory's Timing."""

    connect_seconds: float
    banner_seconds: float
    auth_seconds: float
    channel_seconds: float
    step_seconds: float
    quiet_seconds: float
    keepalive_seconds: float

    @classmethod
    def of(cls, timing: Timing) -> Deadlines:
        """The `ssh_*` fields of the inventory's timing section."""
        return cls(
            connect_seconds=timing.ssh_connect_seconds,
            banner_seconds=timing.ssh_banner_seconds,
            auth_seconds=timing.ssh_auth_seconds,
            channel_seconds=timing.ssh_channel_seconds,
            step_seconds=timing.ssh_step_seconds,
            quiet_seconds=timing.ssh_quiet_seconds,
            keepalive_seconds=timing.ssh_keepalive_seconds,
        )
