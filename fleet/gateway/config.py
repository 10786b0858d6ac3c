"""`etc/gateway.json`, read and checked; standard library only, as the control box has no pydantic."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fleet.errors import ExitCode, FleetError
from stage_runtime.link.section import PROBLEM_CHARACTERS, Section
from stage_runtime.link.tls import TlsIdentity

CONFIG_SCHEMA = 1
MAX_CONFIG_BYTES = 2**20
DEFAULT_MAX_SEQUENCES = 8
"""Of a pipeline whose entry does not say; the inventory's default."""


@dataclass(frozen=True)
class Address:
    """Where something listens."""

    host: str
    port: int


@dataclass(frozen=True)
class PipelineConfig:
    """A pipeline as the gateway sees it.

    Attributes:
        name: of the pipeline. model: name clients ask for.
        model_directory: with tokenizer and chat template.
        model_digest, policy, epoch: compared in the first stage's hello.
        max_tokens_per_sequence: prompt and answer together.
        max_sequences: in flight at once; more wait in the gateway.
        first_stage: the box's name. address: of its ring port.
    """

    name: str
    model: str
    model_directory: Path
    model_digest: str
    policy: str
    epoch: int
    max_tokens_per_sequence: int
    max_sequences: int
    first_stage: str
    address: Address


@dataclass(frozen=True)
class GatewayConfig:
    """Everything `fleet gateway` is told; times in seconds.

    Attributes:
        tls: own certificate; shared by listener and links, so that both learn when the clock is synchronised.
        journal_directory: where streams that resume will be kept.
        timing: the ring_* fields of the inventory's Timing.
    """

    site: str
    box: str
    pipelines: tuple[PipelineConfig, ...]
    listen: Address
    loopback: Address | None
    tls: TlsIdentity
    api_keys_file: Path
    journal_directory: Path | None
    max_queued_requests: int
    request_timeout_seconds: float
    first_token_timeout_seconds: float
    timing: dict[str, float]


def load_config(path: Path) -> GatewayConfig:
    """Read gateway.json.

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
    raise FleetError(
        f"{path}: {reason[:PROBLEM_CHARACTERS]}",
        hint="write the configuration anew: fleet provision",
        exit_code=ExitCode.INVALID_INVENTORY,
    )


def parse_config(data: Any) -> GatewayConfig:
    """The typed configuration of a decoded gateway.json.

    Raises:
        ValueError: a key is missing or wrong; names it.
    """
    whole = Section(data)
    if (schema := whole.integer("schema", 0)) != CONFIG_SCHEMA:
        raise ValueError(f"schema {schema!r}, expected {CONFIG_SCHEMA}")
    tls = whole.section("tls")
    loopback = _listener(whole.section("loopback")) if whole.optional("loopback") else None
    if loopback is not None and loopback.host not in ("127.0.0.1", "::1"):
        raise ValueError(f"loopback.host {loopback.host!r}: plain HTTP is served on 127.0.0.1 or ::1 only")
    pipelines, timing = whole.section("pipelines"), whole.section("timing")
    if not pipelines.names():
        raise ValueError("pipelines: expected at least one")
    return GatewayConfig(
        site=whole.text("site"),
        box=whole.text("box"),
        pipelines=tuple(_pipeline(name, pipelines.section(name)) for name in pipelines.names()),
        listen=_listener(whole.section("listen")),
        loopback=loopback,
        tls=TlsIdentity(
            tls.path("ca"), tls.path("certificate"), tls.path("key"), whole.optional_path("clock_synchronised_file")
        ),
        api_keys_file=whole.path("api_keys_file"),
        journal_directory=whole.optional_path("journal_directory"),
        max_queued_requests=whole.integer("max_queued_requests", 0),
        request_timeout_seconds=whole.seconds("request_timeout_seconds"),
        first_token_timeout_seconds=whole.seconds("first_token_timeout_seconds"),
        timing={name: timing.seconds(name) for name in timing.names()},
    )


def _listener(section: Section) -> Address:
    return Address(section.text("host"), section.port("port", low=0))


def _pipeline(name: str, section: Section) -> PipelineConfig:
    first = section.section("first_stage")
    return PipelineConfig(
        name=name,
        model=section.text("model"),
        model_directory=section.path("model_directory"),
        model_digest=section.text("model_digest"),
        policy=section.text("policy"),
        epoch=section.integer("epoch", 0),
        max_tokens_per_sequence=section.integer("max_tokens_per_sequence", 1),
        max_sequences=section.integer("max_sequences", 1)
        if section.optional("max_sequences")
        else DEFAULT_MAX_SEQUENCES,
        first_stage=first.text("box"),
        address=Address(first.text("host"), first.port("port")),
    )
