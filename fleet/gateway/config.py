"""`etc/gateway.json`, read and checked; standard library only, as the control box has no pydantic."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

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

CONFIG_SCHEMA = 2
MAX_CONFIG_BYTES = 2**20


@dataclass(frozen=True)
class CoordinatorConfig:
    """Who says where requests go: the coordinator's box and its port for stages and gateways."""

    box: str
    address: Address


@dataclass(frozen=True)
class PipelineConfig:
    """A pipeline as the gateway sees it; where its first stage is comes from the coordinator.

    Attributes:
        name: of the pipeline. model: name clients ask for.
        model_directory: with tokenizer and chat template.
        model_digest, policy: compared in the first stage's hello.
        max_tokens_per_sequence: prompt and answer together.
        max_sequences: in flight at once; more wait in the gateway.
    """

    name: str
    model: str
    model_directory: Path
    model_digest: str
    policy: str
    max_tokens_per_sequence: int
    max_sequences: int


@dataclass(frozen=True)
class GatewayConfig:
    """Everything `fleet gateway` is told; times in seconds.

    Attributes:
        tls: own certificate; shared by listener and links, so that both learn when the clock is synchronised.
        journal_directory: where streams that resume and the last routes are kept.
        replan_wait_seconds: an answer waits so long for a plan that can compute it.
        keep_alive_seconds: a stream without news gets a comment so often.
        resume_max_seconds: longest Fleet-Resume-Seconds. resume_max_streams: kept at once.
        timing: of links, from the ring_* fields of the inventory's Timing.
    """

    site: str
    box: str
    pipelines: tuple[PipelineConfig, ...]
    coordinator: CoordinatorConfig
    listen: Address
    loopback: Address | None
    tls: TlsIdentity
    api_keys_file: Path
    journal_directory: Path
    max_queued_requests: int
    request_timeout_seconds: float
    first_token_timeout_seconds: float
    replan_wait_seconds: float
    keep_alive_seconds: float
    resume_max_seconds: float
    resume_max_streams: int
    timing: LinkTiming


def load_config(path: Path) -> GatewayConfig:
    """Read gateway.json.

    Raises:
        FleetError: not readable, not JSON, another schema, a key missing or of the wrong type or value.
    """
    return read_configuration(path, _parse, schema=CONFIG_SCHEMA, most_bytes=MAX_CONFIG_BYTES)


def parse_config(data: Any) -> GatewayConfig:
    """The typed configuration of a decoded gateway.json.

    Raises:
        ValueError: a key is missing or wrong; names it.
    """
    return parse_configuration(data, _parse, schema=CONFIG_SCHEMA)


def _parse(whole: Section) -> GatewayConfig:
    whole.only("schema", "clock_synchronised_file", *(field.name for field in fields(GatewayConfig)))
    loopback = address(whole.section("loopback")) if whole.optional("loopback") else None
    if loopback is not None and loopback.host not in ("127.0.0.1", "::1"):
        raise ValueError(f"loopback.host {loopback.host!r}: plain HTTP is served on 127.0.0.1 or ::1 only")
    pipelines, coordinator = whole.section("pipelines"), whole.section("coordinator")
    if not pipelines.names():
        raise ValueError("pipelines: expected at least one")
    return GatewayConfig(
        site=whole.text("site"),
        box=whole.text("box"),
        pipelines=tuple(_pipeline(name, pipelines.section(name)) for name in pipelines.names()),
        coordinator=CoordinatorConfig(
            coordinator.text("box"), Address(coordinator.text("host"), coordinator.port("port"))
        ),
        listen=address(whole.section("listen")),
        loopback=loopback,
        tls=tls_identity(whole),
        api_keys_file=whole.path("api_keys_file"),
        journal_directory=whole.path("journal_directory"),
        max_queued_requests=whole.integer("max_queued_requests", 0),
        request_timeout_seconds=whole.seconds("request_timeout_seconds"),
        first_token_timeout_seconds=whole.seconds("first_token_timeout_seconds"),
        replan_wait_seconds=whole.seconds("replan_wait_seconds"),
        keep_alive_seconds=whole.seconds("keep_alive_seconds"),
        resume_max_seconds=whole.seconds("resume_max_seconds"),
        resume_max_streams=whole.integer("resume_max_streams", 0),
        timing=link_timing(whole.section("timing")),
    )


def _pipeline(name: str, section: Section) -> PipelineConfig:
    return PipelineConfig(
        name=name,
        model=section.text("model"),
        model_directory=section.path("model_directory"),
        model_digest=section.text("model_digest"),
        policy=section.text("policy"),
        max_tokens_per_sequence=section.integer("max_tokens_per_sequence", 1),
        max_sequences=section.integer("max_sequences", 1),
    )
