"""A loaded inventory: the typed site, the file it came from, and the directories it names."""

from __future__ import annotations

import platform
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from fleet.inventory.model import Role, Site

KeyPath = tuple[str | int, ...]


@dataclass(frozen=True)
class SiteFile:
    """What `fleet.inventory.loader.load_site` returns.

    Attributes:
        site: the checked site, defaults and box_defaults applied.
        file: the inventory file.
        lines: key path → 1-based line, e.g. ("boxes", "pi-1", "address") → 31.
    """

    site: Site
    file: Path
    lines: Mapping[KeyPath, int]

    def resolve(self, path: str) -> Path:
        """A path of the inventory, relative to the inventory file's directory."""
        return (self.file.resolve().parent / Path(path).expanduser()).resolve()

    @property
    def state_directory(self) -> Path:
        """CA key, pinned host keys, local ports, generated API key; mode 0700."""
        return self.resolve(self.site.state_dir) / self.site.site

    @property
    def bundle_directory(self) -> Path:
        """What `fleet bundle` writes for this site."""
        return self.resolve(self.site.bundle_dir) / self.site.site

    def prefix_of(self, box: str) -> str:
        """Root of everything on a box, absolute; a local box has a directory of its own."""
        if self.site.boxes[box].connection == "local":
            return str(self.resolve(self.site.prefix) / box)
        return self.site.prefix

    def target_of(self, box: str) -> tuple[str, str]:
        """Architecture and Python version of a box, e.g. ("aarch64", "3.11"); auto is what runs here."""
        profile = self.site.device_profiles[self.site.boxes[box].profile]
        architecture = platform.machine() if profile.architecture == "auto" else profile.architecture
        running = f"{sys.version_info.major}.{sys.version_info.minor}"
        return architecture, running if profile.python == "auto" else profile.python

    def boxes_with(self, role: Role) -> tuple[str, ...]:
        """Names of the boxes that have a role, in inventory order."""
        return tuple(name for name, box in self.site.boxes.items() if role in box.roles)
