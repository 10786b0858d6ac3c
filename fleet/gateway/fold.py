"""From entries to pieces of text: a pure fold, so that the same entries always give the same pieces.

Incomplete characters and possible stop strings are held back in the fold's state, which follows from the entries.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fleet.gateway.entries import End, Entry, Failed
from fleet.gateway.text import Decoder, Piece, TextStream
from stage_runtime.link.messages import TokenEvent


@dataclass(frozen=True)
class ShownToken:
    """A token whose log-probability may be shown.

    Attributes:
        event: as the pipeline reported it.
        start: characters of the choice's text before it.
    """

    event: TokenEvent
    start: int


@dataclass(frozen=True)
class Delta:
    """News of one choice. `finish_reason` is set once, in its last delta."""

    choice: int
    text: str
    tokens: tuple[ShownToken, ...]
    finish_reason: str | None = None


class _ChoiceFold:
    """One choice's text so far."""

    def __init__(self, decoder: Decoder, stops: Sequence[str]) -> None:
        self.text = TextStream(decoder, stops)
        self.tokens: list[TokenEvent] = []
        self.finished = False
        self._shown = 0

    def delta(self, choice: int, piece: Piece, finish_reason: str | None) -> Delta:
        fresh = tuple(ShownToken(self.tokens[n], self.text.starts[n]) for n in range(self._shown, piece.tokens))
        self._shown = piece.tokens
        self.finished = finish_reason is not None
        return Delta(choice, piece.text, fresh, finish_reason)


class AnswerFold:
    """Deltas of an answer.

    Args:
        decoder: the model's tokenizer.
        stops: stop strings.
        choices: number of choices.

    Attributes:
        completion_tokens: of all choices so far.
        failed: the entry that ended the answer, None while it is well.
    """

    def __init__(self, decoder: Decoder, stops: Sequence[str], choices: int) -> None:
        self._choices = [_ChoiceFold(decoder, stops) for _ in range(choices)]
        self.completion_tokens = 0
        self.failed: Failed | None = None

    @property
    def ended(self) -> bool:
        """Nothing comes any more."""
        return self.failed is not None or all(choice.finished for choice in self._choices)

    def finished(self, choice: int) -> bool:
        """Whether a choice has its finish reason."""
        return self._choices[choice].finished

    def generated(self, choice: int) -> tuple[int, ...]:
        """Token ids of a choice so far."""
        return tuple(event.token_id for event in self._choices[choice].tokens)

    def push(self, entry: Entry) -> Delta | None:
        """Add an entry; the news in it, None if all of it is held back."""
        if isinstance(entry, Failed):
            self.failed = entry
            return None
        choice = self._choices[entry.choice]
        if isinstance(entry, End):
            reason = "stop" if choice.text.stopped else entry.reason
            piece = choice.text.flush()
            # what was held back may hold a stop string when it is let go
            return choice.delta(entry.choice, piece, "stop" if choice.text.stopped else reason)
        self.completion_tokens += 1
        choice.tokens.append(entry.event)
        piece = choice.text.push(entry.event.token_id)
        delta = choice.delta(entry.choice, piece, "stop" if choice.text.stopped else None)
        return delta if delta.text or delta.tokens or delta.finish_reason else None
