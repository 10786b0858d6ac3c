"""What happens to an answer, one entry after the other: everything a client ever sees follows from these.

An entry is also a row of the journal: a short JSON array, as there is one for every token.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Literal

from fleet.gateway.errors import ApiError
from stage_runtime.link.messages import TokenEvent, TokenLogprob


@dataclass(frozen=True)
class Token:
    """A choice has one more token."""

    choice: int
    event: TokenEvent


@dataclass(frozen=True)
class End:
    """A choice ended by itself. One that a stop string cuts has no such entry: its tokens say so."""

    choice: int
    reason: Literal["stop", "length"]


@dataclass(frozen=True)
class Failed:
    """The whole answer failed; the last entry. Fields as in `ApiError`."""

    status: int
    message: str
    param: str | None
    code: str | None
    outcome: str
    retry_after_seconds: float | None

    @staticmethod
    def of(error: ApiError) -> Failed:
        """The entry for an error."""
        return Failed(error.status, error.message, error.param, error.code, error.outcome, error.retry_after_seconds)

    def error(self) -> ApiError:
        """The error to answer with."""
        return ApiError(
            self.status,
            self.message,
            param=self.param,
            code=self.code,
            outcome=self.outcome,
            retry_after_seconds=self.retry_after_seconds,
        )


Entry = Token | End | Failed


def encode_entry(entry: Entry) -> str:
    """An entry as JSON; numbers come back exactly."""
    if isinstance(entry, Token):
        event = entry.event
        others = [[other.token_id, other.logprob] for other in event.top_logprobs]
        row: list[Any] = ["t", entry.choice, event.index, event.token_id]
        if event.logprob is not None or others:
            row += [event.logprob, others]
    elif isinstance(entry, End):
        row = ["e", entry.choice, entry.reason]
    else:
        row = ["f", entry.status, entry.message, entry.param, entry.code, entry.outcome, entry.retry_after_seconds]
    return json.dumps(row, separators=(",", ":"))


def decode_entry(text: str) -> Entry:
    """What `encode_entry` wrote.

    Raises:
        ValueError: it is no entry.
    """
    try:
        kind, *row = json.loads(text)
        if kind == "t":
            choice, index, token_id, *rest = row
            logprob, others = rest or (None, [])
            return Token(choice, TokenEvent(index, token_id, logprob, tuple(TokenLogprob(*other) for other in others)))
        if kind == "e":
            return End(*row)
        if kind == "f":
            return Failed(*row)
    except (TypeError, ValueError) as error:
        raise ValueError(f"no entry of an answer: {error}") from None
    raise ValueError(f"no entry of an answer: kind {kind!r}")
