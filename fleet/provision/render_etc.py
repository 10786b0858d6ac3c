"""`etc/*.json` of the programs of a box, as docs/architecture.md lays them down. Pure.

None of them holds a plan. stage.json names no other stage either: where the neighbours are comes with the plan.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fleet import RELEASED_UNIX_SECONDS
from fleet.errors import ExitCode, FleetError
from fleet.inventory.model import Role
from fleet.inventory.sitefile import SiteFile
from fleet.planning.cost import MIB
from fleet.planning.site import box_cost
from fleet.planning.spec import PipelineSpec, box_to_json, spec_to_json
from fleet.provision.ports import BoxPorts, coordinator_box
from fleet.provision.render_layout import CLOCK_SYNCHRONISED_FILE, BoxLayout, listen_host
from fleet.provision.render_programs import stop_seconds

PREFILL_CHUNK_TOKENS = 128  # a long prompt holds up the others' next token for one such chunk at most
KV_BLOCK_TOKENS = 64  # a sequence's KV cache grows by so much


def pipeline_of(site_file: SiteFile, box: str) -> str | None:
    """Name of the pipeline that a box runs a stage of, or None. External engines are not ours to run.

    Raises:
        FleetError: the box is in two pipelines; one stage runs on a box.
    """
    pipelines = site_file.site.pipelines
    names = [name for name in pipelines if box in pipelines[name].boxes and name not in external_pipelines(site_file)]
    if len(names) > 1:
        line = site_file.lines.get(("pipelines", names[1], "boxes"), 0)
        raise FleetError(
            f"{site_file.file}:{line}: box {box} is in the pipelines {', '.join(names)}, but one stage runs on a box",
            hint="name it in one pipeline only",
            exit_code=ExitCode.INVALID_INVENTORY,
        )
    return names[0] if names else None


def external_pipelines(site_file: SiteFile) -> tuple[str, ...]:
    """Pipelines whose server someone else starts: this version supervises none."""
    return tuple(name for name, line in site_file.site.pipelines.items() if line.engine.kind == "external")


def to_bytes(data: Mapping[str, Any]) -> bytes:
    """JSON for a managed file: sorted and indented, so that equal data is equal bytes and a diff is readable."""
    return (json.dumps(data, indent=2, sort_keys=True) + "\n").encode()


@dataclass(frozen=True)
class SiteView:
    """What the configurations of a site's programs follow from.

    Attributes:
        site_file: the inventory. specs: of every pipeline of our engine. ports: of every box.
    """

    site_file: SiteFile
    specs: Mapping[str, PipelineSpec]
    ports: Mapping[str, BoxPorts]

    def coordinator(self) -> dict[str, Any]:
        """Where stages and gateways dial the coordinator.

        Raises:
            FleetError: no box has the role; the inventory's own check says so before.
        """
        box = coordinator_box(self.site_file)
        return {"box": box, "host": self.site_file.site.boxes[box].address, "port": self.ports[box].coordinator}

    def common(self, box: str, layout: BoxLayout) -> dict[str, Any]:
        """Keys that every configuration has."""
        return {
            "site": self.site_file.site.site,
            "box": box,
            "tls": layout.tls,
            "clock_synchronised_file": _clock_synchronised_file(self.site_file, layout),
        }

    def listen(self, box: str, layout: BoxLayout, port: int) -> dict[str, Any]:
        """An address that a program of a box listens on."""
        return {"host": listen_host(self.site_file.site.boxes[box].address, local=layout.local), "port": port}


def stage_config(view: SiteView, box: str, *, pipeline: str, layout: BoxLayout, threads: int) -> dict[str, Any]:
    """`etc/stage.json` of a box.

    Args:
        threads: compute threads of the stage.
    """
    site, spec, ports = view.site_file.site, view.specs[pipeline], view.ports[box]
    timing = _ring_timing(view.site_file)
    timing |= {"heartbeat_seconds": site.timing.heartbeat_seconds, "drain_seconds": site.timing.drain_seconds}
    return view.common(box, layout) | {
        "schema": 2,
        "pipeline": pipeline,
        "policy": spec.policy,
        "model_directory": layout.model(spec.model_digest),
        "model_digest": spec.model_digest,
        "ring": view.listen(box, layout, ports.ring),
        "metrics": view.listen(box, layout, ports.metrics),
        "coordinator": view.coordinator(),
        "state_directory": layout.state_of("stage"),
        "admin_socket": layout.stage_socket,
        "threads": threads,
        "kernel": "auto",
        "max_batch_sequences": spec.max_sequences,
        "prefill_chunk_tokens": PREFILL_CHUNK_TOKENS,
        "kv_block_tokens": KV_BLOCK_TOKENS,
        "memory_keep_free_bytes": site.boxes[box].memory_keep_free_mib * MIB,
        "timing": timing,
    }


def _clock_synchronised_file(site_file: SiteFile, layout: BoxLayout) -> str | None:
    """What says that the box's clock is set; without a time source nothing does, and no dates are judged."""
    return CLOCK_SYNCHRONISED_FILE if site_file.site.time_servers and not layout.local else None


def coordinator_config(view: SiteView, box: str, layout: BoxLayout) -> dict[str, Any]:
    """`etc/coordinator.json` of the coordinator's box: pipelines and boxes with their nominal figures."""
    ports = view.ports[box]
    members = [name for spec in view.specs.values() for name in spec.boxes]
    return view.common(box, layout) | {
        "schema": 1,
        "listen": view.listen(box, layout, ports.coordinator),
        "http": view.listen(box, layout, ports.coordinator_http),
        "state_directory": layout.state_of("coordinator"),
        "pipelines": {name: spec_to_json(spec) for name, spec in view.specs.items()},
        "boxes": {name: _box(view, name) for name in members},
        "gateways": list(view.site_file.boxes_with(Role.GATEWAY)),
        "timing": _coordinator_timing(view.site_file),
    }


def _box(view: SiteView, name: str) -> dict[str, Any]:
    site = view.site_file.site
    where = {"host": site.boxes[name].address, "ring_port": view.ports[name].ring}
    return where | box_to_json(box_cost(site, name))


def gateway_config(view: SiteView, box: str, layout: BoxLayout) -> dict[str, Any]:
    """`etc/gateway.json` of the gateway's box."""
    gateway, ports = view.site_file.site.gateway, view.ports[box]
    pipelines = {
        name: {
            "model": spec.model,
            "model_directory": layout.model(spec.model_digest),
            "model_digest": spec.model_digest,
            "policy": spec.policy,
            "max_tokens_per_sequence": spec.max_tokens_per_sequence,
            "max_sequences": spec.max_sequences,
        }
        for name, spec in view.specs.items()
    }
    return view.common(box, layout) | {
        "schema": 2,
        "pipelines": pipelines,
        "coordinator": view.coordinator(),
        "listen": view.listen(box, layout, ports.gateway),
        "loopback": {"host": "127.0.0.1", "port": ports.gateway_loopback},
        "api_keys_file": layout.api_keys,
        "journal_directory": layout.state_of("gateway"),
        "max_queued_requests": gateway.max_queued_requests,
        "request_timeout_seconds": gateway.request_timeout_seconds,
        "first_token_timeout_seconds": gateway.first_token_timeout_seconds,
        "replan_wait_seconds": gateway.replan_wait_seconds,
        "keep_alive_seconds": gateway.keep_alive_seconds,
        "resume_max_seconds": gateway.resume_max_seconds,
        "resume_max_streams": gateway.resume_max_streams,
        "timing": _ring_timing(view.site_file),
    }


def guards_config(
    view: SiteView, box: str, *, pipeline: str | None, programs: Sequence[str], layout: BoxLayout
) -> dict[str, Any]:
    """`etc/guards.json` of a box.

    In local mode the machine is not the site's: its clock is left alone, and its NIC is no data link.

    Args:
        pipeline: of its stage, None without one. programs: that supervisord runs there beside the guards.
    """
    site, ports = view.site_file.site, view.ports[box]
    settings = site.guards.model_dump()
    observe = settings.pop("observe")
    if layout.local:
        settings["clock"]["corrections_per_day"] = 0.0
    at = view.listen(box, layout, 0)["host"]
    here = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(at, at)  # noqa: S104 - where to ask, not where to listen
    ways: dict[str, dict[str, Any]] = {
        "stage": {"admin_socket": layout.stage_socket},
        "coordinator": {"https": {"host": here, "port": ports.coordinator_http}},
        "gateway": {"http": {"host": "127.0.0.1", "port": ports.gateway_loopback}},
    }
    coordinator = None
    if pipeline is not None:
        name = coordinator_box(view.site_file)
        port = view.ports[name].coordinator_http
        coordinator = {"box": name, "host": site.boxes[name].address, "port": port}
    return view.common(box, layout) | {
        "schema": 1,
        "listen": view.listen(box, layout, ports.guards),
        "state_directory": layout.state_of("guards"),
        "supervisor_socket": layout.supervisor_socket,
        "programs": [{"name": name, **ways[name]} for name in programs],
        "stage": None if pipeline is None else {"admin_socket": layout.stage_socket, "pipeline": pipeline},
        "coordinator": coordinator,
        "log_directory": layout.log,
        "directories": [layout.prefix],
        "time_servers": list(site.time_servers),
        "build_unix_seconds": float(RELEASED_UNIX_SECONDS),
        "link_mbit_per_second": 0.0 if layout.local else site.boxes[box].link_mbit_per_second,
        "mac": None if layout.local else site.boxes[box].mac,
        "stop_seconds": float(stop_seconds(site.timing)),
        "ready_seconds": site.timing.health_gate_seconds,
        "observe": observe,
        "settings": settings,
    }


def _ring_timing(site_file: SiteFile) -> dict[str, Any]:
    timing = site_file.site.timing.model_dump()
    return {name: seconds for name, seconds in timing.items() if name.startswith("ring_")}


def _coordinator_timing(site_file: SiteFile) -> dict[str, Any]:
    """All that is not about provisioning."""
    timing = site_file.site.timing.model_dump()
    return {name: seconds for name, seconds in timing.items() if not name.startswith("ssh_") and "_gate_" not in name}
