"""A box's whole desired state from inventory, bundle, plan and ports. Pure: equal inputs give equal bytes."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fleet.bundle.manifest import CONTROL_LOCK, STAGE_LOCK
from fleet.inventory.model import Role
from fleet.inventory.sitefile import SiteFile
from fleet.planning.plan import Plan
from fleet.provision.desired import (
    DesiredState,
    DirectorySpec,
    EnvironmentSpec,
    FileSpec,
    IdentitySpec,
    LinkSpec,
    ProgramSpec,
    SupervisorSpec,
    TreeSpec,
)
from fleet.provision.ports import BoxPorts
from fleet.provision.release import Library, content_of, release_tree
from fleet.provision.render_bundle import BundleView, locks_of
from fleet.provision.render_etc import gateway_config, pipeline_of, stage_config, to_bytes
from fleet.provision.render_layout import SERVICE_USER, BoxLayout, alternative_names, layout_of
from fleet.provision.supervisor_config import Program, render_supervisor_config
from fleet.provision.unit import UNIT_DIRECTORY, UNIT_NAME, render_unit

# A program that dies sooner counts as a failed start and is retried with back-off; `import torch` on a slow SD card
# included, so that a broken environment never restarts at full speed.
START_SECONDS = 5
KILL_MARGIN_SECONDS = 5  # SIGKILL follows so long after a drain's end
SUPERVISOR_STOP_MARGIN_SECONDS = 10  # systemd kills supervisord so long after its programs' last deadline
GATEWAY_THREADS = 1
STAGE_HEALTHY = ("loaded", "ready")  # "ready" needs the neighbours too: that is the site's gate, not the box's


@dataclass(frozen=True)
class RenderInputs:
    """Everything that the desired states of a site follow from.

    Attributes:
        site_file: the inventory. bundle: the finished bundle. library: our wheel, unpacked. plan: who holds what.
        ports: of every box.
        ca_pem: the site CA's certificate. ca_sha256: its digest.
        api_keys: content of the gateway's api_keys_file.
        cores: box → usable CPUs, as far as they are known.
        uid: of the operator, for socket paths of local sites.
    """

    site_file: SiteFile
    bundle: BundleView
    library: Library
    plan: Plan
    ports: Mapping[str, BoxPorts]
    ca_pem: bytes
    ca_sha256: str
    api_keys: bytes
    cores: Mapping[str, int]
    uid: int


def threads_of(inputs: RenderInputs, box: str) -> int:
    """Compute threads of a box's stage: as declared, or its cores, divided by the stages that share the machine."""
    site = inputs.site_file.site
    declared = site.boxes[box].threads
    if declared is not None:
        return declared
    nominal = site.device_profiles[site.boxes[box].profile].cores
    cores = nominal if nominal is not None else inputs.cores.get(box, 1)
    if site.boxes[box].connection != "local":
        return cores
    sharing = sum(1 for other in site.boxes.values() if other.connection == "local" and Role.STAGE in other.roles)
    return max(1, cores // max(1, sharing))


def needs_cores(site_file: SiteFile, box: str) -> bool:
    """Whether a box's state depends on its measured cores."""
    spec = site_file.site.boxes[box]
    undeclared = spec.threads is None and site_file.site.device_profiles[spec.profile].cores is None
    return undeclared and Role.STAGE in spec.roles


def render(inputs: RenderInputs, box: str) -> DesiredState:
    """The desired state of a box.

    Raises:
        FleetError: the box is in two pipelines.
    """
    site_file, site = inputs.site_file, inputs.site_file.site
    layout = layout_of(site_file, box, inputs.uid)
    environments = {lock: inputs.bundle.environment(box, lock, layout) for lock in locks_of(site, box)}
    pipeline = pipeline_of(site_file, box) if Role.STAGE in site.boxes[box].roles else None
    is_gateway = Role.GATEWAY in site.boxes[box].roles

    etc = {"plan.json": to_bytes(json.loads(inputs.plan.to_json()))}
    programs: list[Program] = []
    if pipeline is not None:
        threads = threads_of(inputs, box)
        etc["stage.json"] = to_bytes(
            stage_config(
                site_file, box, inputs.plan, pipeline=pipeline, ports=inputs.ports, layout=layout, threads=threads
            )
        )
        programs.append(_stage_program(site_file, layout, environments[STAGE_LOCK], threads))
    if is_gateway:
        etc["gateway.json"] = to_bytes(gateway_config(site_file, box, inputs.plan, inputs.ports, layout))
        programs.append(_gateway_program(site_file, layout, environments[CONTROL_LOCK]))
    etc["supervisord.conf"] = _supervisor_config(layout, programs).encode()

    release = release_tree(layout.prefix, inputs.library, etc)
    files = _files(inputs, layout, is_gateway)
    supervisor, unit = _supervisor(site_file, layout, next(iter(environments.values())))
    if unit is not None:
        files.append(unit)
    return DesiredState(
        box=box,
        prefix=layout.prefix,
        privileged=not layout.local,
        user=layout.user,
        packages=() if layout.local else site.device_profiles[site.boxes[box].profile].packages,
        directories=_directories(layout, is_gateway),
        files=tuple(files),
        trees=(*_models(inputs, layout, pipeline, is_gateway), release),
        environments=tuple(environments.values()),
        links=(LinkSpec(f"{layout.prefix}/current", release.path),),
        identity=IdentitySpec(
            key_path=layout.tls["key"],
            certificate_path=layout.tls["certificate"],
            common_name=box,
            organization=site.site,
            subject_alternative_names=alternative_names(site.site, box, site.boxes[box].address),
            ca_sha256=inputs.ca_sha256,
        ),
        supervisor=supervisor,
        programs=tuple(_program_spec(inputs, layout, program, etc, environments) for program in programs),
        health_gate_seconds=site.timing.health_gate_seconds,
    )


def _stop_seconds(site_file: SiteFile) -> int:
    return math.ceil(site_file.site.timing.drain_seconds) + KILL_MARGIN_SECONDS


def _supervisor_config(layout: BoxLayout, programs: Sequence[Program]) -> str:
    return render_supervisor_config(
        socket=layout.supervisor_socket,
        pid_file=f"{layout.run_directory}/supervisord.pid",
        log_file=f"{layout.log}/supervisord.log",
        programs=programs,
    )


def _program_environment(layout: BoxLayout, threads: int) -> dict[str, str]:
    return {
        "OMP_NUM_THREADS": str(threads),
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONNOUSERSITE": "1",
        "PYTHONPATH": f"{layout.prefix}/current/lib",
        "PYTHONUNBUFFERED": "1",
    }


def _stage_program(site_file: SiteFile, layout: BoxLayout, environment: EnvironmentSpec, threads: int) -> Program:
    python = f"{environment.path}/bin/python"
    return Program(
        name="stage",
        argv=(python, "-m", "stage_runtime", "--config", f"{layout.etc}/stage.json"),
        environment=_program_environment(layout, threads),
        log_file=f"{layout.log}/stage.log",
        user=layout.user,
        start_seconds=START_SECONDS,
        stop_seconds=_stop_seconds(site_file),
    )


def _gateway_program(site_file: SiteFile, layout: BoxLayout, environment: EnvironmentSpec) -> Program:
    python = f"{environment.path}/bin/python"
    return Program(
        name="gateway",
        argv=(python, "-m", "fleet.cli.main", "gateway", "--config", f"{layout.etc}/gateway.json"),
        environment=_program_environment(layout, GATEWAY_THREADS),
        log_file=f"{layout.log}/gateway.log",
        user=layout.user,
        start_seconds=START_SECONDS,
        stop_seconds=_stop_seconds(site_file),
    )


def _program_spec(
    inputs: RenderInputs,
    layout: BoxLayout,
    program: Program,
    etc: Mapping[str, bytes],
    environments: Mapping[str, EnvironmentSpec],
) -> ProgramSpec:
    """The program with the digest of all whose change needs a restart of it, and of nothing else."""
    is_stage = program.name == "stage"
    needs = {
        "argv": list(program.argv),
        "environment": dict(program.environment),
        "stop_seconds": program.stop_seconds,
        "configuration": hashlib.sha256(etc[f"{program.name}.json"]).hexdigest(),
        "library": inputs.library.digest,
        "environment_path": environments[STAGE_LOCK if is_stage else CONTROL_LOCK].path,
        "ca": inputs.ca_sha256,
        "api_keys": "" if is_stage else hashlib.sha256(inputs.api_keys).hexdigest(),
    }
    return ProgramSpec(
        name=program.name,
        fingerprint=_digest(needs),
        health_socket=layout.stage_socket if is_stage else None,
        health_states=STAGE_HEALTHY if is_stage else (),
    )


def _supervisor(
    site_file: SiteFile, layout: BoxLayout, environment: EnvironmentSpec
) -> tuple[SupervisorSpec, FileSpec | None]:
    """supervisord and its systemd unit; no unit in local mode."""
    python = f"{environment.path}/bin/python"
    text = ""
    if not layout.local:
        text = render_unit(
            python=python,
            prefix=layout.prefix,
            config_path=layout.supervisor_config,
            user=SERVICE_USER,
            stop_seconds=_stop_seconds(site_file) + SUPERVISOR_STOP_MARGIN_SECONDS,
        )
    own_options = _supervisor_config(layout, ())
    spec = SupervisorSpec(
        config_path=layout.supervisor_config,
        python=python,
        socket=layout.supervisor_socket,
        unit=None if layout.local else UNIT_NAME,
        fingerprint=_digest({"python": python, "options": own_options, "unit": text}),
    )
    unit = None if layout.local else FileSpec(f"{UNIT_DIRECTORY}/{UNIT_NAME}", content_of(text.encode()))
    return spec, unit


def _directories(layout: BoxLayout, is_gateway: bool) -> tuple[DirectorySpec, ...]:
    """Parents first."""
    prefix, owner = layout.prefix, layout.owner
    plain = [DirectorySpec(f"{prefix}{name}") for name in ("", "/envs", "/models", "/releases")]
    owned = [
        DirectorySpec(path, mode=mode, owner=owner, group=owner)
        for path, mode in (
            (layout.log, 0o750),
            (f"{prefix}/pki", 0o700),
            (f"{prefix}/secrets", 0o700),
            (f"{prefix}/state", 0o750),
        )
    ]
    if is_gateway:
        owned.append(DirectorySpec(layout.journal, mode=0o700, owner=owner, group=owner))
    if layout.local:  # elsewhere systemd makes /run/fleet at each start
        parent = layout.run_directory.rpartition("/")[0]
        owned += [DirectorySpec(parent, mode=0o700), DirectorySpec(layout.run_directory, mode=0o700)]
    return (*plain, *owned)


def _files(inputs: RenderInputs, layout: BoxLayout, is_gateway: bool) -> list[FileSpec]:
    owner = layout.owner
    files = [FileSpec(layout.tls["ca"], content_of(inputs.ca_pem), owner=owner, group=owner)]
    if is_gateway:
        keys = content_of(inputs.api_keys)
        files.append(FileSpec(layout.api_keys, keys, mode=0o600, owner=owner, group=owner, secret=True))
    return files


def _models(inputs: RenderInputs, layout: BoxLayout, pipeline: str | None, is_gateway: bool) -> tuple[TreeSpec, ...]:
    """Whole model directories for the stage; for the gateway what it tokenises with. One tree a model."""
    trees: dict[str, TreeSpec] = {}
    if is_gateway:
        for planned in inputs.plan.pipelines.values():
            tree = inputs.bundle.model_tree(planned.model, layout, weights=False)
            trees[tree.path] = tree
    if pipeline is not None:
        tree = inputs.bundle.model_tree(inputs.plan.pipelines[pipeline].model, layout, weights=True)
        trees[tree.path] = tree
    return tuple(trees[path] for path in sorted(trees))


def _digest(data: Mapping[str, object]) -> str:
    return hashlib.sha256(json.dumps(data, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
