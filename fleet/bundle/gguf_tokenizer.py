"""A GGUF file's vocabulary as the tokenizer.json that the gateway loads.

Only byte-level BPE (`tokenizer.ggml.model` = gpt2) is built here. A `tokenizer.json` beside the GGUF file always wins.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors

from fleet.errors import FleetError

TOKEN_TYPE_CONTROL = 3  # values of tokenizer.ggml.token_type, from the GGUF specification
TOKEN_TYPE_USER_DEFINED = 4

DIGITS_APART = frozenset({"smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"})
"""Pre-tokenisers that cut every digit apart and then split as GPT-2 does (SmolLM2's own tokenizer.json)."""
PLAIN_GPT2 = frozenset({"gpt-2", "default"})
LLAMA3 = frozenset({"llama-bpe", "llama3", "llama-v3"})
LLAMA3_SPLIT = (  # Llama 3's tokenizer.json
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True)
class GgufVocabulary:
    """The `tokenizer.ggml.*` metadata that a byte-level BPE tokenizer is made of.

    Attributes:
        model: tokenizer.ggml.model, "gpt2" for byte-level BPE.
        pre: tokenizer.ggml.pre, how text is split before merging.
        tokens: token text by id. token_types: their kinds. merges: "left right", best first.
        bos_token_id: put before every prompt if `add_bos`.
    """

    model: str
    pre: str
    tokens: Sequence[str]
    token_types: Sequence[int]
    merges: Sequence[str]
    bos_token_id: int | None
    add_bos: bool

    def control_ids(self) -> dict[str, int]:
        """Text → id of the control tokens, such as <|im_end|>."""
        return {self.tokens[index]: index for index, kind in enumerate(self.token_types) if kind == TOKEN_TYPE_CONTROL}


def build_tokenizer_json(vocabulary: GgufVocabulary, where: str) -> bytes:
    """Bytes of a tokenizer.json with the same ids as the GGUF file's vocabulary.

    Raises:
        FleetError: a kind of tokenizer that is not byte-level BPE, or an unknown pre-tokeniser.
    """
    hint = "put the model's own tokenizer.json beside the GGUF file; it is used as it is"
    if vocabulary.model != "gpt2":
        raise FleetError(
            f"{where}: tokenizer.ggml.model is {vocabulary.model!r}; only gpt2 (byte-level BPE) can be built", hint=hint
        )
    if len(vocabulary.token_types) != len(vocabulary.tokens) or not vocabulary.merges:
        raise FleetError(f"{where}: the vocabulary is incomplete (token types or merges are missing)", hint=hint)
    ids = {token: index for index, token in enumerate(vocabulary.tokens)}
    try:
        model = models.BPE(
            vocab=ids,
            merges=[_pair(merge) for merge in vocabulary.merges],
            ignore_merges=vocabulary.pre in LLAMA3,
        )
    except Exception as error:  # `tokenizers` raises bare Exception for merges outside the vocabulary
        raise FleetError(f"{where}: the vocabulary's merges do not fit its tokens: {error}", hint=hint) from error
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = _pre_tokenizer(vocabulary.pre, where, hint)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(_added(vocabulary, TOKEN_TYPE_CONTROL))
    tokenizer.add_tokens(_added(vocabulary, TOKEN_TYPE_USER_DEFINED))
    if vocabulary.add_bos and vocabulary.bos_token_id is not None:
        bos = vocabulary.tokens[vocabulary.bos_token_id]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, vocabulary.bos_token_id)]
        )
    if tokenizer.get_vocab_size() != len(vocabulary.tokens):
        raise FleetError(
            f"{where}: {len(vocabulary.tokens)} tokens became {tokenizer.get_vocab_size()}; some occur twice", hint=hint
        )
    return str(tokenizer.to_str()).encode()


def _pair(merge: str) -> tuple[str, str]:
    left, _, right = merge.partition(" ")
    return left, right


def _added(vocabulary: GgufVocabulary, kind: int) -> list[AddedToken]:
    return [
        AddedToken(token, normalized=False, special=kind == TOKEN_TYPE_CONTROL)
        for token, token_type in zip(vocabulary.tokens, vocabulary.token_types, strict=True)
        if token_type == kind
    ]


def _pre_tokenizer(pre: str, where: str, hint: str) -> pre_tokenizers.PreTokenizer:
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pre not in LLAMA3)
    if pre in DIGITS_APART:
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level])
    if pre in PLAIN_GPT2:
        return byte_level
    if pre in LLAMA3:
        split = pre_tokenizers.Split(Regex(LLAMA3_SPLIT), behavior="isolated")
        return pre_tokenizers.Sequence([split, byte_level])
    known = ", ".join(sorted(DIGITS_APART | PLAIN_GPT2 | LLAMA3))
    raise FleetError(f"{where}: tokenizer.ggml.pre is {pre!r}; known are {known}", hint=hint)
