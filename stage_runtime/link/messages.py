"""What a gateway and a pipeline's first stage say to each other; no torch here, the gateway imports it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Literal, Protocol


@dataclass(frozen=True)
class SamplingParameters:
    """How the next token is chosen; semantics of the OpenAI API.

    Attributes:
        temperature: 0 is greedy (ties go to the lower token id).
        top_p: nucleus, 0 < top_p ≤ 1.
        top_k: 0 keeps the whole vocabulary.
        seed: u64; the gateway draws one when the client sends none.
        choice: index of the choice when n > 1, u32; part of the random stream.
        frequency_penalty: per occurrence in the answer so far, −2…2.
        presence_penalty: once per token that occurs in the answer so far, −2…2.
        logprobs: how many alternatives to report per token; None reports none, 0 only the chosen one.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0
    choice: int = 0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logprobs: int | None = None


@dataclass(frozen=True)
class GenerateRequest:
    """One sequence to generate.

    Attributes:
        sequence_id: u64, drawn by the gateway, unique at the site, survives plan epochs.
        request_id: the client's request, for log lines on every stage.
        prompt: token ids.
        max_tokens: most tokens to generate.
        stop_token_ids: generation ends after one of these (it is not reported as a token).
        sampling: how tokens are chosen.
        generated: tokens of the answer that the gateway has already, when a sequence goes on after its ring broke, its
            plan changed, or the gateway itself restarted. The next TokenEvent has index len(generated); max_tokens,
            penalties and the random stream count them.
    """

    sequence_id: int
    request_id: str
    prompt: tuple[int, ...]
    max_tokens: int
    stop_token_ids: tuple[int, ...]
    sampling: SamplingParameters
    generated: tuple[int, ...] = ()


@dataclass(frozen=True)
class TokenLogprob:
    """A token with its natural-log probability under the unfiltered distribution at temperature 1."""

    token_id: int
    logprob: float


@dataclass(frozen=True)
class TokenEvent:
    """One generated token; `index` counts from 0 without gaps within a sequence."""

    index: int
    token_id: int
    logprob: float | None = None
    top_logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True)
class FinishedEvent:
    """The last event of a sequence.

    Attributes:
        reason: "stop" a stop token; "length" max_tokens reached; "cancelled" by the gateway;
            "overloaded" no room (HTTP 429); "unavailable" the ring broke, its plan ended or it is not ready: submit the
            sequence again, with what was generated, when a ring is; "error" a bug (HTTP 500);
            "invalid" the request can't be served, e.g. too long for the context (HTTP 400).
        message: for people, empty for stop, length and cancelled.
        prompt_tokens: tokens of the prompt.
        completion_tokens: tokens generated.
    """

    reason: Literal["stop", "length", "cancelled", "overloaded", "unavailable", "error", "invalid"]
    message: str = ""
    prompt_tokens: int = 0
    completion_tokens: int = 0


@dataclass(frozen=True)
class PipelineStatus:
    """What the gateway knows about a pipeline from its first stage.

    Attributes:
        ready: the ring is complete, requests are accepted.
        reason: why it is not ready, for people; empty when ready.
        epoch: plan epoch that serves.
        policy: numeric policy, e.g. "exact".
        largest_logit_difference: δ of the ring's probe (whole against token by token); None before it ran.
        active_sequences: sequences in flight at the first stage.
        queued_sequences: sequences waiting at the first stage.
        tokens_per_second: generated, over the last 10 s.
    """

    ready: bool = False
    reason: str = "not connected"
    epoch: int = 0
    policy: str = ""
    largest_logit_difference: float | None = None
    active_sequences: int = 0
    queued_sequences: int = 0
    tokens_per_second: float = 0.0


class Pipeline(Protocol):
    """A pipeline as the gateway sees it; `stage_runtime.link.client.PipelineClient` implements it."""

    @property
    def status(self) -> PipelineStatus:
        """The latest status; never blocks."""

    async def run(self) -> None:
        """Connect, reconnect with back-off, receive; runs until cancelled. The owner keeps the task."""

    def generate(self, request: GenerateRequest) -> AsyncIterator[TokenEvent | FinishedEvent]:
        """Submit a sequence and yield its events; exactly one FinishedEvent, last.

        Closing the iterator early (or cancelling the task that iterates) cancels the sequence on all stages.
        Raises nothing for remote trouble: a broken link ends in FinishedEvent("unavailable").
        """


@dataclass(frozen=True)
class Hello:
    """First message on every link, both ways; any difference in protocol, model digest or policy is refused.

    Attributes:
        protocol: version of frames and messages.
        role: "stage" (on the ring: the predecessor), "gateway" or "coordinator".
        box: the sender's name; must equal the name in its certificate.
        site: the site's name; must equal the site in its certificate.
        model_digest: hex, of the pipeline's model; not compared where one side is a coordinator, it serves every model.
        policy: numeric policy; compared likewise.
        epoch: plan epoch that the link belongs to; 0 on the control channel.
        runtime_version: of the fleet distribution, reported when refused.
    """

    protocol: int
    role: str
    box: str
    site: str
    model_digest: str
    policy: str
    epoch: int
    runtime_version: str
    extra: dict[str, str] = field(default_factory=dict)
