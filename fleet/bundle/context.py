"""What every step of building a bundle works with."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from fleet.bundle.files import DigestCache, Report
from fleet.bundle.pip import Pip


@dataclass(frozen=True)
class BuildContext:
    """One run of `fleet bundle`.

    Attributes:
        bundle: the bundle's directory.
        pip: pip of the office.
        cache: digests of files.
        refresh: look for newer wheels even if nothing changed.
    """

    bundle: Path
    pip: Pip
    cache: DigestCache
    refresh: bool = False

    @property
    def state(self) -> Path:
        """Records of what was made from what; not part of the bundle."""
        return self.bundle / ".state"

    @property
    def report(self) -> Report:
        """Takes one line of progress."""
        return self.pip.report
