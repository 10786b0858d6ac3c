"""The programs that supervisord runs on a box, and what makes each of them restart. Pure."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass

from fleet.bundle.manifest import CONTROL_LOCK, STAGE_LOCK
from fleet.inventory.model import Timing
from fleet.provision.desired import EnvironmentSpec, ProgramSpec
from fleet.provision.render_layout import BoxLayout
from fleet.provision.supervisor_config import Program

# A program that dies sooner counts as a failed start and is retried with back-off; `import torch` on a slow SD card
# included, so that a broken environment never restarts at full speed.
START_SECONDS = 5
KILL_MARGIN_SECONDS = 5  # SIGKILL follows so long after a drain's end
CONTROL_THREADS = 1  # coordinator and gateway compute nothing
STAGE_HEALTHY = ("loaded", "ready")  # "ready" needs a plan and the neighbours: that is the site's gate, not the box's

STAGE, COORDINATOR, GATEWAY, GUARDS = "stage", "coordinator", "gateway", "guards"
# Guards run in whichever environment the box has anyhow: both locks hold what they need.
LOCKS = {
    STAGE: (STAGE_LOCK,),
    COORDINATOR: (CONTROL_LOCK,),
    GATEWAY: (CONTROL_LOCK,),
    GUARDS: (STAGE_LOCK, CONTROL_LOCK),
}
MODULES = {
    STAGE: ("stage_runtime",),
    COORDINATOR: ("fleet.cli.main", "coordinator"),
    GATEWAY: ("fleet.cli.main", "gateway"),
    GUARDS: ("guards",),
}
# glibc gives each thread a heap of its own, which a dozen threads that do little would fill with holes
GUARDS_ENVIRONMENT = {"MALLOC_ARENA_MAX": "2"}


@dataclass(frozen=True)
class ProgramNeeds:
    """What a program runs with, apart from its command line.

    Attributes:
        configuration: bytes of its file below `etc/`.
        library: digest of our wheel. ca: of the site CA. secrets: of what it reads below `secrets/`, empty if nothing.
    """

    configuration: bytes
    library: str
    ca: str
    secrets: str


def stop_seconds(timing: Timing) -> int:
    """Seconds from SIGTERM to SIGKILL of every program: a stage serves on until others have its layers."""
    return math.ceil(timing.drain_seconds) + KILL_MARGIN_SECONDS


def environment_of(name: str, environments: Mapping[str, EnvironmentSpec]) -> EnvironmentSpec:
    """The environment that a program runs in."""
    return next(environments[lock] for lock in LOCKS[name] if lock in environments)


def program(
    name: str, layout: BoxLayout, environments: Mapping[str, EnvironmentSpec], timing: Timing, threads: int
) -> Program:
    """supervisord's section of a program.

    Args:
        name: STAGE, COORDINATOR, GATEWAY or GUARDS. environments: of the box, by lock.
    """
    python = f"{environment_of(name, environments).path}/bin/python"
    return Program(
        name=name,
        argv=(python, "-m", *MODULES[name], "--config", f"{layout.etc}/{name}.json"),
        environment={
            "OMP_NUM_THREADS": str(threads),
            "PYTHONDONTWRITEBYTECODE": "1",
            "PYTHONNOUSERSITE": "1",
            "PYTHONPATH": f"{layout.prefix}/current/lib",
            "PYTHONUNBUFFERED": "1",
            **(GUARDS_ENVIRONMENT if name == GUARDS else {}),
        },
        log_file=f"{layout.log}/{name}.log",
        user=layout.user,
        start_seconds=START_SECONDS,
        stop_seconds=stop_seconds(timing),
    )


def program_spec(
    section: Program, layout: BoxLayout, environments: Mapping[str, EnvironmentSpec], needs: ProgramNeeds
) -> ProgramSpec:
    """The program with the digest of all whose change needs a restart of it, and of nothing else."""
    is_stage = section.name == STAGE
    fingerprint = digest(
        {
            "argv": list(section.argv),
            "environment": dict(section.environment),
            "stop_seconds": section.stop_seconds,
            "configuration": hashlib.sha256(needs.configuration).hexdigest(),
            "library": needs.library,
            "environment_path": environment_of(section.name, environments).path,
            "ca": needs.ca,
            "api_keys": needs.secrets,
        }
    )
    return ProgramSpec(
        name=section.name,
        fingerprint=fingerprint,
        health_socket=layout.stage_socket if is_stage else None,
        health_states=STAGE_HEALTHY if is_stage else (),
        serves=section.name != GUARDS,
    )


def digest(data: Mapping[str, object]) -> str:
    """SHA-256 of canonical JSON, hex."""
    return hashlib.sha256(json.dumps(data, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
