"""Pipelines behind the gateway, and which of them takes a request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fleet.gateway.admission import AdmissionQueue, QueueFullError, Ticket
from fleet.gateway.config import PipelineConfig
from fleet.gateway.errors import ApiError, overloaded, unavailable
from fleet.gateway.healing import HealingPipeline
from fleet.gateway.vocabulary import Vocabulary


@dataclass(frozen=True)
class Backend:
    """A pipeline with what the gateway keeps for it."""

    config: PipelineConfig
    pipeline: HealingPipeline
    vocabulary: Vocabulary
    queue: AdmissionQueue

    @property
    def context_tokens(self) -> int:
        """Most tokens of prompt and answer together."""
        return min(self.config.max_tokens_per_sequence, self.vocabulary.context_tokens)

    @property
    def outstanding(self) -> int:
        """Sequences computed or waiting."""
        return self.queue.active + self.queue.waiting


@dataclass(frozen=True)
class Admitted:
    """A request's places on a pipeline: one ticket a choice."""

    backend: Backend
    tickets: Sequence[Ticket]


def of_model(backends: Sequence[Backend], model: str) -> list[Backend]:
    """The pipelines that serve a model.

    Raises:
        ApiError: 404, no pipeline does.
    """
    serving = [backend for backend in backends if backend.config.model == model]
    if not serving:
        known = ", ".join(sorted({backend.config.model for backend in backends}))
        raise ApiError(
            404, f"model: no model {model[:80]!r} here; there is {known}", param="model", code="model_not_found"
        )
    return serving


def admit(backends: Sequence[Backend], prompt_tokens: int, choices: int) -> Admitted:
    """Claim places on the pipeline with the least outstanding work whose context holds the prompt.

    One that is ready comes before one that waits for a plan; on that the request waits too.

    Raises:
        ApiError: 400 too long for every context, 503 no plan fits any of them, 429 too many wait.
    """
    fitting = [backend for backend in backends if prompt_tokens < backend.context_tokens]
    if not fitting:
        context = max(backend.context_tokens for backend in backends)
        raise ApiError(
            400,
            f"the prompt has {prompt_tokens} tokens; prompt and answer together may have {context} tokens here",
            param="messages",
            code="context_length_exceeded",
        )
    possible = [backend for backend in fitting if backend.pipeline.situation.state != "refused"]
    if not possible:
        raise _refused(fitting)
    chosen = min(possible, key=lambda backend: (not backend.pipeline.status.ready, backend.outstanding))
    try:
        return Admitted(chosen, chosen.queue.enter(choices))
    except QueueFullError:
        raise overloaded(
            f"{chosen.queue.active} answers are being computed and {chosen.queue.waiting} wait; try again later"
        ) from None


def _refused(backends: Sequence[Backend]) -> ApiError:
    situations = [(backend.config.name, backend.pipeline.situation) for backend in backends]
    reasons = "; ".join(f"pipeline {name}: {situation.reason}" for name, situation in situations)
    waits = [each.retry_after_seconds for _, each in situations if each.retry_after_seconds is not None]
    return unavailable(f"the model is not ready: {reasons}", retry_after_seconds=min(waits, default=None))


def health(backends: Sequence[Backend], *, site: str, box: str, version: str) -> dict[str, Any]:
    """The document of /health; "ready" when every model has a pipeline that takes requests."""
    served = {backend.config.model for backend in backends if backend.pipeline.status.ready}
    missing = [backend for backend in backends if backend.config.model not in served]
    reason = "; ".join(f"pipeline {each.config.name}: {each.pipeline.status.reason}" for each in missing)
    return {
        "schema": 1,
        "site": site,
        "box": box,
        "version": version,
        "state": "unavailable" if missing else "ready",
        "reason": reason,
        "pipelines": {backend.config.name: _pipeline_health(backend) for backend in backends},
    }


def _pipeline_health(backend: Backend) -> dict[str, Any]:
    status, situation = backend.pipeline.status, backend.pipeline.situation
    return {
        "model": backend.config.model,
        "state": situation.state,
        "first_stage": situation.first_stage,
        "ready": status.ready,
        "reason": status.reason,
        "degraded": situation.degraded,
        "missing_mebibytes": situation.missing_mebibytes,
        "epoch": status.epoch,
        "policy": status.policy or backend.config.policy,
        "largest_logit_difference": status.largest_logit_difference,
        "active_sequences": backend.queue.active,
        "queued_sequences": backend.queue.waiting,
        "tokens_per_second": status.tokens_per_second,
    }
