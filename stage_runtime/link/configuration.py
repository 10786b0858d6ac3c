"""Configuration files of our programs (stage.json, gateway.json, coordinator.json): read strictly, parts they share."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from fleet.errors import ExitCode, FleetError
from stage_runtime.link.connection import LinkTiming
from stage_runtime.link.section import Section
from stage_runtime.link.tls import TlsIdentity

PROBLEM_CHARACTERS = 500

T = TypeVar("T")


@dataclass(frozen=True)
class Address:
    """Where something listens."""

    host: str
    port: int


def read_configuration(path: Path, parse: Callable[[Section], T], *, schema: int, most_bytes: int) -> T:
    """Read a program's file.

    Args:
        parse: makes it of the decoded file; raises ValueError that names the key.
        schema: that the file must have. most_bytes: of it.

    Raises:
        FleetError: not readable, too large, not JSON, another schema, or what `parse` raises; exit code 78.
    """
    try:
        with path.open("rb") as file:
            data = file.read(most_bytes + 1)
        if len(data) > most_bytes:
            raise ValueError(f"larger than {most_bytes} bytes")
        return parse_configuration(_decoded(data), parse, schema=schema)
    except OSError as error:
        reason = error.strerror or str(error)
    except ValueError as error:
        reason = str(error)
    raise FleetError(
        f"{path}: {reason[:PROBLEM_CHARACTERS]}",
        hint="this file is written by `fleet provision INVENTORY`; run it again",
        exit_code=ExitCode.INVALID_INVENTORY,
    )


def parse_configuration(data: object, parse: Callable[[Section], T], *, schema: int) -> T:
    """The same of a decoded file.

    Raises:
        ValueError: another schema, or what `parse` raises.
    """
    whole = Section(data)
    if (found := whole.integer("schema", 0)) != schema:
        raise ValueError(f"schema: read {found}, this version knows {schema}")
    return parse(whole)


def address(section: Section, *, low: int = 0) -> Address:
    """Host and port; ValueError otherwise. `low=0`: the system may choose the port to listen on."""
    section.only("host", "port")
    return Address(section.text("host"), section.port("port", low=low))


def tls_identity(whole: Section) -> TlsIdentity:
    """The program's certificate: `tls`, and `clock_synchronised_file` beside it; ValueError otherwise."""
    tls = whole.section("tls").only("ca", "certificate", "key")
    clock = whole.optional_path("clock_synchronised_file")
    return TlsIdentity(tls.path("ca"), tls.path("certificate"), tls.path("key"), clock)


def link_timing(timing: Section) -> LinkTiming:
    """Of links, from the `ring_*` fields of a `timing` section, which may have others; ValueError otherwise."""
    seconds = {name: timing.seconds(name) for name in timing.names()}
    try:
        return LinkTiming.from_config(seconds)
    except KeyError as error:
        raise ValueError(f"key 'timing.{error.args[0]}' is missing") from None


def _decoded(data: bytes) -> object:
    try:
        return json.loads(data)
    except RecursionError:
        raise ValueError("no JSON: nested too deeply") from None
    except ValueError as error:
        raise ValueError(f"no JSON: {error}") from None
