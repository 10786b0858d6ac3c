"""Bodies of answers, whole and in chunks; pure functions of what was generated."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from fleet.gateway.fold import Delta, ShownToken
from fleet.gateway.vocabulary import Vocabulary
from stage_runtime.link.messages import TokenLogprob

LOWEST_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON can't say; the API uses this value too."""


@dataclass
class ChoiceText:
    """What a choice has said, gathered for an answer that is not streamed."""

    text: list[str] = field(default_factory=list)
    tokens: list[ShownToken] = field(default_factory=list)
    finish_reason: str | None = None

    def add(self, delta: Delta) -> None:
        """Append a delta."""
        self.text.append(delta.text)
        self.tokens.extend(delta.tokens)
        self.finish_reason = delta.finish_reason


class Shape(ABC):
    """How an end point words its answer.

    Args:
        stream_id: the answer's id. created: Unix seconds. model: as the client named it.
        fingerprint: changes when the same seed may give another answer.
        vocabulary: for the text of single tokens.
        logprobs: the client asked for log-probabilities; alternatives per token, or None.
        include_usage: chunks carry a usage field.
        token_ids: each choice carries its tokens' ids.
    """

    prefix: str
    whole_object: str
    chunk_object: str

    def __init__(
        self,
        *,
        stream_id: str,
        created: int,
        model: str,
        fingerprint: str,
        vocabulary: Vocabulary,
        logprobs: int | None,
        include_usage: bool,
        token_ids: bool,
    ) -> None:
        self._head = {"id": stream_id, "created": created, "model": model, "system_fingerprint": fingerprint}
        self._vocabulary = vocabulary
        self._alternatives = logprobs
        self._include_usage = include_usage
        self._token_ids = token_ids
        self._begun: set[int] = set()

    def whole(self, choices: Sequence[ChoiceText], counts: dict[str, int]) -> dict[str, Any]:
        """The body of an answer that is not streamed."""
        bodies = [
            self._with_token_ids(self._choice(index, choice), choice.tokens) for index, choice in enumerate(choices)
        ]
        return {**self._head, "object": self.whole_object, "choices": bodies, "usage": counts}

    def chunks(self, delta: Delta) -> Iterator[dict[str, Any]]:
        """One chunk for text, another for the finish reason."""
        if delta.text or delta.tokens:
            yield self._chunk([self._with_token_ids(self._chunk_choice(delta, None), delta.tokens)])
        if delta.finish_reason is not None:
            yield self._chunk([self._chunk_choice(Delta(delta.choice, "", ()), delta.finish_reason)])

    def usage_chunk(self, counts: dict[str, int]) -> dict[str, Any]:
        """The chunk after the last, without choices."""
        return {**self._chunk([]), "usage": counts}

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        chunk = {**self._head, "object": self.chunk_object, "choices": choices}
        return {**chunk, "usage": None} if self._include_usage else chunk

    def _with_token_ids(self, choice: dict[str, Any], tokens: Sequence[ShownToken]) -> dict[str, Any]:
        return {**choice, "token_ids": [token.event.token_id for token in tokens]} if self._token_ids else choice

    def _first_of(self, choice: int) -> bool:
        """True for the first chunk of a choice."""
        first = choice not in self._begun
        self._begun.add(choice)
        return first

    @abstractmethod
    def _choice(self, index: int, choice: ChoiceText) -> dict[str, Any]: ...

    @abstractmethod
    def _chunk_choice(self, delta: Delta, finish_reason: str | None) -> dict[str, Any]: ...


class ChatShape(Shape):
    """Answers of /v1/chat/completions."""

    prefix = "chatcmpl-"
    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def _choice(self, index: int, choice: ChoiceText) -> dict[str, Any]:
        return {
            "index": index,
            "message": {"role": "assistant", "content": "".join(choice.text), "refusal": None},
            "logprobs": self._logprobs(choice.tokens),
            "finish_reason": choice.finish_reason,
        }

    def _chunk_choice(self, delta: Delta, finish_reason: str | None) -> dict[str, Any]:
        content: dict[str, str] = {"role": "assistant", "content": ""} if self._first_of(delta.choice) else {}
        if finish_reason is None:
            content["content"] = delta.text
        return {
            "index": delta.choice,
            "delta": content,
            "logprobs": self._logprobs(delta.tokens) if finish_reason is None else None,
            "finish_reason": finish_reason,
        }

    def _logprobs(self, tokens: Sequence[ShownToken]) -> dict[str, Any] | None:
        if self._alternatives is None:
            return None
        content = [
            {
                **self._entry(token.event.token_id, token.event.logprob),
                "top_logprobs": [
                    self._entry(other.token_id, other.logprob)
                    for other in token.event.top_logprobs[: self._alternatives]
                ],
            }
            for token in tokens
        ]
        return {"content": content, "refusal": None}

    def _entry(self, token_id: int, logprob: float | None) -> dict[str, Any]:
        raw = self._vocabulary.token_bytes(token_id)
        entry = {"token": raw.decode("utf-8", "replace"), "logprob": _finite(logprob), "bytes": list(raw)}
        return {**entry, "token_id": token_id} if self._token_ids else entry


class CompletionShape(Shape):
    """Answers of /v1/completions."""

    prefix = "cmpl-"
    whole_object = "text_completion"
    chunk_object = "text_completion"

    def _choice(self, index: int, choice: ChoiceText) -> dict[str, Any]:
        return {
            "index": index,
            "text": "".join(choice.text),
            "logprobs": self._logprobs(choice.tokens),
            "finish_reason": choice.finish_reason,
        }

    def _chunk_choice(self, delta: Delta, finish_reason: str | None) -> dict[str, Any]:
        return {
            "index": delta.choice,
            "text": delta.text,
            "logprobs": self._logprobs(delta.tokens) if finish_reason is None else None,
            "finish_reason": finish_reason,
        }

    def _logprobs(self, tokens: Sequence[ShownToken]) -> dict[str, Any] | None:
        if self._alternatives is None:
            return None
        return {
            "tokens": [self._token(token.event.token_id) for token in tokens],
            "token_logprobs": [_finite(token.event.logprob) for token in tokens],
            "top_logprobs": [self._top(token) for token in tokens] if self._alternatives else None,
            "text_offset": [token.start for token in tokens],
        }

    def _top(self, token: ShownToken) -> dict[str, float]:
        """The likeliest tokens and the chosen one, which may not be among them."""
        chosen = TokenLogprob(token.event.token_id, _finite(token.event.logprob))
        entries = [*token.event.top_logprobs[: self._alternatives], chosen]
        return {self._token(entry.token_id): _finite(entry.logprob) for entry in entries}

    def _token(self, token_id: int) -> str:
        """A token's text; part of a character is written as the API writes it, `bytes:` with escapes."""
        raw = self._vocabulary.token_bytes(token_id)
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def _finite(logprob: float | None) -> float:
    """A log-probability that JSON can carry."""
    return LOWEST_LOGPROB if logprob is None or not logprob > LOWEST_LOGPROB else logprob
