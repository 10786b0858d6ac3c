"""Prometheus metrics of the gateway; every label set exists from the start, none comes from a client."""

from __future__ import annotations

from collections.abc import Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

ENDPOINTS = ("chat", "completions", "streams")
OUTCOMES = (
    "ok",
    "cancelled",
    "invalid",
    "unauthorized",
    "overloaded",
    "unavailable",
    "timeout",
    "error",
)
FIRST_TOKEN_BUCKETS_SECONDS = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
PAUSE_BUCKETS_SECONDS = (0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 1.0, 1.5, 2.0, 3.0, 5.0, 10.0, 30.0, 60.0, 120.0)
BETWEEN_TOKEN_BUCKETS_SECONDS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)


class GatewayMetrics:
    """All series of one gateway, in a registry of their own."""

    def __init__(self, pipelines: Sequence[str]) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter(
            "fleet_gateway_requests",
            "Requests answered, by how they ended.",
            ["endpoint", "outcome"],
            registry=self.registry,
        )
        for endpoint in ENDPOINTS:
            for outcome in OUTCOMES:
                self.requests.labels(endpoint, outcome)
        self.prompt_tokens = Counter(
            "fleet_gateway_prompt_tokens", "Prompt tokens of accepted requests.", registry=self.registry
        )
        self.completion_tokens = Counter(
            "fleet_gateway_completion_tokens", "Tokens generated for clients.", registry=self.registry
        )
        self.first_token_seconds = Histogram(
            "fleet_gateway_first_token_seconds",
            "From the request to the first token of a choice, waiting included.",
            buckets=FIRST_TOKEN_BUCKETS_SECONDS,
            registry=self.registry,
        )
        self.between_token_seconds = Histogram(
            "fleet_gateway_between_token_seconds",
            "Between two tokens of a choice.",
            buckets=BETWEEN_TOKEN_BUCKETS_SECONDS,
            registry=self.registry,
        )
        self.resumed_streams = Counter(
            "fleet_gateway_resumed_streams", "Times a stream was asked for again.", registry=self.registry
        )
        self.open_resumable_streams = Gauge(
            "fleet_gateway_open_resumable_streams",
            "Streams that can be resumed: running, or ended not long ago.",
            registry=self.registry,
        )
        self.journal_failures = Counter(
            "fleet_gateway_journal_failures", "Writes that the journal did not take.", registry=self.registry
        )
        self.coordinator_connected = Gauge(
            "fleet_gateway_coordinator_connected", "1 while the link to the coordinator is up.", registry=self.registry
        )
        self._interruptions = Counter(
            "fleet_gateway_interruptions",
            "Sequences that ended because their ring, plan or link did.",
            ["pipeline"],
            registry=self.registry,
        )
        self._resubmissions = Counter(
            "fleet_gateway_resubmissions", "Sequences submitted again.", ["pipeline"], registry=self.registry
        )
        self._pauses = Histogram(
            "fleet_gateway_pause_seconds",
            "Between two tokens of a sequence across a resubmission.",
            ["pipeline"],
            buckets=PAUSE_BUCKETS_SECONDS,
            registry=self.registry,
        )
        self._per_pipeline = {
            name: Gauge(f"fleet_gateway_{name}", text, ["pipeline"], registry=self.registry)
            for name, text in (
                ("active_sequences", "Sequences at the pipeline's first stage."),
                ("queued_sequences", "Sequences that wait in the gateway."),
                ("pipeline_ready", "1 if the pipeline takes requests."),
                ("pipeline_refused_flag", "1 if no plan fits the boxes that are left."),
                ("route_epoch_number", "Epoch of the last route."),
            )
        }
        for pipeline in pipelines:
            self.observe_pipeline(pipeline, active=0, queued=0, ready=False, refused=False, epoch=0)
            self._interruptions.labels(pipeline)
            self._resubmissions.labels(pipeline)
            self._pauses.labels(pipeline)

    def observe_pipeline(
        self, pipeline: str, *, active: int, queued: int, ready: bool, refused: bool, epoch: int
    ) -> None:
        """Set a pipeline's gauges; called at each scrape."""
        self._per_pipeline["active_sequences"].labels(pipeline).set(active)
        self._per_pipeline["queued_sequences"].labels(pipeline).set(queued)
        self._per_pipeline["pipeline_ready"].labels(pipeline).set(int(ready))
        self._per_pipeline["pipeline_refused_flag"].labels(pipeline).set(int(refused))
        self._per_pipeline["route_epoch_number"].labels(pipeline).set(epoch)

    def interrupted(self, pipeline: str) -> None:
        """A sequence ended because its ring, plan or link did."""
        self._interruptions.labels(pipeline).inc()

    def resubmitted(self, pipeline: str) -> None:
        """A sequence was submitted again."""
        self._resubmissions.labels(pipeline).inc()

    def paused(self, pipeline: str, seconds: float) -> None:
        """Time between two tokens of a sequence across a resubmission."""
        self._pauses.labels(pipeline).observe(seconds)
