"""From entries to what a client gets: events of a stream, or the whole body; the same entries give the same bytes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from fleet.gateway.entries import Entry
from fleet.gateway.fold import AnswerFold
from fleet.gateway.record import AdmissionRecord
from fleet.gateway.responses import ChatShape, ChoiceText, CompletionShape, Shape
from fleet.gateway.vocabulary import Vocabulary

DONE = "[DONE]"
SHAPES: dict[str, type[Shape]] = {"chat": ChatShape, "completions": CompletionShape}


def make_shape(record: AdmissionRecord, vocabulary: Vocabulary) -> Shape:
    """How the answer is worded; it has a state, so every reader takes its own."""
    return SHAPES[record.endpoint](
        stream_id=record.stream_id,
        created=record.created,
        model=record.options.model,
        fingerprint=record.fingerprint,
        vocabulary=vocabulary,
        logprobs=record.options.sampling.logprobs,
        include_usage=record.options.include_usage,
        token_ids=record.options.token_ids,
    )


def make_fold(record: AdmissionRecord, vocabulary: Vocabulary) -> AnswerFold:
    """An empty fold for the answer's entries."""
    return AnswerFold(vocabulary, record.options.stop, record.options.choices)


class EventFold:
    """Events of a streamed answer: the JSON bodies in their order, `[DONE]` last.

    Args:
        record: what was admitted.
        vocabulary: of its model.
    """

    def __init__(self, record: AdmissionRecord, vocabulary: Vocabulary) -> None:
        self.answer = make_fold(record, vocabulary)
        self._shape = make_shape(record, vocabulary)
        self._prompt_tokens = len(record.prompt)
        self._include_usage = record.options.include_usage

    def push(self, entry: Entry) -> Iterator[dict[str, Any] | str]:
        """Add an entry; the events that it completes."""
        delta = self.answer.push(entry)
        if delta is not None:
            yield from self._shape.chunks(delta)
        if not self.answer.ended:
            return
        if self.answer.failed is not None:
            yield self.answer.failed.error().body()
        elif self._include_usage:
            yield self._shape.usage_chunk(usage(self._prompt_tokens, self.answer.completion_tokens))
        yield DONE


class WholeFold:
    """The body of an answer that is not streamed.

    Args:
        record: what was admitted.
        vocabulary: of its model.
    """

    def __init__(self, record: AdmissionRecord, vocabulary: Vocabulary) -> None:
        self.answer = make_fold(record, vocabulary)
        self._shape = make_shape(record, vocabulary)
        self._prompt_tokens = len(record.prompt)
        self._choices = [ChoiceText() for _ in range(record.options.choices)]

    def push(self, entry: Entry) -> None:
        """Add an entry."""
        delta = self.answer.push(entry)
        if delta is not None:
            self._choices[delta.choice].add(delta)

    def body(self) -> dict[str, Any]:
        """The answer.

        Raises:
            ApiError: it failed.
        """
        if self.answer.failed is not None:
            raise self.answer.failed.error()
        return self._shape.whole(self._choices, usage(self._prompt_tokens, self.answer.completion_tokens))


def usage(prompt_tokens: int, completion_tokens: int) -> dict[str, int]:
    """Token counts; the prompt counts once, however many choices."""
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }
