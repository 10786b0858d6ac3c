"""coordinator.json as `fleet provision` writes it; strict, and every complaint names the key."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from fleet.errors import ExitCode, FleetError
from fleet.planning.cost import BoxCost
from fleet.planning.spec import PipelineSpec, box_from_json, spec_from_json
from stage_runtime.link.connection import LinkTiming
from stage_runtime.link.section import PROBLEM_CHARACTERS, Section
from stage_runtime.link.tls import TlsIdentity

CONFIG_SCHEMA = 1
MAX_CONFIG_BYTES = 64 * 2**20  # 512 boxes and a cost of each layer of every model


@dataclass(frozen=True)
class Address:
    """Where to listen."""

    host: str
    port: int


@dataclass(frozen=True)
class BoxConfig:
    """A stage box.

    Attributes:
        host: address from the inventory. ring_port: where its ring listens.
        cost: nominal, until measured.
    """

    host: str
    ring_port: int
    cost: BoxCost


@dataclass(frozen=True)
class CoordinatorTiming:
    """The inventory's deadlines that the coordinator judges by, in seconds; see `fleet docs inventory`."""

    heartbeat_seconds: float
    hung_seconds: float
    ring_trouble_seconds: float
    prepare_seconds: float
    switch_drain_seconds: float
    settle_seconds: float
    hold_down_seconds: float
    hold_down_max_seconds: float
    hold_down_forget_seconds: float
    ring_reconnect_max_seconds: float
    ring_silence_seconds: float

    @property
    def redial_seconds(self) -> float:
        """Whoever lives has dialled again by then: the longest wait of its back-off."""
        return self.ring_reconnect_max_seconds

    @property
    def dial_seconds(self) -> float:
        """A fair time to dial again for a box that nobody accuses: its back-off, and one silence to notice by."""
        return self.ring_reconnect_max_seconds + self.ring_silence_seconds


@dataclass(frozen=True)
class CoordinatorConfig:
    """What a coordinator is told.

    Attributes:
        site, box: whose coordinator it is, and where it runs.
        listen: the control channel. http: the API.
        database: coordinator.sqlite.
        pipelines: by name. boxes: every stage box by name.
        gateways: boxes whose gateways may connect; None: every box with a certificate of the site.
        timing: judged by. link_timing: of the control channel's links.
    """

    site: str
    box: str
    listen: Address
    http: Address
    tls: TlsIdentity
    database: Path
    pipelines: Mapping[str, PipelineSpec]
    boxes: Mapping[str, BoxConfig]
    gateways: frozenset[str] | None
    timing: CoordinatorTiming
    link_timing: LinkTiming

    def pipeline_of(self, box: str) -> str:
        """The pipeline that a box belongs to; empty if none."""
        return next((name for name, spec in self.pipelines.items() if box in spec.boxes), "")


def load_config(path: Path) -> CoordinatorConfig:
    """Read coordinator.json.

    Raises:
        FleetError: not readable, not JSON, another schema, a key missing or of the wrong type or value.
    """
    try:
        with path.open("rb") as file:
            data = json.loads(file.read(MAX_CONFIG_BYTES))
        return parse_config(data)
    except OSError as error:
        reason = f"cannot read it: {error.strerror}"
    except RecursionError:
        reason = "no JSON: nested too deeply"
    except ValueError as error:  # covers JSON and what `parse_config` raises
        reason = str(error)
    except KeyError as error:  # a ring_* field of the links' timing
        reason = f"key 'timing.{error.args[0]}' is missing"
    raise FleetError(
        f"{path}: {reason[:PROBLEM_CHARACTERS]}",
        hint="write the configuration anew: fleet provision",
        exit_code=ExitCode.INVALID_INVENTORY,
    )


def parse_config(data: Any) -> CoordinatorConfig:
    """The typed configuration of a decoded coordinator.json.

    Raises:
        ValueError: a key is missing or wrong; names it.
        KeyError: a `ring_*` field is missing.
    """
    whole = Section(data)
    if (schema := whole.integer("schema", 0)) != CONFIG_SCHEMA:
        raise ValueError(f"schema {schema!r}, expected {CONFIG_SCHEMA}")
    tls, timing = whole.section("tls"), whole.section("timing")
    boxes, pipelines = whole.section("boxes"), whole.section("pipelines")
    if not pipelines.names():
        raise ValueError("pipelines: expected at least one")
    config = CoordinatorConfig(
        site=whole.text("site"),
        box=whole.text("box"),
        listen=_address(whole.section("listen")),
        http=_address(whole.section("http")),
        tls=TlsIdentity(
            tls.path("ca"), tls.path("certificate"), tls.path("key"), whole.optional_path("clock_synchronised_file")
        ),
        database=whole.path("state_directory") / "coordinator.sqlite",
        pipelines={name: spec_from_json(name, pipelines.value(name)) for name in pipelines.names()},
        boxes={name: _box(name, boxes) for name in boxes.names()},
        gateways=frozenset(whole.texts("gateways")) if whole.optional("gateways") else None,
        timing=CoordinatorTiming(**{field.name: timing.seconds(field.name) for field in fields(CoordinatorTiming)}),
        link_timing=LinkTiming.from_config({name: timing.seconds(name) for name in timing.names()}),
    )
    _check_members(config)
    return config


def _check_members(config: CoordinatorConfig) -> None:
    seen: dict[str, str] = {}
    for name, spec in config.pipelines.items():
        for box in spec.boxes:
            if box not in config.boxes:
                raise ValueError(f"pipelines.{name}.boxes: {box!r} is no key of boxes")
            if box in seen:
                raise ValueError(f"pipelines.{name}.boxes: {box!r} is in pipeline {seen[box]!r} already")
            seen[box] = name


def _address(section: Section) -> Address:
    return Address(section.text("host"), section.port("port", low=0))


def _box(name: str, boxes: Section) -> BoxConfig:
    section = boxes.section(name)
    return BoxConfig(section.text("host"), section.port("ring_port"), box_from_json(name, boxes.value(name)))
