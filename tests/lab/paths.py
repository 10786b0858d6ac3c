"""Where the lab keeps things, and how boxes are named and numbered."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from tests.lab.errors import LabError

REPOSITORY = Path(__file__).resolve().parents[2]
RUNTIME = Path("/run/fleet-lab")  # short, because mount options and socket paths are capped
NETWORK = "10.77.0"
HOST_ADDRESS = f"{NETWORK}.1"
CONTROL = "control"
CONTROL_NUMBER = 4
LARGEST_NUMBER = 99
_BOX_NAME = re.compile(r"box([1-9][0-9]?)")


def cache_directory() -> Path:
    """Directory of root trees: `$FLEET_LAB_CACHE`, else `/var/cache/fleet-lab`."""
    return Path(os.environ.get("FLEET_LAB_CACHE") or "/var/cache/fleet-lab")


def number_of(name: str) -> int:
    """The box's number, 1 to 99: last byte of its MAC, and 10 less than that of its address.

    `control` has number 4, so box1 to box3 have 1 to 3 and box4 onwards 5 onwards.

    Raises:
        LabError: `name` is neither `control` nor `box<number>`.
    """
    if name == CONTROL:
        return CONTROL_NUMBER
    match = _BOX_NAME.fullmatch(name)
    number = int(match[1]) if match else 0
    number += number >= CONTROL_NUMBER
    if not 1 <= number <= LARGEST_NUMBER:
        raise LabError(f"no box is called {name!r}", hint=f"names are {CONTROL} and box1 to box{LARGEST_NUMBER - 1}")
    return number


def standard_names(count: int) -> list[str]:
    """`count` stage boxes and the control box: `standard_names(3)` is box1, box2, box3, control."""
    return [*(f"box{number}" for number in range(1, count + 1)), CONTROL]


@dataclass(frozen=True)
class BoxPaths:
    """Files and names of one box, outside (below the state directory) and in its own mount namespace."""

    name: str
    directory: Path

    @property
    def address(self) -> str:
        return f"{NETWORK}.{10 + number_of(self.name)}"

    @property
    def mac(self) -> str:
        return f"02:77:00:00:00:{number_of(self.name):02x}"

    @property
    def namespace(self) -> str:
        """The box's network namespace."""
        return f"fl-{self.name}"

    @property
    def port(self) -> str:
        """The switch-side end of the box's cable, in the switch's network namespace."""
        return f"p-{self.name}"

    @property
    def disk(self) -> Path:
        return self.directory / "disk.img"

    @property
    def settings(self) -> Path:
        return self.directory / "settings.json"

    @property
    def launcher_record(self) -> Path:
        return self.directory / "launcher.json"

    @property
    def wire_record(self) -> Path:
        return self.directory / "wire.json"

    @property
    def console(self) -> Path:
        return self.directory / "console.log"

    @property
    def thermal(self) -> Path:
        """Bound over `/sys/class/thermal` in the box."""
        return self.directory / "thermal"

    @property
    def mounted_disk(self) -> Path:
        """The box's disk, as the box's launcher sees it."""
        return RUNTIME / self.name / "disk"

    @property
    def mounted_root(self) -> Path:
        """The box's root, as the box's launcher sees it."""
        return RUNTIME / self.name / "root"

    def mounted_layer(self, index: int) -> Path:
        """A saved disk below the box's own, as the box's launcher sees it."""
        return RUNTIME / self.name / f"layer{index}"


@dataclass(frozen=True)
class LabPaths:
    """Everything below one state directory, `build/lab` of this checkout unless told otherwise."""

    state: Path = REPOSITORY / "build" / "lab"

    @property
    def private_key(self) -> Path:
        """Logs in as root on every box of this lab."""
        return self.state / "id_ed25519"

    @property
    def known_hosts(self) -> Path:
        return self.state / "known_hosts"

    @property
    def host_keys(self) -> Path:
        """A box's sshd key outlives its disk, so that a pinned key stays true over `down` and `up`."""
        return self.state / "host-keys"

    @property
    def boxes(self) -> Path:
        return self.state / "boxes"

    @property
    def saved(self) -> Path:
        return self.state / "saved"

    def box(self, name: str) -> BoxPaths:
        number_of(name)
        return BoxPaths(name, self.boxes / name)
