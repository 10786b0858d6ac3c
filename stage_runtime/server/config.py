"""`etc/stage.json`: parsed strictly, every complaint names the file and the key."""

from __future__ import annotations

import difflib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fleet.errors import ExitCode, FleetError
from fleet.planning.plan import PipelinePlan, Plan, StagePlan
from stage_runtime.link.connection import LinkTiming
from stage_runtime.link.endpoints import BoxAddress
from stage_runtime.link.section import LARGEST_PORT, PROBLEM_CHARACTERS, Section
from stage_runtime.link.tls import TlsIdentity

STAGE_SCHEMA = 1
KERNELS = ("auto", "dense", "packed")
POLICIES = ("exact",)
TIMING_KEYS = (
    "ring_connect_seconds",
    "ring_handshake_seconds",
    "ring_reconnect_seconds",
    "ring_reconnect_max_seconds",
    "ring_ping_seconds",
    "ring_silence_seconds",
    "drain_seconds",
)
KEYS: dict[str, type | tuple[type, ...]] = {
    "schema": int,
    "site": str,
    "box": str,
    "pipeline": str,
    "plan": (dict, str),
    "model_directory": str,
    "model_digest": str,
    "ring": dict,
    "metrics": dict,
    "peers": dict,
    "admin_socket": str,
    "tls": dict,
    "clock_synchronised_file": (str, type(None)),
    "threads": int,
    "kernel": str,
    "max_batch_sequences": int,
    "prefill_chunk_tokens": int,
    "kv_block_tokens": int,
    "timing": dict,
}


@dataclass(frozen=True)
class Address:
    """Where to listen."""

    host: str
    port: int


@dataclass(frozen=True)
class StageConfig:
    """Everything a stage process is told.

    Attributes:
        stage: this box's part of the pipeline; an empty layer range for a spare.
        peers: ring addresses of the pipeline's boxes.
        threads: compute threads.
        kernel: "auto", "dense" or "packed".
        max_batch_sequences: sequences in one micro-batch at most.
        prefill_chunk_tokens: prompt tokens in one micro-batch at most.
        kv_block_tokens: KV caches grow by multiples of this.
        drain_seconds: open sequences may finish before a stop.
    """

    site: str
    box: str
    pipeline: str
    epoch: int
    plan: PipelinePlan
    stage: StagePlan
    model_directory: Path
    model_digest: str
    ring: Address
    metrics: Address
    peers: dict[str, BoxAddress]
    admin_socket: Path
    tls: TlsIdentity
    threads: int
    kernel: str
    max_batch_sequences: int
    prefill_chunk_tokens: int
    kv_block_tokens: int
    link_timing: LinkTiming
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
    plan, epoch = _plan(raw)
    timing = _timing(raw)
    box = raw["box"]
    peers = {name: BoxAddress(name, *_address(value, f"peers.{name}")) for name, value in raw["peers"].items()}
    for stage in plan.stages:
        if stage.box not in peers:
            raise _Problem(f"peers: no address of {stage.box}, which is in the plan")
    return StageConfig(
        site=raw["site"],
        box=box,
        pipeline=raw["pipeline"],
        epoch=epoch,
        plan=plan,
        stage=plan.stage_of(box) or StagePlan(box, 0, 0, embedding=False, head=False),
        model_directory=Path(raw["model_directory"]),
        model_digest=raw["model_digest"],
        ring=Address(*_address(raw["ring"], "ring")),
        metrics=Address(*_address(raw["metrics"], "metrics")),
        peers=peers,
        admin_socket=Path(raw["admin_socket"]),
        tls=_tls(raw),
        threads=raw["threads"],
        kernel=_one_of(raw["kernel"], KERNELS, "kernel"),
        max_batch_sequences=raw["max_batch_sequences"],
        prefill_chunk_tokens=raw["prefill_chunk_tokens"],
        kv_block_tokens=raw["kv_block_tokens"],
        link_timing=LinkTiming.from_config(timing),
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
        if isinstance(value, int) and value < 1:
            raise _Problem(f"{key}: read {value}, expected at least 1")
    if raw["schema"] != STAGE_SCHEMA:
        raise _Problem(f"schema: read {raw['schema']}, this runtime knows {STAGE_SCHEMA}")


def _plan(raw: dict[str, Any]) -> tuple[PipelinePlan, int]:
    try:
        data = json.loads(raw["plan"]) if isinstance(raw["plan"], str) else raw["plan"]
        _check_plan(Section(data, "plan"), raw["pipeline"])
        plan = Plan.from_data(data)
    except RecursionError:
        raise _Problem("plan: nested too deeply") from None
    except ValueError as error:
        raise _Problem(str(error)) from None
    except (KeyError, TypeError, AttributeError) as error:
        raise _Problem(f"plan: {error!r}") from None
    pipeline = plan.pipelines[raw["pipeline"]]
    if pipeline.model_digest != raw["model_digest"]:
        raise _Problem(f"model_digest: {raw['model_digest']}, the plan says {pipeline.model_digest}")
    _one_of(pipeline.policy, POLICIES, f"plan.pipelines.{raw['pipeline']}.policy")
    problem = _stages_problem(pipeline)
    if problem:
        raise _Problem(f"plan.pipelines.{raw['pipeline']}: {problem}")
    return pipeline, plan.epoch


def _check_plan(plan: Section, pipeline: str) -> None:
    """Types and values of what this stage reads of the plan; ValueError names the key."""
    plan.integer("epoch", 0)
    pipelines = plan.section("pipelines")
    if pipeline not in pipelines.names():
        raise ValueError(f"pipeline: the plan has no {pipeline!r}, it has {sorted(pipelines.names())}")
    own = pipelines.section(pipeline)
    own.text("model")
    own.integer("layers", 1)
    own.integer("max_sequences", 1)
    own.integer("max_tokens_per_sequence", 1)
    for stage in own.sections("stages"):
        stage.text("box")
        stage.integer("start", 0)
        stage.integer("end", 0)
        stage.boolean("embedding")
        stage.boolean("head")


def _stages_problem(pipeline: PipelinePlan) -> str:
    stages = pipeline.stages
    bounds = [(stage.start, stage.end) for stage in stages]
    whole = [0, *(end for _, end in bounds)]
    if not stages or [start for start, _ in bounds] != whole[:-1] or whole[-1] != pipeline.layers:
        return f"layers {bounds} are not a division of 0…{pipeline.layers}"
    if [stage.embedding for stage in stages] != [index == 0 for index in range(len(stages))]:
        return "the first stage, and no other, must hold the embedding"
    heads = [index for index, stage in enumerate(stages) if stage.head]
    if len(heads) != 1 or heads[0] not in (0, len(stages) - 1):
        return "the first or the last stage, and no other, must hold the head"
    return ""


def _address(value: Any, where: str) -> tuple[str, int]:
    if not isinstance(value, dict) or value.keys() != {"host", "port"}:
        raise _Problem(f"{where}: expected host and port, read {value!r}")
    host, port = value["host"], value["port"]
    if not isinstance(host, str) or not host or type(port) is not int or not 0 < port <= LARGEST_PORT:
        raise _Problem(f"{where}: expected a host and a port from 1 to 65535, read {value!r}")
    return host, port


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
