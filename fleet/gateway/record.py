"""Everything that is decided when a request is admitted: with it and the entries an answer can be told again."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from fleet.gateway.requests import GenerationOptions


@dataclass(frozen=True)
class AdmissionRecord:
    """An admitted request; kept in the journal for resumable streams.

    Attributes:
        stream_id: the answer's id. endpoint: names the shape of its chunks.
        created: Unix seconds, as in the chunks.
        fingerprint: of the answer.
        pipeline: that computes it. model_digest: of its model, hex.
        key_name: of the API key that asked.
        request_id: the client's, for logs on every stage.
        sequence_ids: one a choice.
        prompt: token ids.
        max_tokens: a choice; prompt and answer fit the context.
        options: sampling with the seed in place, stop strings, number of choices.
    """

    stream_id: str
    endpoint: Literal["chat", "completions"]
    created: int
    fingerprint: str
    pipeline: str
    model_digest: str
    key_name: str
    request_id: str
    sequence_ids: tuple[int, ...]
    prompt: tuple[int, ...]
    max_tokens: int
    options: GenerationOptions
