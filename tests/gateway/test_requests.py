"""The request parser: anything may come in, only a request or the API's own error comes out."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fleet.gateway.errors import ApiError
from fleet.gateway.fields import decode_body
from fleet.gateway.requests import SMALLEST_TOP_P, ChatRequest, CompletionRequest, parse_chat, parse_completion

MESSAGES = [{"role": "user", "content": "hi"}]
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters()),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
FIELDS = [
    "model", "messages", "prompt", "max_tokens", "max_completion_tokens", "temperature", "top_p", "top_k", "seed",
    "stop", "n", "frequency_penalty", "presence_penalty", "logprobs", "top_logprobs", "stream", "stream_options",
    "echo", "tools", "tool_choice", "response_format", "logit_bias", "role", "content", "unheard_of",
]  # fmt: skip
bodies = st.fixed_dictionaries({}, optional={name: json_values for name in FIELDS})


def chat(**fields: Any) -> ChatRequest:
    return parse_chat({"model": "m", "messages": MESSAGES, **fields})


def completion(**fields: Any) -> CompletionRequest:
    return parse_completion({"model": "m", "prompt": "hi", **fields})


@settings(deadline=None)
@given(bodies, st.booleans())
def test_the_parser_raises_nothing_but_its_own_error(body: dict[str, Any], valid_base: bool) -> None:
    base = {"model": "m", "messages": MESSAGES, "prompt": "p"} if valid_base else {}
    for parse in (parse_chat, parse_completion):
        try:
            request = parse({**base, **body})
        except ApiError as error:
            assert error.status == 400
            assert error.message
            json.dumps(error.body())
        else:
            sampling = request.options.sampling
            assert 0 <= sampling.temperature <= 2
            assert 0 < sampling.top_p <= 1
            assert 0 <= sampling.seed < 2**64
            assert len(request.options.stop) <= 4


@settings(deadline=None)
@given(st.binary(max_size=200) | json_values.map(lambda value: json.dumps(value).encode()))
def test_any_bytes_are_an_object_or_an_error(raw: bytes) -> None:
    try:
        assert isinstance(decode_body(raw), dict)
    except ApiError as error:
        assert error.status == 400


@pytest.mark.parametrize(
    "raw",
    [b"", b"[1]", b"{", b"\xff\xfe", b'{"a": NaN}', b'{"a": Infinity}', b"[" * 200_000, b'{"a":' + b"9" * 5000 + b"}"],
)
def test_bodies_that_are_no_json_object_are_refused(raw: bytes) -> None:
    with pytest.raises(ApiError, match="request body"):
        decode_body(raw)


def test_defaults_are_those_of_the_api() -> None:
    request = chat()
    options = request.options
    assert request.messages == (("user", "hi"),)
    assert (options.sampling.temperature, options.sampling.top_p, options.sampling.top_k) == (1.0, 1.0, 0)
    assert (options.choices, options.stream, options.max_tokens, options.stop, options.seeded) == (
        1,
        False,
        None,
        (),
        False,
    )
    assert completion().options.max_tokens == 16


def test_values_arrive() -> None:
    options = chat(
        max_completion_tokens=7, max_tokens=9, temperature=0, top_p=0, top_k=5, seed=-1, stop="x", n=3,
        frequency_penalty=-2, presence_penalty=1.5, logprobs=True, top_logprobs=4, stream=True,
        stream_options={"include_usage": True},
    ).options  # fmt: skip
    sampling = options.sampling
    assert options.max_tokens == 7
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.0, SMALLEST_TOP_P, 5)
    assert (sampling.seed, options.seeded) == (2**64 - 1, True)
    assert (sampling.frequency_penalty, sampling.presence_penalty, sampling.logprobs) == (-2.0, 1.5, 4)
    assert (options.stop, options.choices, options.include_usage) == (("x",), 3, True)
    assert chat(logprobs=True).options.sampling.logprobs == 0
    assert completion(logprobs=2).options.sampling.logprobs == 2


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temperature": "1"}, "temperature"), ({"temperature": 2.1}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"temperature": 1e999}, "temperature"), ({"top_p": 1.1}, "top_p"), ({"top_k": -1}, "top_k"),
        ({"max_tokens": 0}, "max_tokens"), ({"max_tokens": 1.5}, "max_tokens"), ({"n": 0}, "n"), ({"n": 17}, "n"),
        ({"seed": 2**64}, "seed"), ({"seed": 10**5000}, "seed"), ({"stop": list("abcde")}, "stop"),
        ({"stop": [""]}, "stop"),
        ({"stop": 3}, "stop"), ({"stream": "yes"}, "stream"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"logprobs": 1}, "logprobs"), ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"), ({"model": None}, "model"), ({"model": 3}, "model"),
        ({"messages": []}, "messages"), ({"messages": "hi"}, "messages"), ({"messages": ["hi"]}, "messages[0]"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "king", "content": ""}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, "messages[0].content"),
    ],
)  # fmt: skip
def test_a_wrong_field_is_named(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as caught:
        chat(**fields)
    assert (caught.value.status, caught.value.param) == (400, param)


@pytest.mark.parametrize(
    "fields",
    [
        {"tools": [{}]}, {"tool_choice": "required"}, {"response_format": {"type": "json_object"}},
        {"logit_bias": {"1": 5}},
        {"audio": {"voice": "x"}}, {"modalities": ["audio"]}, {"functions": [{}]}, {"reasoning_effort": "high"},
    ],
)  # fmt: skip
def test_known_but_unsupported_fields_are_refused_by_name(fields: dict[str, Any]) -> None:
    with pytest.raises(ApiError, match=next(iter(fields))) as caught:
        chat(**fields)
    assert caught.value.code == "unsupported_parameter"


@pytest.mark.parametrize(
    "fields",
    [
        {"tools": []},
        {"tools": None},
        {"tool_choice": "none"},
        {"response_format": {"type": "text"}},
        {"user": "me"},
        {"x": 1},
    ],
)
def test_what_asks_for_nothing_and_what_is_unknown_is_ignored(fields: dict[str, Any]) -> None:
    assert chat(**fields).options.model == "m"


def test_echo_suffix_and_several_prompts_are_refused() -> None:
    for fields in ({"echo": True}, {"suffix": "end"}, {"best_of": 2}, {"prompt": ["a", "b"]}, {"prompt": [[1], [2]]}):
        with pytest.raises(ApiError) as caught:
            completion(**fields)
        assert caught.value.param == next(iter(fields))


def test_prompts_may_be_text_or_token_ids() -> None:
    assert completion(prompt=["a"]).prompt == "a"
    assert completion(prompt=[1, 2]).prompt == (1, 2)
    assert completion(prompt=[[1, 2]]).prompt == (1, 2)


def test_text_parts_are_joined_and_developer_is_system() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert chat(messages=[{"role": "developer", "content": parts}]).messages == (("system", "ab"),)
    image = [{"type": "image_url", "image_url": {"url": "x"}}]
    with pytest.raises(ApiError, match="type text"):
        chat(messages=[{"role": "user", "content": image}])
