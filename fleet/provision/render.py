"""A box's whole desired state from inventory, bundle, models and ports. Pure: equal inputs give equal bytes.

No plan is in it: which layers a stage serves comes from the coordinator, so a changed plan restarts nobody.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from fleet.inventory.model import Role
from fleet.inventory.sitefile import SiteFile
from fleet.planning.spec import PipelineSpec
from fleet.provision.desired import (
    DesiredState,
    DirectorySpec,
    EnvironmentSpec,
    FileSpec,
    IdentitySpec,
    LinkSpec,
    SupervisorSpec,
    TreeSpec,
)
from fleet.provision.ports import BoxPorts
from fleet.provision.release import Library, content_of, release_tree
from fleet.provision.render_bundle import BundleView, locks_of
from fleet.provision.render_etc import (
    SiteView,
    coordinator_config,
    gateway_config,
    guards_config,
    pipeline_of,
    stage_config,
    to_bytes,
)
from fleet.provision.render_layout import SERVICE_USER, BoxLayout, alternative_names, layout_of
from fleet.provision.render_programs import (
    CONTROL_THREADS,
    COORDINATOR,
    GATEWAY,
    GUARDS,
    STAGE,
    ProgramNeeds,
    digest,
    program,
    program_spec,
    stop_seconds,
)
from fleet.provision.supervisor_config import Program, render_supervisor_config
from fleet.provision.unit import UNIT_DIRECTORY, UNIT_NAME, render_unit

SUPERVISOR_STOP_MARGIN_SECONDS = 10  # systemd kills supervisord so long after its programs' last deadline


@dataclass(frozen=True)
class RenderInputs:
    """Everything that the desired states of a site follow from.

    Attributes:
        site_file: the inventory. bundle: the finished bundle. library: our wheel, unpacked.
        specs: what each pipeline of our engine is to the coordinator.
        ports: of every box.
        ca_pem: the site CA's certificate. ca_sha256: its digest.
        api_keys: content of the gateway's api_keys_file.
        cores: box → usable CPUs, as far as they are known.
        uid: of the operator, for socket paths of local sites.
    """

    site_file: SiteFile
    bundle: BundleView
    library: Library
    specs: Mapping[str, PipelineSpec]
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
    configurations = _configurations(inputs, box, layout)
    threads = {STAGE: threads_of(inputs, box)} if STAGE in configurations else {}
    programs = [
        program(name, layout, environments, site.timing, threads.get(name, CONTROL_THREADS)) for name in configurations
    ]
    etc = {f"{name}.json": text for name, text in configurations.items()}
    etc["supervisord.conf"] = _supervisor_config(layout, programs).encode()

    release = release_tree(layout.prefix, inputs.library, etc)
    files = _files(inputs, layout, GATEWAY in configurations)
    supervisor, unit = _supervisor(site_file, layout, next(iter(environments.values())))
    if unit is not None:
        files.append(unit)
    return DesiredState(
        box=box,
        prefix=layout.prefix,
        privileged=not layout.local,
        user=layout.user,
        packages=() if layout.local else site.device_profiles[site.boxes[box].profile].packages,
        directories=_directories(layout, configurations),
        files=tuple(files),
        trees=(*_models(inputs, box, layout, configurations), release),
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
        programs=tuple(
            program_spec(section, layout, environments, _needs(inputs, section.name, configurations[section.name]))
            for section in programs
        ),
        health_gate_seconds=site.timing.health_gate_seconds,
    )


def _configurations(inputs: RenderInputs, box: str, layout: BoxLayout) -> dict[str, bytes]:
    """The file below `etc/` of each program of a box, in the order in which the programs start.

    A site of external engines alone has neither coordinator nor gateway: guards are all of ours that runs there.
    """
    roles = inputs.site_file.site.boxes[box].roles
    view = SiteView(inputs.site_file, inputs.specs, inputs.ports)
    pipeline = pipeline_of(inputs.site_file, box) if Role.STAGE in roles else None
    found: dict[str, bytes] = {}
    if pipeline is not None:
        config = stage_config(view, box, pipeline=pipeline, layout=layout, threads=threads_of(inputs, box))
        found[STAGE] = to_bytes(config)
    if Role.COORDINATOR in roles and inputs.specs:
        found[COORDINATOR] = to_bytes(coordinator_config(view, box, layout))
    if Role.GATEWAY in roles and inputs.specs:
        found[GATEWAY] = to_bytes(gateway_config(view, box, layout))
    config = guards_config(view, box, pipeline=pipeline, programs=list(found), layout=layout)
    return {**found, GUARDS: to_bytes(config)}


def _needs(inputs: RenderInputs, name: str, configuration: bytes) -> ProgramNeeds:
    secrets = hashlib.sha256(inputs.api_keys).hexdigest() if name == GATEWAY else ""
    return ProgramNeeds(configuration, inputs.library.digest, inputs.ca_sha256, secrets)


def _supervisor_config(layout: BoxLayout, programs: Sequence[Program]) -> str:
    return render_supervisor_config(
        socket=layout.supervisor_socket,
        pid_file=f"{layout.run_directory}/supervisord.pid",
        log_file=f"{layout.log}/supervisord.log",
        programs=programs,
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
            socket=layout.supervisor_socket,
            stop_seconds=stop_seconds(site_file.site.timing) + SUPERVISOR_STOP_MARGIN_SECONDS,
        )
    own_options = _supervisor_config(layout, ())
    spec = SupervisorSpec(
        config_path=layout.supervisor_config,
        python=python,
        socket=layout.supervisor_socket,
        unit=None if layout.local else UNIT_NAME,
        fingerprint=digest({"python": python, "options": own_options, "unit": text}),
    )
    unit = None if layout.local else FileSpec(f"{UNIT_DIRECTORY}/{UNIT_NAME}", content_of(text.encode()))
    return spec, unit


def _directories(layout: BoxLayout, programs: Collection[str]) -> tuple[DirectorySpec, ...]:
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
    owned += [DirectorySpec(layout.state_of(name), mode=0o700, owner=owner, group=owner) for name in programs]
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


def _models(inputs: RenderInputs, box: str, layout: BoxLayout, programs: Collection[str]) -> tuple[TreeSpec, ...]:
    """Whole model directories for the stage; for the gateway what it tokenises with. One tree a model."""
    trees: dict[str, TreeSpec] = {}
    if GATEWAY in programs:
        for spec in inputs.specs.values():
            tree = inputs.bundle.model_tree(spec.model, layout, weights=False)
            trees[tree.path] = tree
    pipeline = pipeline_of(inputs.site_file, box) if STAGE in programs else None
    if pipeline is not None:
        tree = inputs.bundle.model_tree(inputs.specs[pipeline].model, layout, weights=True)
        trees[tree.path] = tree
    return tuple(trees[path] for path in sorted(trees))
