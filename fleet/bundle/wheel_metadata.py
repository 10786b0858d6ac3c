"""What a wheel says about itself, read from the zip without installing it."""

from __future__ import annotations

import zipfile
from dataclasses import dataclass
from email.parser import Parser
from pathlib import Path

from fleet.errors import FleetError

LARGEST_METADATA_BYTES = 8 << 20
"""METADATA holds the readme too; eight mebibytes are far above any."""


@dataclass(frozen=True)
class WheelMetadata:
    """Name, version and Requires-Dist lines of a wheel."""

    name: str
    version: str
    requires: tuple[str, ...]


def read_wheel_metadata(wheel: Path) -> WheelMetadata:
    """Read `*.dist-info/METADATA` of a wheel.

    Raises:
        FleetError: not a zip, truncated, or without metadata.
    """
    hint = f"delete {wheel} and fetch it again"
    try:
        with zipfile.ZipFile(wheel) as archive:
            name = next(
                (each for each in archive.namelist() if each.count("/") == 1 and each.endswith(".dist-info/METADATA")),
                None,
            )
            if name is None or archive.getinfo(name).file_size > LARGEST_METADATA_BYTES:
                raise FleetError(f"{wheel} has no usable METADATA: it is not a wheel", hint=hint)
            message = Parser().parsestr(archive.read(name).decode("utf-8", "replace"), headersonly=True)
    except (zipfile.BadZipFile, OSError) as error:
        raise FleetError(f"{wheel} is not a whole wheel: {error}", hint=hint) from error
    requires = tuple(str(line) for line in message.get_all("Requires-Dist", []))
    return WheelMetadata(str(message["Name"]), str(message["Version"]), requires)
