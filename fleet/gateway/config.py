"""`etc/gateway.json`, read and checked; standard library only, as the control box has no pydantic."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fleet.errors import ExitCode, FleetError
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
        FleetError: not readable, not JSON, another schema, a field missing or of the wrong type.
    """
    try:
        with path.open("rb") as file:
            data = json.loads(file.read(MAX_CONFIG_BYTES))
        return parse_config(data)
    except OSError as error:
        raise _bad(path, f"cannot read it: {error.strerror}") from None
    except KeyError as error:
        raise _bad(path, f"field {error} is missing") from None
    except (AttributeError, TypeError, ValueError) as error:  # ValueError covers JSON and schema
        raise _bad(path, str(error)) from None


def _bad(path: Path, reason: str) -> FleetError:
    return FleetError(
        f"{path}: {reason}",
        hint="write the configuration anew: fleet provision",
        exit_code=ExitCode.INVALID_INVENTORY,
    )


def parse_config(data: dict[str, Any]) -> GatewayConfig:
    """The typed configuration of a decoded gateway.json.

    Raises:
        KeyError, TypeError, ValueError: a field is missing or wrong.
    """
    if data["schema"] != CONFIG_SCHEMA:
        raise ValueError(f"schema {data['schema']!r}, expected {CONFIG_SCHEMA}")
    tls = data["tls"]
    loopback = None if data.get("loopback") is None else _address(data["loopback"])
    if loopback is not None and loopback.host not in ("127.0.0.1", "::1"):
        raise ValueError(f"loopback.host {loopback.host!r}: plain HTTP is served on 127.0.0.1 or ::1 only")
    return GatewayConfig(
        site=str(data["site"]),
        box=str(data["box"]),
        pipelines=tuple(_pipeline(name, entry) for name, entry in data["pipelines"].items()),
        listen=_address(data["listen"]),
        loopback=loopback,
        tls=TlsIdentity(
            Path(tls["ca"]), Path(tls["certificate"]), Path(tls["key"]), _path(data.get("clock_synchronised_file"))
        ),
        api_keys_file=Path(data["api_keys_file"]),
        journal_directory=_path(data.get("journal_directory")),
        max_queued_requests=int(data["max_queued_requests"]),
        request_timeout_seconds=float(data["request_timeout_seconds"]),
        first_token_timeout_seconds=float(data["first_token_timeout_seconds"]),
        timing={name: float(value) for name, value in data["timing"].items()},
    )


def _path(value: str | None) -> Path | None:
    return None if value is None else Path(value)


def _address(data: dict[str, Any]) -> Address:
    return Address(str(data["host"]), int(data["port"]))


def _pipeline(name: str, data: dict[str, Any]) -> PipelineConfig:
    first = data["first_stage"]
    return PipelineConfig(
        name=name,
        model=str(data["model"]),
        model_directory=Path(data["model_directory"]),
        model_digest=str(data["model_digest"]),
        policy=str(data["policy"]),
        epoch=int(data["epoch"]),
        max_tokens_per_sequence=int(data["max_tokens_per_sequence"]),
        max_sequences=int(data.get("max_sequences", DEFAULT_MAX_SEQUENCES)),
        first_stage=str(first["box"]),
        address=_address(first),
    )
