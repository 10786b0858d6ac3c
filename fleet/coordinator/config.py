"""coordinator.json as `fleet provision` writes it; strict, and every complaint names the key."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from fleet.planning.cost import BoxCost
from fleet.planning.spec import PipelineSpec, box_from_json, spec_from_json
from stage_runtime.link.configuration import (
    Address,
    address,
    link_timing,
    parse_configuration,
    read_configuration,
    tls_identity,
)
from stage_runtime.link.connection import LinkTiming
from stage_runtime.link.section import Section
from stage_runtime.link.tls import TlsIdentity

CONFIG_SCHEMA = 1
KEYS = (
    *("schema", "site", "box", "listen", "http", "tls", "clock_synchronised_file", "state_directory"),
    *("pipelines", "boxes", "gateways", "timing"),
)
MAX_CONFIG_BYTES = 64 * 2**20  # 512 boxes and a cost of each layer of every model


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
        gateways: boxes whose gateways may connect.
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
    gateways: frozenset[str]
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
    return read_configuration(path, _parse, schema=CONFIG_SCHEMA, most_bytes=MAX_CONFIG_BYTES)


def parse_config(data: Any) -> CoordinatorConfig:
    """The typed configuration of a decoded coordinator.json.

    Raises:
        ValueError: a key is missing or wrong; names it.
    """
    return parse_configuration(data, _parse, schema=CONFIG_SCHEMA)


def _parse(whole: Section) -> CoordinatorConfig:
    whole.only(*KEYS)
    timing = whole.section("timing")
    boxes, pipelines = whole.section("boxes"), whole.section("pipelines")
    if not pipelines.names():
        raise ValueError("pipelines: expected at least one")
    config = CoordinatorConfig(
        site=whole.text("site"),
        box=whole.text("box"),
        listen=address(whole.section("listen")),
        http=address(whole.section("http")),
        tls=tls_identity(whole),
        database=whole.path("state_directory") / "coordinator.sqlite",
        pipelines={name: spec_from_json(name, pipelines.value(name)) for name in pipelines.names()},
        boxes={name: _box(name, boxes) for name in boxes.names()},
        gateways=frozenset(whole.texts("gateways")),
        timing=CoordinatorTiming(**{field.name: timing.seconds(field.name) for field in fields(CoordinatorTiming)}),
        link_timing=link_timing(timing),
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


def _box(name: str, boxes: Section) -> BoxConfig:
    section = boxes.section(name)
    return BoxConfig(section.text("host"), section.port("ring_port"), box_from_json(name, boxes.value(name)))
