"""`etc/stage.json` and `etc/gateway.json` of a box, as docs/architecture.md lays them down. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from fleet.errors import ExitCode, FleetError
from fleet.inventory.sitefile import SiteFile
from fleet.planning.plan import Plan
from fleet.provision.ports import BoxPorts
from fleet.provision.render_layout import CLOCK_SYNCHRONISED_FILE, BoxLayout, listen_host

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


def stage_config(
    site_file: SiteFile,
    box: str,
    plan: Plan,
    *,
    pipeline: str,
    ports: Mapping[str, BoxPorts],
    layout: BoxLayout,
    threads: int,
) -> dict[str, Any]:
    """`etc/stage.json` of a box.

    Args:
        ports: of every box of the site.
        threads: compute threads of the stage.
    """
    site = site_file.site
    planned = plan.pipelines[pipeline]
    host = listen_host(site.boxes[box].address, local=layout.local)
    peers = {
        name: {"host": site.boxes[name].address, "port": ports[name].ring} for name in site.pipelines[pipeline].boxes
    }
    timing = _ring_timing(site_file)
    timing["drain_seconds"] = site.timing.drain_seconds
    return {
        "schema": 1,
        "site": site.site,
        "box": box,
        "pipeline": pipeline,
        "plan": json.loads(plan.to_json()),
        "model_directory": layout.model(planned.model_digest),
        "model_digest": planned.model_digest,
        "ring": {"host": host, "port": ports[box].ring},
        "metrics": {"host": host, "port": ports[box].metrics},
        "peers": peers,
        "admin_socket": layout.stage_socket,
        "tls": layout.tls,
        "clock_synchronised_file": _clock_synchronised_file(site_file, layout),
        "threads": threads,
        "kernel": "auto",
        "max_batch_sequences": planned.max_sequences,
        "prefill_chunk_tokens": PREFILL_CHUNK_TOKENS,
        "kv_block_tokens": KV_BLOCK_TOKENS,
        "timing": timing,
    }


def _clock_synchronised_file(site_file: SiteFile, layout: BoxLayout) -> str | None:
    """What says that the box's clock is set; without a time source nothing does, and no dates are judged."""
    return CLOCK_SYNCHRONISED_FILE if site_file.site.time_servers and not layout.local else None


def gateway_config(
    site_file: SiteFile, box: str, plan: Plan, ports: Mapping[str, BoxPorts], layout: BoxLayout
) -> dict[str, Any]:
    """`etc/gateway.json` of the gateway's box."""
    site = site_file.site
    pipelines = {}
    for name, planned in plan.pipelines.items():
        first = planned.stages[0].box
        pipelines[name] = {
            "model": planned.model,
            "model_directory": layout.model(planned.model_digest),
            "model_digest": planned.model_digest,
            "policy": planned.policy,
            "epoch": plan.epoch,
            "max_tokens_per_sequence": planned.max_tokens_per_sequence,
            "max_sequences": planned.max_sequences,
            "first_stage": {"box": first, "host": site.boxes[first].address, "port": ports[first].ring},
        }
    return {
        "schema": 1,
        "site": site.site,
        "box": box,
        "pipelines": pipelines,
        "listen": {
            "host": listen_host(site.boxes[box].address, local=layout.local),
            "port": ports[box].gateway,
        },
        "loopback": {"host": "127.0.0.1", "port": ports[box].gateway_loopback},
        "tls": layout.tls,
        "clock_synchronised_file": _clock_synchronised_file(site_file, layout),
        "api_keys_file": layout.api_keys,
        "journal_directory": layout.journal,
        "max_queued_requests": site.gateway.max_queued_requests,
        "request_timeout_seconds": site.gateway.request_timeout_seconds,
        "first_token_timeout_seconds": site.gateway.first_token_timeout_seconds,
        "timing": _ring_timing(site_file),
    }


def _ring_timing(site_file: SiteFile) -> dict[str, Any]:
    timing = site_file.site.timing.model_dump()
    return {name: seconds for name, seconds in timing.items() if name.startswith("ring_")}
