"""`etc/stage.json`: parsed strictly, every complaint names the file and the key."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from stage_runtime.link.configuration import Address, address, link_timing, read_configuration, tls_identity
from stage_runtime.link.connection import LinkTiming
from stage_runtime.link.endpoints import BoxAddress
from stage_runtime.link.section import Section
from stage_runtime.link.tls import TlsIdentity

STAGE_SCHEMA = 2
MAX_CONFIG_BYTES = 2**20
MOST_BYTES = 2**53  # of memory; JSON numbers that every reader keeps exact
KERNELS = ("auto", "dense", "packed")
POLICIES = ("exact",)


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


def load_config(path: Path) -> StageConfig:
    """Read a stage's configuration.

    Raises:
        FleetError: unreadable, no JSON, or a key is wrong; exit code 78.
    """
    return read_configuration(path, _parse, schema=STAGE_SCHEMA, most_bytes=MAX_CONFIG_BYTES)


def _parse(whole: Section) -> StageConfig:
    own = (*StageConfig.__dataclass_fields__, "schema", "timing", "clock_synchronised_file")
    whole.only(*(name for name in own if name not in ("link_timing", "heartbeat_seconds", "drain_seconds")))
    timing, coordinator = whole.section("timing"), whole.section("coordinator").only("box", "host", "port")
    return StageConfig(
        site=whole.text("site"),
        box=whole.text("box"),
        pipeline=whole.text("pipeline"),
        policy=whole.one_of("policy", POLICIES),
        model_directory=whole.path("model_directory"),
        model_digest=whole.text("model_digest"),
        ring=address(whole.section("ring"), low=1),
        metrics=address(whole.section("metrics"), low=1),
        coordinator=BoxAddress(coordinator.text("box"), coordinator.text("host"), coordinator.port("port")),
        state_directory=whole.path("state_directory"),
        admin_socket=whole.path("admin_socket"),
        tls=tls_identity(whole),
        threads=whole.integer("threads", 1),
        kernel=whole.one_of("kernel", KERNELS),
        max_batch_sequences=whole.integer("max_batch_sequences", 1),
        prefill_chunk_tokens=whole.integer("prefill_chunk_tokens", 1),
        kv_block_tokens=whole.integer("kv_block_tokens", 1),
        memory_keep_free_bytes=whole.integer("memory_keep_free_bytes", 0, MOST_BYTES),
        link_timing=link_timing(timing),
        heartbeat_seconds=timing.seconds("heartbeat_seconds"),
        drain_seconds=timing.seconds("drain_seconds"),
    )
