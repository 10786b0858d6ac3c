"""Prometheus metrics of the coordinator; every label set exists from the start, none comes from a peer."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Summary

from fleet.coordinator.config import CoordinatorConfig

PREFIX = "fleet_coordinator"
EVENT_KINDS = (
    "box-joined",
    "box-dead",
    "box-hung",
    "box-slow",
    "box-returned",
    "box-held-down",
    "box-clone-refused",
    "box-moved",
    "box-clock-off",
    "box-clock-right",
    "plan-preparing",
    "plan-committed",
    "plan-aborted",
    "plan-refused",
    "plan-serving",
    "plan-retired",
    "drain-requested",
    "undrain-requested",
    "lease-taken",
    "lease-returned",
    "lease-ended",
    "gateway-joined",
    "gateway-lost",
    "coordinator-started",
    "database-replaced",
)
SWITCH_KINDS = ("planned", "unplanned")
PHASES = ("detect", "plan", "prepare", "commit", "ring")
VERDICTS = ("dead", "hung", "slow")


class CoordinatorMetrics:
    """All series of one coordinator, in a registry of their own."""

    def __init__(self, config: CoordinatorConfig) -> None:
        registry = self.registry = CollectorRegistry()

        def per_box(name: str, text: str) -> Gauge:
            gauge = Gauge(f"{PREFIX}_{name}", text, ["box"], registry=registry)
            for box in config.boxes:
                gauge.labels(box)
            return gauge

        def per_pipeline(name: str, text: str) -> Gauge:
            gauge = Gauge(f"{PREFIX}_{name}", text, ["pipeline"], registry=registry)
            for pipeline in config.pipelines:
                gauge.labels(pipeline)
            return gauge

        self.box_alive = per_box("box_alive", "1 if the box is heard and judged alive.")
        self.box_slow = per_box("box_slow", "1 if the box's steps are far above its own history.")
        self.clock_offset = Gauge(  # a box whose clock is not known has no series: 0 would be a made-up number
            f"{PREFIX}_box_clock_offset_seconds",
            "Wall clock of a box ahead of the coordinator's, by its heartbeats.",
            ["box"],
            registry=registry,
        )
        self.missing_bytes = per_box("missing_bytes", "Memory that the box lacks while no plan fits.")
        self.plan_epoch = per_pipeline("plan_epoch", "Epoch of the plan that serves; 0: none yet.")
        self.serving = per_pipeline("pipeline_serving", "1 if a plan is committed and none of its boxes is lost.")
        self.refused = per_pipeline("plan_refused", "1 while no plan fits the boxes that live.")
        self.gateways = Gauge(f"{PREFIX}_gateways", "Gateways connected.", registry=registry)
        self.heartbeats = Counter(f"{PREFIX}_heartbeats", "Heartbeats received.", ["box"], registry=registry)
        self.refused_links = Counter(
            f"{PREFIX}_refused_links", "Connections that did not become or stay links.", registry=registry
        )
        self.events = Counter(f"{PREFIX}_events", "Events, by kind.", ["kind"], registry=registry)
        self.switches = Counter(f"{PREFIX}_switches", "Plans committed.", ["pipeline", "kind"], registry=registry)
        self.verdicts = Counter(f"{PREFIX}_verdicts", "Verdicts against boxes.", ["box", "verdict"], registry=registry)
        self.phases = Summary(
            f"{PREFIX}_switch_phase_seconds", "Seconds that the phases of a switch took.", ["phase"], registry=registry
        )
        for box in config.boxes:
            self.heartbeats.labels(box)
            for verdict in VERDICTS:
                self.verdicts.labels(box, verdict)
        for kind in EVENT_KINDS:
            self.events.labels(kind)
        for phase in PHASES:
            self.phases.labels(phase)
        for pipeline in config.pipelines:
            for kind in SWITCH_KINDS:
                self.switches.labels(pipeline, kind)
