"""`etc/stage.json`: parsed strictly, every complaint names the file and the key."""

from __future__ import annotations

import difflib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fleet.errors import ExitCode, FleetError
from stage_runtime.link.connection import LinkTiming
from stage_runtime.link.endpoints import BoxAddress
from stage_runtime.link.section import LARGEST_PORT, PROBLEM_CHARACTERS, Section
from stage_runtime.link.tls import TlsIdentity

STAGE_SCHEMA = 2
KERNELS = ("auto", "dense", "packed")
POLICIES = ("exact",)
TIMING_KEYS = (
    "ring_connect_seconds",
    "ring_handshake_seconds",
    "ring_reconnect_seconds",
    "ring_reconnect_max_seconds",
    "ring_ping_seconds",
    "ring_silence_least_seconds",
    "ring_silence_seconds",
    "heartbeat_seconds",
    "drain_seconds",
)
KEYS: dict[str, type | tuple[type, ...]] = {
    "schema": int,
    "site": str,
    "box": str,
    "pipeline": str,
    "policy": str,
    "model_directory": str,
    "model_digest": str,
    "ring": dict,
    "metrics": dict,
    "coordinator": dict,
    "state_directory": str,
    "admin_socket": str,
    "tls": dict,
    "clock_synchronised_file": (str, type(None)),
    "threads": int,
    "kernel": str,
    "max_batch_sequences": int,
    "prefill_chunk_tokens": int,
    "kv_block_tokens": int,
    "memory_keep_free_bytes": int,
    "timing": dict,
}
MAY_BE_ZERO = ("memory_keep_free_bytes",)


@dataclass(frozen=True)
class Address:
    """Where to listen."""

    host: str
    port: int


@dataclass(frozen=True)
class StageConfig:
    """Everything a stage process is told by its file; its plan comes from the coordinator.

    Attributes:
        policy: numeric policy of the pipeline.
        coordinator: where the control channel goes.
        state_directory: of stage.sqlite.
        threads: compute threads.
        kernel: "auto", "dense" or "packed".
        max_batch_sequences: sequences in one micro-batch at most.
        prefill_chunk_tokens: prompt tokens in one micro-batch at most.
        kv_block_tokens: KV caches grow by multiples of this.
        memory_keep_free_bytes: of the box's memory, never taken for weights.
        heartbeat_seconds: period of the pulse to the coordinator.
        drain_seconds: how long a stage that was told to stop serves on at most.
    """

    site: str
    box: str
    pipeline: str
    policy: str
    model_directory: Path
    model_digest: str
    ring: Address
    metrics: Address
    coordinator: BoxAddress
    state_directory: Path
    admin_socket: Path
    tls: TlsIdentity
    threads: int
    kernel: str
    max_batch_sequences: int
    prefill_chunk_tokens: int
    kv_block_tokens: int
    memory_keep_free_bytes: int
    link_timing: LinkTiming
    heartbeat_seconds: float
    drain_seconds: float


class _Problem(Exception):
    """What is wrong with the file; `load_config` adds its name."""


def load_config(path: Path) -> StageConfig:
    """Read a stage's configuration.

    Raises:
        FleetError: unreadable, no JSON, or a key is wrong; exit code 78.
    """
    try:
        return _parse(json.loads(path.read_bytes()))
    except OSError as error:
        problem = error.strerror or str(error)
    except RecursionError:
        problem = "no JSON: nested too deeply"
    except ValueError as error:  # of json.loads; what is wrong with the values is a _Problem
        problem = f"no JSON: {error}"
    except _Problem as error:
        problem = str(error)
    raise FleetError(
        f"{path}: {problem[:PROBLEM_CHARACTERS]}",
        hint="this file is written by `fleet provision INVENTORY`; run it again",
        exit_code=ExitCode.INVALID_INVENTORY,
    )


def _parse(raw: Any) -> StageConfig:
    _check_keys(raw)
    timing = _timing(raw)
    return StageConfig(
        site=raw["site"],
        box=raw["box"],
        pipeline=raw["pipeline"],
        policy=_one_of(raw["policy"], POLICIES, "policy"),
        model_directory=Path(raw["model_directory"]),
        model_digest=raw["model_digest"],
        ring=Address(*_address(raw["ring"], "ring")),
        metrics=Address(*_address(raw["metrics"], "metrics")),
        coordinator=_coordinator(raw["coordinator"]),
        state_directory=Path(raw["state_directory"]),
        admin_socket=Path(raw["admin_socket"]),
        tls=_tls(raw),
        threads=raw["threads"],
        kernel=_one_of(raw["kernel"], KERNELS, "kernel"),
        max_batch_sequences=raw["max_batch_sequences"],
        prefill_chunk_tokens=raw["prefill_chunk_tokens"],
        kv_block_tokens=raw["kv_block_tokens"],
        memory_keep_free_bytes=raw["memory_keep_free_bytes"],
        link_timing=LinkTiming.from_config(timing),
        heartbeat_seconds=timing["heartbeat_seconds"],
        drain_seconds=timing["drain_seconds"],
    )


def _check_keys(raw: Any) -> None:
    if not isinstance(raw, dict):
        raise _Problem(f"expected a mapping, read {type(raw).__name__}")
    for key in raw:
        if key not in KEYS:
            near = difflib.get_close_matches(key, KEYS, 1)
            raise _Problem(f"unknown key {key!r}" + (f", did you mean {near[0]!r}?" if near else ""))
    for key, kind in KEYS.items():
        if key not in raw:
            raise _Problem(f"key {key!r} is missing")
        value = raw[key]
        if not isinstance(value, kind) or isinstance(value, bool):
            raise _Problem(f"{key}: read {value!r}")
        least = 0 if key in MAY_BE_ZERO else 1
        if isinstance(value, int) and value < least:
            raise _Problem(f"{key}: read {value}, expected at least {least}")
    if raw["schema"] != STAGE_SCHEMA:
        raise _Problem(f"schema: read {raw['schema']}, this runtime knows {STAGE_SCHEMA}")


def _address(value: Any, where: str) -> tuple[str, int]:
    if not isinstance(value, dict) or value.keys() != {"host", "port"}:
        raise _Problem(f"{where}: expected host and port, read {value!r}")
    host, port = value["host"], value["port"]
    if not isinstance(host, str) or not host or type(port) is not int or not 0 < port <= LARGEST_PORT:
        raise _Problem(f"{where}: expected a host and a port from 1 to 65535, read {value!r}")
    return host, port


def _coordinator(value: dict[str, Any]) -> BoxAddress:
    if value.keys() != {"box", "host", "port"} or not isinstance(value["box"], str) or not value["box"]:
        raise _Problem(f"coordinator: expected box, host and port, read {value!r}")
    host, port = _address({"host": value["host"], "port": value["port"]}, "coordinator")
    return BoxAddress(value["box"], host, port)


def _tls(raw: dict[str, Any]) -> TlsIdentity:
    files = raw["tls"]
    if files.keys() != {"ca", "certificate", "key"} or not all(isinstance(name, str) for name in files.values()):
        raise _Problem(f"tls: expected ca, certificate and key, read {sorted(files)}")
    clock = raw["clock_synchronised_file"]
    return TlsIdentity(
        Path(files["ca"]), Path(files["certificate"]), Path(files["key"]), None if clock is None else Path(clock)
    )


def _one_of(value: str, allowed: tuple[str, ...], where: str) -> str:
    if value not in allowed:
        raise _Problem(f"{where}: read {value!r}, this runtime knows {', '.join(allowed)}")
    return value


def _timing(raw: dict[str, Any]) -> dict[str, float]:
    try:
        timing = Section(raw["timing"], "timing")
        return {name: timing.seconds(name) for name in TIMING_KEYS}
    except ValueError as error:
        raise _Problem(str(error)) from None
