"""A model directory's tokenizer: text to token ids and back, and the bytes behind single tokens."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from fleet.errors import FleetError
from fleet.gateway.template import ChatTemplate

MAX_MODEL_JSON_BYTES = 16 * 2**20
BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's alphabet for bytes: printable Latin-1 characters stand for themselves, the others for U+0100 onwards."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + n): byte for n, byte in enumerate(others)}


class Vocabulary:
    """Tokenizer, chat template and special tokens of one model; safe to use from several threads.

    Args:
        directory: a model directory of the bundle (model.json, tokenizer.json, chat_template.jinja).

    Attributes:
        stop_token_ids: tokens that end an answer.
        template: the chat template, None where the model has none.
        context_tokens: the model's longest context.
        size: number of token ids.

    Raises:
        FleetError: a file is missing or not what it should be.
    """

    def __init__(self, directory: Path) -> None:
        model = _read_model_json(directory / "model.json")
        try:
            self._tokenizer: Any = Tokenizer.from_file(str(directory / "tokenizer.json"))
        except Exception as error:  # the library raises bare Exception, for a missing file as well
            raise FleetError(
                f"{directory / 'tokenizer.json'}: not a tokenizer: {error}", hint="run fleet provision again"
            ) from None
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        try:
            self.stop_token_ids = tuple(int(token) for token in model["eos_token_ids"])
            self.context_tokens = int(model["config"]["max_position_embeddings"])
            self.size = int(model["config"]["vocab_size"])
            special = {
                "bos_token": self._token_or_none(model["bos_token_id"]),
                "eos_token": self._token_or_none(self.stop_token_ids[0] if self.stop_token_ids else None),
            }
        except (KeyError, TypeError, ValueError) as error:
            raise FleetError(
                f"{directory / 'model.json'}: {type(error).__name__}: {error}", hint="run fleet provision again"
            ) from None
        self.template = _read_template(
            directory / "chat_template.jinja", {name: token for name, token in special.items() if token is not None}
        )
        decoder = json.loads(self._tokenizer.to_str()).get("decoder") or {}
        self._byte_alphabet = _byte_alphabet() if decoder.get("type") == "ByteLevel" else None

    def _token_or_none(self, token_id: int | None) -> str | None:
        return None if token_id is None else self._tokenizer.id_to_token(int(token_id))

    def encode(self, text: str, *, add_special_tokens: bool) -> tuple[int, ...]:
        """Token ids of a text; a rendered chat template already holds its special tokens."""
        return tuple(self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids)

    def decode(self, ids: Sequence[int]) -> str:
        """Text of token ids without special tokens; invalid UTF-8 becomes U+FFFD."""
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=True))

    def token_bytes(self, token_id: int) -> bytes:
        """The UTF-8 bytes a token stands for; a token may be part of a character."""
        token = self._tokenizer.id_to_token(token_id)
        if token is None:  # ids of a padded vocabulary have no token
            return b""
        if self._byte_alphabet is not None and all(character in self._byte_alphabet for character in token):
            return bytes(self._byte_alphabet[character] for character in token)
        if match := BYTE_TOKEN.fullmatch(token):
            return bytes.fromhex(match[1])
        text: str = self._tokenizer.decode([token_id], skip_special_tokens=False)
        return text.encode()


def _read_model_json(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            model = json.loads(file.read(MAX_MODEL_JSON_BYTES))
    except (OSError, ValueError) as error:
        raise FleetError(f"{path}: {error}", hint="run fleet provision again") from None
    if not isinstance(model, dict) or model.get("schema") != 1:
        raise FleetError(f"{path}: expected a JSON object with schema 1", hint="run fleet provision again")
    return model


def _read_template(path: Path, special_tokens: dict[str, str]) -> ChatTemplate | None:
    try:
        return ChatTemplate(path.read_text(encoding="utf-8"), special_tokens)
    except FileNotFoundError:  # a base model: completions work, chat is refused
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise FleetError(f"{path}: {error}", hint="run fleet provision again") from None
