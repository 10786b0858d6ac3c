"""What a box's agent found: plain data, compared with the desired state by `fleet.provision.diff`.

Paths are absolute paths of the box, digests are lower-case hex SHA-256, sizes are bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

PathKind = Literal["missing", "file", "directory", "link", "other"]


@dataclass(frozen=True)
class PathFact:
    """What lies at a path (links are not followed).

    Attributes:
        kind: "missing", or what it is.
        sha256, size_bytes: of a regular file, otherwise "" and 0.
        mode: permission bits, e.g. 0o644.
        owner, group: names, or the number as text where the box knows no name.
        target: of a link.
    """

    kind: PathKind
    sha256: str = ""
    size_bytes: int = 0
    mode: int = 0
    owner: str = ""
    group: str = ""
    target: str = ""


MISSING = PathFact("missing")


@dataclass(frozen=True)
class EnvironmentFact:
    """A virtual environment against the manifest that was recorded when it was made.

    Attributes:
        present: built completely, with a readable manifest.
        damaged: path relative to the environment → "missing", "content", "mode", "owner" or "extra".
    """

    present: bool
    damaged: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class IdentityFact:
    """The box's key and certificate against what was recorded when they came.

    Attributes:
        key, certificate: "" when intact, otherwise "missing", "content", "mode" or "owner".
        recorded: the request that the certificate answers: {"common_name", "organization",
            "subject_alternative_names", "ca_sha256"}, empty if there is none.
        certificate_sha256: digest of the certificate file, "" if there is none.
    """

    key: str = "missing"
    certificate: str = "missing"
    recorded: Mapping[str, Any] = field(default_factory=dict)
    certificate_sha256: str = ""


@dataclass(frozen=True)
class ProgramFact:
    """A program of supervisord: its state ("RUNNING", "STOPPED", …) and the fingerprint it was last started with."""

    state: str
    fingerprint: str


@dataclass(frozen=True)
class SupervisorFact:
    """supervisord: `running` answers on its socket; unit fields are None where there is no unit to have."""

    running: bool = False
    fingerprint: str = ""
    unit_enabled: bool | None = None
    unit_active: bool | None = None


@dataclass(frozen=True)
class SystemFact:
    """The machine itself.

    Attributes:
        architecture: as `uname -m`. python: "3.11.2". cores: usable CPUs.
        clock_unix_seconds: the box's wall clock when it answered.
        disk_free_bytes: below the prefix, for an unprivileged writer.
    """

    os_name: str = ""
    architecture: str = ""
    kernel: str = ""
    hostname: str = ""
    python: str = ""
    python_path: str = ""
    memory_bytes: int = 0
    cores: int = 0
    disk_free_bytes: int = 0
    boot_id: str = ""
    clock_unix_seconds: float = 0.0


@dataclass(frozen=True)
class Facts:
    """The answer to one facts request.

    Attributes:
        paths: every directory, file, link and file of a tree that was asked for; the tree's own path too.
        extra: path of a tree → paths in it that nobody manages.
        texts: path → text of the small files that were asked for by `texts`.
        packages_missing: Debian packages not installed.
        user_present: the service user exists (True if none is wanted).
    """

    paths: Mapping[str, PathFact] = field(default_factory=dict)
    extra: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    environments: Mapping[str, EnvironmentFact] = field(default_factory=dict)
    identity: IdentityFact = IdentityFact()
    supervisor: SupervisorFact = SupervisorFact()
    programs: Mapping[str, ProgramFact] = field(default_factory=dict)
    texts: Mapping[str, str] = field(default_factory=dict)
    packages_missing: tuple[str, ...] = ()
    user_present: bool = True
    system: SystemFact = SystemFact()


def facts_from_json(data: Mapping[str, Any]) -> Facts:
    """Facts from the agent's answer.

    Raises:
        TypeError, KeyError: the answer has another shape (agent and operator are always the same version).
    """
    return Facts(
        paths={path: PathFact(**fact) for path, fact in data["paths"].items()},
        extra={path: tuple(files) for path, files in data["extra"].items()},
        environments={path: EnvironmentFact(**fact) for path, fact in data["environments"].items()},
        identity=IdentityFact(**data["identity"]),
        supervisor=SupervisorFact(**data["supervisor"]),
        programs={name: ProgramFact(**fact) for name, fact in data["programs"].items()},
        texts=dict(data["texts"]),
        packages_missing=tuple(data["packages_missing"]),
        user_present=bool(data["user_present"]),
        system=SystemFact(**data["system"]),
    )
