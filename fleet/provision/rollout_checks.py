"""What must be true of a box before anything is written to it. Pure: facts in, an error with numbers out."""

from __future__ import annotations

from collections.abc import Sequence

from fleet.inventory.model import DeviceProfile
from fleet.provision.desired import DesiredState
from fleet.provision.diff import Change
from fleet.provision.facts import Facts, SystemFact
from fleet.provision.render_bundle import profile_architecture, profile_python
from fleet.provision.supervisor_config import LOG_SHARE_OF_FREE_DISK, log_bytes
from fleet.ssh.results import BoxError

STEP = "check before writing"
# An environment needs its wheels, once, and the unpacked files: measured 3.4 times the wheels for torch 2.13 (CPU).
ENVIRONMENT_SPACE_FACTOR = 5
SPARE_DISK_BYTES = 64 << 20  # left free after everything is written
MEGABYTE = 1_000_000


def check_box(box: str, profile: DeviceProfile, desired: DesiredState, facts: Facts, changes: Sequence[Change]) -> None:
    """Refuse a box that cannot become what is desired.

    Raises:
        BoxError: wrong architecture or Python, missing Debian packages, too little disk.
    """
    _check_machine(box, profile, facts.system)
    if facts.packages_missing:
        missing = " ".join(facts.packages_missing)
        raise BoxError(
            box,
            STEP,
            f"Debian packages are missing: {missing}",
            hint=f"on {box}: apt-get install {missing}",
        )
    _check_disk(box, desired, facts.system, changes)


def disk_bytes(changes: Sequence[Change]) -> int:
    """Disk that changes take at most, bytes."""
    return sum(
        change.bytes_to_send * (ENVIRONMENT_SPACE_FACTOR if change.kind == "environment" else 1) for change in changes
    )


def _check_machine(box: str, profile: DeviceProfile, system: SystemFact) -> None:
    architecture, python = profile_architecture(profile), profile_python(profile)
    if system.architecture != architecture:
        raise BoxError(
            box,
            STEP,
            f"is a {system.architecture} machine, its profile says {architecture}",
            hint=f"give {box} another profile in the inventory, then: fleet bundle",
        )
    if system.python.split(".")[:2] != python.split(".")[:2]:
        raise BoxError(
            box,
            STEP,
            f"runs Python {system.python} ({system.python_path}), its profile says {python}",
            hint=f"install python{python} on {box}, or correct the profile's python, then: fleet bundle",
        )


def _check_disk(box: str, desired: DesiredState, system: SystemFact, changes: Sequence[Change]) -> None:
    wanted = disk_bytes(changes)
    if wanted == 0:
        return
    needed = wanted + SPARE_DISK_BYTES
    if any(change.kind == "environment" for change in changes):  # a new box: room for the logs of years, too
        needed = wanted + max(SPARE_DISK_BYTES, int(log_bytes(len(desired.programs)) / LOG_SHARE_OF_FREE_DISK))
    if system.disk_free_bytes < needed:
        raise BoxError(
            box,
            STEP,
            f"needs {_megabytes(needed)} of disk below {desired.prefix}, {_megabytes(system.disk_free_bytes)} are free",
            hint=f"on {box}: du -xh --max-depth=2 {desired.prefix} | sort -h",
        )


def _megabytes(size: int) -> str:
    return f"{size / MEGABYTE:.0f} MB"
