"""From answers of /health to the rows and the exit code of `fleet status`; pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fleet.errors import ExitCode
from fleet.observe.health import Answer, SiteAnswers
from fleet.observe.site_view import CoordinatorView, coordinator_view, integer, mapping, number, text

STAGE_COLUMNS = (
    "box",
    "state",
    "layers",
    "holds",
    "weights MiB",
    "KV MiB",
    "RSS MiB",
    "tokens/s",
    "epoch",
    "kernel",
)
PIPELINE_COLUMNS = ("pipeline", "state", "model", "epoch", "policy", "logit δ", "tokens/s", "active", "queued")
SERVING_STATES = ("loaded", "ready")
ABSENT = "–"


@dataclass(frozen=True)
class StageRow:
    """A stage box. `state` is its own, or "unreachable", or "failed"; None is "not told"."""

    box: str
    state: str
    layers: tuple[int, int] | None = None
    embedding: bool | None = None
    head: bool | None = None
    weight_bytes: int | None = None
    kv_bytes: int | None = None
    rss_bytes: int | None = None
    tokens_per_second: float | None = None
    epoch: int | None = None
    kernel: str | None = None
    policy: str | None = None
    largest_logit_difference: float | None = None
    note: str = ""

    def cells(self) -> tuple[str, ...]:
        """As `STAGE_COLUMNS`; layers are printed inclusive, as the inventory writes them."""
        layers = ABSENT
        if self.layers is not None:
            first, end = self.layers
            layers = "none" if first == end else f"{first}-{end - 1}"
        holds = ", ".join(name for name, held in (("embedding", self.embedding), ("head", self.head)) if held)
        return (
            self.box,
            self.state,
            layers,
            holds or ABSENT,
            _mebibytes(self.weight_bytes),
            _mebibytes(self.kv_bytes),
            _mebibytes(self.rss_bytes),
            ABSENT if self.tokens_per_second is None else f"{self.tokens_per_second:.1f}",
            _cell(self.epoch),
            _cell(self.kernel),
        )


@dataclass(frozen=True)
class PipelineRow:
    """A pipeline as the gateway sees it; pipeline is empty if the gateway did not answer."""

    pipeline: str
    state: str
    model: str | None = None
    epoch: int | None = None
    policy: str | None = None
    largest_logit_difference: float | None = None
    tokens_per_second: float | None = None
    active_sequences: int | None = None
    queued_sequences: int | None = None
    note: str = ""

    def cells(self) -> tuple[str, ...]:
        """As `PIPELINE_COLUMNS`."""
        difference = self.largest_logit_difference
        return (
            self.pipeline or "(gateway)",
            self.state,
            _cell(self.model),
            _cell(self.epoch),
            _cell(self.policy),
            ABSENT if difference is None else f"{difference:.1e}",
            ABSENT if self.tokens_per_second is None else f"{self.tokens_per_second:.1f}",
            _cell(self.active_sequences),
            _cell(self.queued_sequences),
        )


@dataclass(frozen=True)
class SiteStatus:
    """Everything `fleet status` shows. `gateway_state` is "ready", "unavailable", "unreachable", "failed" or "none"."""

    stages: tuple[StageRow, ...]
    pipelines: tuple[PipelineRow, ...]
    gateway_state: str
    gateway_note: str
    coordinator: CoordinatorView

    @property
    def failures(self) -> tuple[str, ...]:
        """One line for each stage that does not serve, and for gateway and coordinator if they do not."""
        lines = [f"{row.box}: {row.state}: {row.note}" for row in self.stages if row.state not in SERVING_STATES]
        if self.gateway_state not in ("ready", "none"):
            lines.append(f"gateway: {self.gateway_state}: {self.gateway_note}")
        if self.coordinator.state not in ("answers", "none"):
            serves_on = "the site serves on with the plan that it has, and " if self.gateway_state == "ready" else ""
            state, note = self.coordinator.state, self.coordinator.note
            lines.append(f"coordinator: {state}: {note}; {serves_on}nothing is healed until it is back")
        return tuple(lines)

    @property
    def notes(self) -> tuple[str, ...]:
        """One line for each stage that serves and has something to say."""
        return tuple(f"{row.box}: {row.note}" for row in self.stages if row.state in SERVING_STATES and row.note)

    @property
    def exit_code(self) -> ExitCode:
        """0 all serve; 3 only unreachable boxes stand in the way; 1 anything else.

        With a box out of reach the ring can't be whole, so a gateway that waits for it has not failed.
        """
        unreachable = [row for row in self.stages if row.state == "unreachable"]
        failed = [row for row in self.stages if row not in unreachable and row.state not in SERVING_STATES]
        others = (self.gateway_state, self.coordinator.state)
        if failed or "failed" in others:
            return ExitCode.FAILED
        if unreachable or "unreachable" in others:
            return ExitCode.UNREACHABLE
        return ExitCode.OK if self.gateway_state in ("ready", "none") else ExitCode.FAILED


def site_status(answers: SiteAnswers) -> SiteStatus:
    """Rows for every stage and pipeline."""
    stages = tuple(_stage_row(box, answer) for box, answer in answers.stages.items())
    coordinator = coordinator_view(answers.coordinator)
    gateway = answers.gateway
    if gateway is None:
        return SiteStatus(stages, (), "none", "the site has no gateway", coordinator)
    if gateway.document is None:
        state = "unreachable" if gateway.unreachable else "failed"
        row = PipelineRow("", state, note=gateway.error)
        return SiteStatus(stages, (row,), state, gateway.error, coordinator)
    document = gateway.document
    pipelines = mapping(document.get("pipelines"))
    rows = tuple(_pipeline_row(name, mapping(entry)) for name, entry in pipelines.items())
    state = "ready" if document.get("state") == "ready" else "unavailable"
    return SiteStatus(stages, rows, state, text(document.get("reason")) or "", coordinator)


def _stage_row(box: str, answer: Answer) -> StageRow:
    if answer.document is None:
        return StageRow(box, "unreachable" if answer.unreachable else "failed", note=answer.error)
    document = answer.document
    return StageRow(
        box=box,
        state=text(document.get("state")) or "failed",
        layers=_layers(document.get("layers")),
        embedding=document.get("embedding") is True,
        head=document.get("head") is True,
        weight_bytes=integer(document.get("weight_bytes")),
        kv_bytes=integer(document.get("kv_bytes")),
        rss_bytes=integer(document.get("rss_bytes")),
        tokens_per_second=number(document.get("tokens_per_second")),
        epoch=integer(document.get("epoch")),
        kernel=text(document.get("kernel")),
        policy=text(document.get("policy")),
        largest_logit_difference=number(document.get("largest_logit_difference")),
        note=text(document.get("reason")) or "",
    )


def _pipeline_row(name: str, entry: Mapping[str, Any]) -> PipelineRow:
    return PipelineRow(
        pipeline=name,
        state="ready" if entry.get("ready") is True else "unavailable",
        model=text(entry.get("model")),
        epoch=integer(entry.get("epoch")),
        policy=text(entry.get("policy")),
        largest_logit_difference=number(entry.get("largest_logit_difference")),
        tokens_per_second=number(entry.get("tokens_per_second")),
        active_sequences=integer(entry.get("active_sequences")),
        queued_sequences=integer(entry.get("queued_sequences")),
        note=text(entry.get("reason")) or "",
    )


def _layers(value: object) -> tuple[int, int] | None:
    if isinstance(value, list) and len(value) == 2 and all(type(item) is int for item in value):
        return value[0], value[1]
    return None


def _mebibytes(value: int | None) -> str:
    """One decimal where it matters: a KV cache may be much smaller than a mebibyte."""
    if value is None:
        return ABSENT
    mebibytes = value / 2**20
    return f"{mebibytes:.1f}" if 0 < mebibytes < 10 else f"{mebibytes:.0f}"


def _cell(value: object) -> str:
    return ABSENT if value is None else str(value)
