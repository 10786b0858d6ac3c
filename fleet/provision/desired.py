"""A box's desired state as data: what `render` builds, `diff` compares and the box's agent applies."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Content:
    """Bytes to send: held in memory, or a file of the bundle on the operator's side.

    Attributes:
        sha256: hex digest of the bytes.
        size_bytes: their number.
        data: the bytes, if small and generated.
        file: otherwise the file that holds them.
    """

    sha256: str
    size_bytes: int
    data: bytes | None = None
    file: Path | None = None


@dataclass(frozen=True)
class FileSpec:
    """A managed file. `secret` content never shows in diffs or logs."""

    path: str
    content: Content
    mode: int = 0o644
    owner: str = "root"
    group: str = "root"
    secret: bool = False


@dataclass(frozen=True)
class DirectorySpec:
    """A managed directory; what else lies in it is not touched."""

    path: str
    mode: int = 0o755
    owner: str = "root"
    group: str = "root"


@dataclass(frozen=True)
class LinkSpec:
    """A managed symbolic link, switched atomically."""

    path: str
    target: str


@dataclass(frozen=True)
class TreeSpec:
    """A content-addressed directory (a model, a release): written aside, synced, renamed into place as a whole;
    once there, a damaged or missing file of it is mended on its own. Paths of `files` are absolute, below `path`."""

    path: str
    files: tuple[FileSpec, ...]


@dataclass(frozen=True)
class EnvironmentSpec:
    """A virtual environment made once per lock by `uv`, offline, from wheels sent along.

    Attributes:
        path: `<prefix>/envs/<lock digest[:16]>`.
        python: the interpreter's version on the box, e.g. "3.11".
        uv: wheel that holds the `uv` binary.
        wheels: every wheel of the lock.
        requirements: `name==version --hash=sha256:…` lines.
    """

    path: str
    python: str
    uv: Content
    wheels: tuple[tuple[str, Content], ...]
    requirements: str


@dataclass(frozen=True)
class IdentitySpec:
    """The box's key pair: the private key is made on the box and never leaves it.

    Attributes:
        key_path: private key, 0600, owned by the service user.
        certificate_path: where the signed certificate goes.
        common_name: the box's name. organization: the site's name.
        subject_alternative_names: e.g. ("DNS:box1.lab.fleet.internal", "IP:10.77.0.11").
        ca_sha256: digest of the site CA's PEM; a certificate by another CA is replaced.
    """

    key_path: str
    certificate_path: str
    common_name: str
    organization: str
    subject_alternative_names: tuple[str, ...]
    ca_sha256: str


@dataclass(frozen=True)
class ProgramSpec:
    """A program of supervisord.

    Attributes:
        name: supervisord's program name.
        fingerprint: digest of all whose change needs a restart (config, our wheel, environment, certificate).
        health_socket: admin unix socket that answers {"op":"health"}; None: RUNNING is enough.
        health_states: states that count as healthy after a start, e.g. ("loaded", "ready").
        serves: False: answers do not depend on it, so that no release goes back because it is late. One that can't
            be started at all fails the gate like any other.
    """

    name: str
    fingerprint: str
    health_socket: str | None = None
    health_states: tuple[str, ...] = ()
    serves: bool = True


@dataclass(frozen=True)
class SupervisorSpec:
    """The one supervisord of a box.

    Attributes:
        config_path: its supervisord.conf (through the `current` link).
        python: interpreter that runs `-m supervisor.supervisord`.
        socket: XML-RPC unix socket.
        unit: systemd unit's name, or None in local mode, where the agent starts supervisord itself.
        fingerprint: digest of what needs supervisord itself restarted (environment, unit).
    """

    config_path: str
    python: str
    socket: str
    unit: str | None
    fingerprint: str


@dataclass(frozen=True)
class DesiredState:
    """Everything fleet manages on one box.

    Attributes:
        box: name. prefix: root of everything.
        privileged: False in local mode: owners, users, units and packages are left alone.
        user: service user to have (system account without shell), None in local mode.
        links are switched after all trees and environments are in place; programs are restarted after that.
        health_gate_seconds: programs must be healthy by then.
        settings: free JSON that the agent echoes in facts.
    """

    box: str
    prefix: str
    privileged: bool
    user: str | None
    packages: tuple[str, ...]
    directories: tuple[DirectorySpec, ...]
    files: tuple[FileSpec, ...]
    trees: tuple[TreeSpec, ...]
    environments: tuple[EnvironmentSpec, ...]
    links: tuple[LinkSpec, ...]
    identity: IdentitySpec
    supervisor: SupervisorSpec
    programs: tuple[ProgramSpec, ...]
    health_gate_seconds: float
