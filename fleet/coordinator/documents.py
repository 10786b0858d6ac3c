"""The JSON documents of the API. Pure: state in, document out."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from fleet.coordinator.context import Context
from fleet.coordinator.pipeline import Pipeline
from fleet.coordinator.records import Event
from fleet.coordinator.routes import degraded, missing_mebibytes, pipeline_state
from fleet.coordinator.standing import box_state
from fleet.coordinator.state import BoxState, members
from stage_runtime.link.control import PROTOCOL


def site_document(context: Context, pipelines: Mapping[str, Pipeline]) -> dict[str, Any]:
    """`GET /v1/site`."""
    now = context.clock.now()
    return {
        "schema": 1,
        "site": context.config.site,
        "protocol": PROTOCOL,
        "pipelines": {name: _pipeline(pipeline, context, now) for name, pipeline in pipelines.items()},
        "boxes": {box.name: box_document(box, pipelines.get(box.pipeline), context) for box in context.boxes.values()},
        "clocks_off": sorted(context.clocks.off),
        "gateways": sorted({gateway.peer.box for gateway in context.gateways}),
    }


def _pipeline(pipeline: Pipeline, context: Context, now: float) -> dict[str, Any]:
    spec, switching = pipeline.spec, pipeline.switching
    state, reason = pipeline_state(spec, switching, pipeline.refusal, context.boxes)
    plan, switch, lease = switching.plan, switching.switch, pipeline.leases.held
    return {
        "model": spec.model,
        "model_digest": spec.model_digest,
        "state": state,
        "reason": reason,
        "epoch": switching.epoch,
        "policy": spec.policy,
        "degraded": degraded(spec, context.boxes),
        "switching": {
            "epoch": switch.record.epoch,
            "planned": switch.record.planned,
            "since_seconds": round(now - switch.began, 3),
            "waiting_for": switch.waiting_for,
        }
        if switch
        else None,
        "draining": switching.draining.record.epoch if switching.draining else None,
        "stages": [
            {"box": each.box, "layers": [each.start, each.end], "embedding": each.embedding, "head": each.head}
            for each in (plan.stages if plan else ())
        ],
        "lease": {"box": lease.box, "seconds_left": round(lease.until - now, 3)} if lease else None,
        "spares": [name for name in spec.boxes if name not in members(plan)],
        "missing_mebibytes": missing_mebibytes(pipeline.refusal),
        "unsurvivable": list(pipeline.planner.outlook.unsurvivable),
    }


def box_document(box: BoxState, pipeline: Pipeline | None, context: Context) -> dict[str, Any]:
    """A box of `GET /v1/site`; also what an order is answered with."""
    now, clock = context.clock.now(), context.clocks.offset(box.name)
    state, reason = box_state(box, pipeline.switching if pipeline else None, context)
    return {
        "pipeline": box.pipeline,
        "state": state,
        "reason": reason,
        "since_seconds": round(now - box.since, 3),
        "slow": box.verdict.slow,
        "incarnation": box.record.incarnation,
        "address": box.address,
        "hold_down_seconds_left": math.ceil(box.hold_down.remaining(now)),
        "clock_offset_seconds": round(clock.seconds, 3) if clock else None,
        "clock_uncertainty_seconds": round(clock.uncertainty_seconds, 3) if clock else None,
        "clock_off": box.name in context.clocks.off,
        "heartbeat": asdict(box.heartbeat) if box.heartbeat and box.peer else None,
    }


def health_document(context: Context, pipelines: Mapping[str, Pipeline]) -> tuple[bool, dict[str, Any]]:
    """`GET /health`: whether every pipeline serves, and why not."""
    reasons = {}
    for name, pipeline in pipelines.items():
        state, reason = pipeline_state(pipeline.spec, pipeline.switching, pipeline.refusal, context.boxes)
        if state != "serving":
            reasons[name] = f"{state}: {reason}"
    text = "; ".join(f"pipeline {name} is {reason}" for name, reason in reasons.items())
    document = {"schema": 1, "site": context.config.site, "box": context.config.box}
    return not reasons, {**document, "state": "ready" if not reasons else "failed", "reason": text}


def events_document(events: list[Event]) -> dict[str, Any]:
    """`GET /v1/events`."""
    return {"schema": 1, "events": [asdict(event) for event in events]}
