"""tokenizer.json built from GGUF metadata, against transformers' own reading of the same file."""

from __future__ import annotations

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from tests.models import smollm2_directory, smollm2_gguf

TEXTS = [
    "Hello, world!",
    "The quick brown fox doesn't jump over 13 lazy dogs in 2024; it's 3.14159 or 1,000,000.",
    "<|im_start|>user\nWhy is the sky blue?<|im_end|>\n<|im_start|>assistant\n",
    "<|endoftext|><|im_end|><file_sep>x<jupyter_start>",
    "a<|im_start|>b <|im_end|> c",
    "Schaltschrank, Übergröße, naïve café, Ελληνικά, русский, العربية, हिन्दी, 日本語, 한국어",
    "🙂🙃👩‍👩‍👧‍👦🏳️‍🌈 é e\u0301 \u200b\ufeff\x00\x7f",
    "def f(x):\n    return {'a': [1, 2, 3], \"b\": x**2}\n\n\n# end\t\ttabs\r\n",
    "   leading and trailing   ",
    "\n\n\n",
    "",
    "A" * 500,
    "http://example.org/path?query=1&other=2#fragment",
]


@pytest.fixture(scope="module")
def ours() -> Tokenizer:
    return Tokenizer.from_file(str(smollm2_directory() / "tokenizer.json"))


@pytest.fixture(scope="module")
def reference() -> PreTrainedTokenizerBase:
    source = smollm2_gguf()
    return AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)


@pytest.mark.parametrize("text", TEXTS)
def test_ids_equal_those_of_transformers(ours: Tokenizer, reference: PreTrainedTokenizerBase, text: str) -> None:
    assert ours.encode(text).ids == reference(text)["input_ids"]


@settings(max_examples=300, deadline=None)
@given(st.text(st.characters(exclude_categories=("Nd", "Nl", "No", "Cs")), max_size=60))
def test_ids_equal_those_of_transformers_for_any_text_without_numbers(
    ours: Tokenizer, reference: PreTrainedTokenizerBase, text: str
) -> None:
    """Numbers are excepted: transformers' reading of GGUF knows no `smollm` pre-tokeniser, the next test does."""
    assert ours.encode(text).ids == reference(text)["input_ids"]


def test_every_digit_is_cut_apart_before_spaces_are_grouped(ours: Tokenizer) -> None:
    """As SmolLM2's own tokenizer.json has it: the run of spaces before a number stays one token."""
    assert ours.encode("   12").tokens == ["ĠĠĠ", "1", "2"]
    assert ours.encode("in 2024").tokens == ["in", "Ġ", "2", "0", "2", "4"]


@settings(max_examples=300, deadline=None)
@given(st.text(st.characters(exclude_categories=("Cs",)), max_size=60))
def test_decoding_gives_the_text_back(ours: Tokenizer, text: str) -> None:
    """Unless it holds one of the bytes that SmolLM2's vocabulary lacks, such as F1 of unassigned planes."""
    pieces = pre_tokenizers.ByteLevel(add_prefix_space=False).pre_tokenize_str(text)
    assume(all(ours.token_to_id(byte) is not None for piece, _ in pieces for byte in piece))
    assert ours.decode(ours.encode(text).ids, skip_special_tokens=False) == text


def test_special_tokens_are_whole_and_left_out_of_answers(ours: Tokenizer) -> None:
    assert [ours.token_to_id(text) for text in ("<|endoftext|>", "<|im_start|>", "<|im_end|>")] == [0, 1, 2]
    assert ours.decode([1, 9690, 2]) == "system"
    assert ours.get_vocab_size() == 49152
