"""The model's own chat template, rendered as `transformers` renders it (same sandbox, options and helpers)."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import datetime
from typing import Any

import jinja2
import jinja2.ext
from jinja2.sandbox import ImmutableSandboxedEnvironment

from fleet.errors import FleetError
from fleet.gateway.errors import ApiError


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)  # local time, as transformers does


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter escapes HTML, which prompts must not."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


class ChatTemplate:
    """A compiled chat template.

    Args:
        source: the Jinja text of the model's chat_template.jinja.
        special_tokens: names the template may use, e.g. {"bos_token": "<s>", "eos_token": "</s>"}.

    Raises:
        FleetError: the template does not compile.
    """

    def __init__(self, source: str, special_tokens: dict[str, str]) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise FleetError(
                f"the model's chat template does not compile: line {error.lineno}: {error.message}",
                hint="build the bundle again with a model whose chat template is valid: fleet bundle",
            ) from None
        self._special_tokens = special_tokens

    def render(self, messages: Sequence[tuple[str, str]]) -> str:
        """The prompt of a conversation of (role, text), ending where the assistant's answer begins.

        Raises:
            ApiError: 400, the template refuses the conversation (for instance its order of roles).
        """
        try:
            return self._template.render(
                messages=[{"role": role, "content": content} for role, content in messages],
                tools=None,
                documents=None,
                add_generation_prompt=True,
                **self._special_tokens,
            )
        except jinja2.TemplateError as error:
            raise ApiError(
                400,
                f"messages: the model's chat template refuses this conversation: {error.message}",
                param="messages",
                code="invalid_value",
            ) from None
