"""From token ids to text, piece by piece: whole characters only, nothing of a stop string.

All state follows from the token ids pushed so far, so pushing the same ids again rebuilds it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


class Decoder(Protocol):
    """What is needed of a tokenizer."""

    def decode(self, ids: Sequence[int]) -> str:
        """The text of token ids, special tokens left out, invalid UTF-8 replaced by U+FFFD."""


class Detokeniser:
    """Incremental decoding of one sequence.

    Decoders look at neighbours (a leading space may vanish at the start, bytes of one character may lie in several
    tokens), so each step decodes a window that starts one emitted piece back and emits what is new in it; text that
    ends in U+FFFD may be half a character and waits.
    """

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder
        self._window: list[int] = []
        self._emitted_ids = 0  # of the window
        self._emitted_text = ""  # of the window's first `_emitted_ids` ids

    def push(self, token_id: int) -> str:
        """Add a token; return the characters that are now complete."""
        self._window.append(token_id)
        text = self._decoder.decode(self._window)
        if text.endswith(REPLACEMENT):
            return ""
        piece = text[len(self._emitted_text) :]
        if piece:
            del self._window[: self._emitted_ids]
            self._emitted_ids = len(self._window)
            self._emitted_text = self._decoder.decode(self._window)
        return piece

    def flush(self) -> str:
        """The held-back rest, at the end of the sequence."""
        return self._decoder.decode(self._window)[len(self._emitted_text) :]


class StopScanner:
    """Cuts text before the first stop string that completes; holds back what might become one.

    "First" is by the end of the match, so that the result does not depend on how the text was split; of several
    stop strings that end at the same character, the longest decides.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.stopped = False

    def push(self, text: str) -> str:
        """Add text; return what may be shown. After a stop string nothing comes any more."""
        if self.stopped:
            return ""
        text = self._held + text
        matches = [(text.find(stop) + len(stop), text.find(stop)) for stop in self._stops if stop in text]
        if matches:
            self.stopped = True
            self._held = ""
            return text[: min(matches)[1]]
        keep = self._possible_stop(text)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def flush(self) -> str:
        """The held-back rest, at the end of the text."""
        rest, self._held = self._held, ""
        return rest

    def _possible_stop(self, text: str) -> int:
        """Length of the longest end of the text that is the beginning of a stop string."""
        longest = min(len(text), max(map(len, self._stops), default=1) - 1)
        return next(
            (n for n in range(longest, 0, -1) if any(stop.startswith(text[len(text) - n :]) for stop in self._stops)), 0
        )


@dataclass(frozen=True)
class Piece:
    """Text that may be shown, and how many of the tokens pushed are in what was shown.

    Attributes:
        text: new characters.
        tokens: number of tokens, from the first, whose text has been shown wholly; their log-probabilities may be
            shown. A token cut by a stop string is not among them, as its text may hold the stop string.
    """

    text: str
    tokens: int


class TextStream:
    """One choice's text: detokenised, cut at stop strings.

    Attributes:
        starts: for each token pushed, the number of characters before it.
        ends: the number of characters complete with it.
        stopped: a stop string was found.
    """

    def __init__(self, decoder: Decoder, stops: Sequence[str]) -> None:
        self._detokeniser = Detokeniser(decoder)
        self._scanner = StopScanner(stops)
        self._decoded_characters = 0
        self._shown_characters = 0
        self._shown_tokens = 0
        self.starts: list[int] = []
        self.ends: list[int] = []

    @property
    def stopped(self) -> bool:
        """A stop string was found: nothing more will be shown."""
        return self._scanner.stopped

    def push(self, token_id: int) -> Piece:
        """Add a token."""
        self.starts.append(self._decoded_characters)
        text = self._detokeniser.push(token_id)
        self._decoded_characters += len(text)
        self.ends.append(self._decoded_characters)
        return self._show(self._scanner.push(text), final=False)

    def flush(self) -> Piece:
        """The end of the sequence: show what was held back, unless it holds a stop string."""
        text = self._scanner.push(self._detokeniser.flush())
        return self._show(text + self._scanner.flush(), final=not self._scanner.stopped)

    def _show(self, text: str, *, final: bool) -> Piece:
        self._shown_characters += len(text)
        # a token without text of its own (a special one) shows with the text after it, or when the answer ends
        while self._shown_tokens < len(self.starts) and (final or self._is_shown(self._shown_tokens)):
            self._shown_tokens += 1
        return Piece(text, self._shown_tokens)

    def _is_shown(self, token: int) -> bool:
        return self.starts[token] < self._shown_characters >= self.ends[token]
