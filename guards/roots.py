"""Where the kernel's files are looked for. Injectable, so that a recorded tree of any device tests everything."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Roots:
    """Directories that stand for the box's own.

    Attributes:
        sys, proc, dev, etc, run: of the kernel and the system.
        path: directories in which tools are looked for (chronyc, smartctl, vcgencmd, nvidia-smi), sbin included:
            a service user's PATH often lacks them.
    """

    sys: Path = Path("/sys")
    proc: Path = Path("/proc")
    dev: Path = Path("/dev")
    etc: Path = Path("/etc")
    run: Path = Path("/run")
    path: str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
