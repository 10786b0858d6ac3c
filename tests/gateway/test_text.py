"""Detokenisation and stop strings: for any text, however it falls into tokens."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from fleet.gateway.text import Detokeniser, StopScanner, TextStream
from tests.gateway.site import byte_level_tokenizer


class Text:
    """A tokenizer as the gateway uses it."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer

    def decode(self, ids: Sequence[int]) -> str:
        return self.tokenizer.decode(list(ids), skip_special_tokens=True)


BYTES = Text(byte_level_tokenizer(merges=False))
MERGED = Text(byte_level_tokenizer(merges=True))
any_ids = st.lists(st.integers(0, MERGED.tokenizer.get_vocab_size() - 1), max_size=40)


def incremental(decoder: Text, ids: Sequence[int]) -> list[str]:
    detokeniser = Detokeniser(decoder)
    return [*(detokeniser.push(token) for token in ids), detokeniser.flush()]


@settings(deadline=None)
@given(st.text())
def test_bytes_of_any_text_give_the_text_again_in_whole_characters(text: str) -> None:
    ids = BYTES.tokenizer.encode(text).ids
    pieces = incremental(BYTES, ids)
    assert "".join(pieces) == text
    if "\ufffd" not in text:
        assert not any("\ufffd" in piece for piece in pieces)


@settings(deadline=None)
@given(any_ids)
def test_any_token_ids_even_broken_utf8_give_what_decoding_them_at_once_gives(ids: list[int]) -> None:
    assert "".join(incremental(MERGED, ids)) == MERGED.decode(ids)


@settings(deadline=None)
@given(st.text(), st.data())
def test_any_split_into_tokens_gives_the_text(text: str, data: st.DataObject) -> None:
    """Tokens of a vocabulary made for the split, as pieces of text or as single bytes (byte fallback)."""
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)), max_size=8)) | {0, len(text)})
    pieces: list[str] = []
    for start, end in itertools.pairwise(cuts):
        whole = data.draw(st.booleans())
        part = text[start:end].replace(" ", "\u2581")
        pieces += [part] if whole else [f"<0x{byte:02X}>" for byte in part.encode()]
    vocabulary = {token: number for number, token in enumerate(dict.fromkeys([*pieces, "<unk>"]))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    ids = [vocabulary[piece] for piece in pieces]
    decoder = Text(tokenizer)
    assert "".join(incremental(decoder, ids)) == decoder.decode(ids)


def first_stop(text: str, stops: Sequence[str]) -> str | None:
    """The text before the stop string that completes first, found one character at a time; None without one."""
    for end in range(len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            return text[: end - max(map(len, ending))]
    return None


letters = st.text(alphabet="ab€", max_size=30)
some_stops = st.lists(st.text(alphabet="ab€", min_size=1, max_size=4), min_size=1, max_size=4)


@settings(deadline=None)
@given(letters, some_stops, st.lists(st.integers(0, 30), max_size=10))
def test_a_stop_string_cuts_exactly_and_never_leaks(text: str, stops: list[str], cuts: list[int]) -> None:
    scanner = StopScanner(stops)
    edges = [0, *sorted(cuts), len(text)]
    shown = ""
    for start, end in itertools.pairwise(edges):
        shown += scanner.push(text[start:end])
        assert not any(stop in shown for stop in stops)
        assert text.startswith(shown)
    shown += scanner.flush()
    expected = first_stop(text, stops)
    assert scanner.stopped == (expected is not None)
    assert shown == (text if expected is None else expected)
    assert not any(stop in shown for stop in stops)


@settings(deadline=None)
@given(st.text(alphabet="ab €😀", max_size=30), some_stops)
def test_tokens_show_once_their_text_is_shown(text: str, stops: list[str]) -> None:
    stream = TextStream(BYTES, stops)
    shown, tokens = "", 0
    for token in BYTES.tokenizer.encode(text).ids:
        piece = stream.push(token)
        shown, tokens = shown + piece.text, piece.tokens
        assert all(end <= len(shown) for end in stream.ends[:tokens])
        if stream.stopped:
            break
    piece = stream.flush()
    shown, tokens = shown + piece.text, piece.tokens
    expected = first_stop(text, stops)
    assert shown == (text if expected is None else expected)
    if expected is None:
        assert tokens == len(stream.starts)
    else:
        pairs = zip(stream.starts, stream.ends, strict=True)
        assert tokens == sum(start < len(shown) and end <= len(shown) for start, end in pairs)


@pytest.mark.parametrize(
    ("text", "stops", "shown"),
    [
        ("one two", ["two"], "one "),
        ("one two", ["three"], "one two"),
        ("abcd", ["abcd", "bc"], "a"),
        ("xabc", ["c", "abc"], "x"),
        ("ends with sto", ["stop"], "ends with sto"),
        ("stop", ["stop"], ""),
    ],
)
def test_stop_strings_by_example(text: str, stops: list[str], shown: str) -> None:
    scanner = StopScanner(stops)
    assert "".join(map(scanner.push, text)) + scanner.flush() == shown
