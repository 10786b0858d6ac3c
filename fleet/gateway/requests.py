"""Requests of the OpenAI API, parsed: pure functions from a JSON object to a typed request.

Unknown fields are ignored; fields that the API knows and this server does not are refused by name, because an
answer that silently left out what was asked for would look right and be wrong.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fleet.gateway import fields
from fleet.gateway.errors import invalid, unsupported
from fleet.gateway.fields import Body
from stage_runtime.link.messages import SamplingParameters

MAX_STOP_STRINGS = 4
MAX_STOP_CHARACTERS = 256
MAX_CHOICES = 16
MAX_TOKENS = 2**31 - 1
MAX_TOP_K = 2**31 - 1
MAX_CHAT_TOP_LOGPROBS = 20
MAX_COMPLETION_LOGPROBS = 5
MAX_TOKEN_ID = 2**31 - 1
DEFAULT_COMPLETION_TOKENS = 16
SMALLEST_TOP_P = 1e-6
"""The API allows top_p 0, the engine wants more than 0: this keeps only the likeliest token as well."""

UNSUPPORTED_CHAT: dict[str, tuple[Any, ...]] = {
    "tools": (),
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (True,),  # says nothing without tools, and client libraries send it
    "functions": (),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "logit_bias": (),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "reasoning_effort": ("none",),
    "verbosity": ("medium",),
    "web_search_options": (),
}
UNSUPPORTED_COMPLETION: dict[str, tuple[Any, ...]] = {
    "echo": (),
    "suffix": ("",),
    "best_of": (1,),
    "logit_bias": (),
}
ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
"""Accepted roles and what the chat template gets; `developer` is the API's newer name for `system`."""


@dataclass(frozen=True)
class GenerationOptions:
    """What chat and completions have in common.

    Attributes:
        model: the model's name.
        max_tokens: most tokens to generate; None fills the context.
        sampling: temperature, filters, penalties, logprobs; `seed` is 0 where `seeded` is False.
        seeded: the client sent a seed.
        stop: strings that end the answer, not part of it.
        choices: answers wanted (`n`).
        stream: as server-sent events.
        include_usage: a last event with the usage.
        token_ids: each choice also carries its token ids.
    """

    model: str
    max_tokens: int | None
    sampling: SamplingParameters
    seeded: bool
    stop: tuple[str, ...]
    choices: int
    stream: bool
    include_usage: bool
    token_ids: bool


@dataclass(frozen=True)
class ChatRequest:
    """A request of /v1/chat/completions; messages are (role, text)."""

    messages: tuple[tuple[str, str], ...]
    options: GenerationOptions


@dataclass(frozen=True)
class CompletionRequest:
    """A request of /v1/completions; the prompt is text or token ids."""

    prompt: str | tuple[int, ...]
    options: GenerationOptions


def parse_chat(body: Body) -> ChatRequest:
    """Parse the body of /v1/chat/completions.

    Raises:
        ApiError: 400, naming the field.
    """
    fields.refuse_unsupported(body, UNSUPPORTED_CHAT)
    wanted = fields.boolean(body, "logprobs", False)
    top = fields.integer(body, "top_logprobs", 0, MAX_CHAT_TOP_LOGPROBS)
    if top is not None and not wanted:
        raise invalid("top_logprobs", "needs logprobs: true")
    limit = fields.integer(body, "max_completion_tokens", 1, MAX_TOKENS)
    older_limit = fields.integer(body, "max_tokens", 1, MAX_TOKENS)
    options = _options(
        body,
        max_tokens=limit if limit is not None else older_limit,
        logprobs=(top or 0) if wanted else None,
    )
    return ChatRequest(messages=_messages(body.get("messages")), options=options)


def parse_completion(body: Body) -> CompletionRequest:
    """Parse the body of /v1/completions.

    Raises:
        ApiError: 400, naming the field.
    """
    fields.refuse_unsupported(body, UNSUPPORTED_COMPLETION)
    limit = fields.integer(body, "max_tokens", 1, MAX_TOKENS)
    options = _options(
        body,
        max_tokens=DEFAULT_COMPLETION_TOKENS if limit is None else limit,
        logprobs=fields.integer(body, "logprobs", 0, MAX_COMPLETION_LOGPROBS),
    )
    return CompletionRequest(prompt=_prompt(body.get("prompt")), options=options)


def _options(body: Body, *, max_tokens: int | None, logprobs: int | None) -> GenerationOptions:
    """The fields that both end points share."""
    if body.get("model") is None:
        raise invalid("model", "expected the name of a model; GET /v1/models lists them")
    # any 64-bit integer, signed or not; negative ones wrap around to the engine's u64
    seed = fields.integer(body, "seed", -(2**63), 2**64 - 1)
    stream = fields.boolean(body, "stream", False)
    return GenerationOptions(
        model=fields.text(body["model"], "model"),
        max_tokens=max_tokens,
        sampling=SamplingParameters(
            temperature=fields.number(body, "temperature", 0.0, 2.0, 1.0),
            top_p=max(fields.number(body, "top_p", 0.0, 1.0, 1.0), SMALLEST_TOP_P),
            top_k=fields.integer(body, "top_k", 0, MAX_TOP_K) or 0,
            seed=(seed or 0) % 2**64,
            frequency_penalty=fields.number(body, "frequency_penalty", -2.0, 2.0, 0.0),
            presence_penalty=fields.number(body, "presence_penalty", -2.0, 2.0, 0.0),
            logprobs=logprobs,
        ),
        seeded=seed is not None,
        stop=_stop(body.get("stop")),
        choices=fields.integer(body, "n", 1, MAX_CHOICES) or 1,
        stream=stream,
        include_usage=_include_usage(body.get("stream_options"), stream),
        token_ids=fields.boolean(body, "return_token_ids", False),
    )


def _stop(value: object) -> tuple[str, ...]:
    """One stop string or up to four."""
    if value is None:
        return ()
    strings = [value] if isinstance(value, str) else value
    if not isinstance(strings, list):
        raise invalid("stop", "expected a string or an array of strings")
    if len(strings) > MAX_STOP_STRINGS:
        raise invalid("stop", f"expected at most {MAX_STOP_STRINGS} strings, got {len(strings)}")
    result = tuple(fields.text(item, "stop") for item in strings)
    if any(not 1 <= len(item) <= MAX_STOP_CHARACTERS for item in result):
        raise invalid("stop", f"each string needs 1 to {MAX_STOP_CHARACTERS} characters")
    return result


def _include_usage(value: object, stream: bool) -> bool:
    """`stream_options.include_usage`."""
    if value is None:
        return False
    if not isinstance(value, dict):
        raise invalid("stream_options", "expected an object")
    if not stream:
        raise invalid("stream_options", "is allowed only with stream: true")
    included = value.get("include_usage")
    if included is not None and not isinstance(included, bool):
        raise invalid("stream_options.include_usage", "expected a boolean")
    return included is True


def _messages(value: object) -> tuple[tuple[str, str], ...]:
    """The conversation; parts of a message that are all text are joined."""
    if not isinstance(value, list) or not value:
        raise invalid("messages", "expected an array with at least one message")
    return tuple(_message(message, f"messages[{index}]") for index, message in enumerate(value))


def _message(message: object, where: str) -> tuple[str, str]:
    if not isinstance(message, dict):
        raise invalid(where, "expected an object with role and content")
    role = fields.text(message.get("role"), f"{where}.role")
    if role in ("tool", "function") or message.get("tool_calls") or message.get("function_call"):
        raise unsupported(where, "this server does not support tools")
    if role not in ROLES:
        raise invalid(f"{where}.role", f"expected one of {', '.join(ROLES)}, got {role[:40]!r}")
    return ROLES[role], _content(message.get("content"), f"{where}.content")


def _content(content: object, where: str) -> str:
    if not isinstance(content, list):
        return fields.text(content, where)
    parts = []
    for index, part in enumerate(content):
        if not isinstance(part, dict):
            raise invalid(f"{where}[{index}]", "expected an object")
        if part.get("type") != "text":
            raise unsupported(f"{where}[{index}]", "this server supports only parts of type text")
        parts.append(fields.text(part.get("text"), f"{where}[{index}].text"))
    return "".join(parts)


def _prompt(value: object) -> str | tuple[int, ...]:
    """A completion's prompt: a string, an array with one string, or token ids."""
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], (str, list)):
        value = value[0]
    if isinstance(value, str):
        return fields.text(value, "prompt")
    if not isinstance(value, list) or not value:
        raise invalid("prompt", "expected a string or an array of token ids")
    if any(isinstance(item, (str, list)) for item in value):
        raise unsupported("prompt", "this server takes one prompt a request")
    if not all(type(item) is int and 0 <= item <= MAX_TOKEN_ID for item in value):
        raise invalid("prompt", "expected token ids, which are integers from 0")
    return tuple(value)
