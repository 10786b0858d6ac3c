"""Frames and bodies: what is written is read back, and nothing else gets through."""

from __future__ import annotations

import asyncio
import json
import math
from dataclasses import asdict, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stage_runtime.link.control import Cancel, Free, TokenMessage, decode_control, encode_control
from stage_runtime.link.frames import (
    BODY_CAPS,
    CONTROL_BODY_BYTES,
    HEADER_BYTES,
    Frame,
    FrameError,
    FrameType,
    encode_frame,
    read_frame,
)
from stage_runtime.link.messages import GenerateRequest, Hello, SamplingParameters, TokenEvent, TokenLogprob
from stage_runtime.link.steps import (
    EntryStatus,
    Output,
    Step,
    StepEntry,
    TokenKind,
    TokenResult,
    Tokens,
    decode_step,
    decode_tokens,
    encode_step,
    encode_tokens,
)

u64 = st.integers(0, 2**64 - 1)
u32 = st.integers(0, 2**32 - 1)
with_body = st.sampled_from([kind for kind in FrameType if BODY_CAPS[kind]])
frames = st.builds(Frame, with_body, st.binary(max_size=200), u64, u32)
entries = st.builds(StepEntry, u64, u32, st.integers(0, 5), st.sampled_from(Output), st.sampled_from(EntryStatus), u32)
results = st.builds(
    TokenResult,
    u64,
    u32,
    st.sampled_from(TokenKind),
    st.sampled_from(EntryStatus),
    u32,
    u32,
    st.floats(allow_nan=False, allow_infinity=False),
    st.lists(st.builds(TokenLogprob, u32, st.floats(allow_nan=False, allow_infinity=False)), max_size=4).map(tuple),
)


def parse(data: bytes) -> Frame:
    """The first frame of a connection that carries exactly these bytes."""

    async def run() -> Frame:
        reader = asyncio.StreamReader()
        reader.feed_data(data)
        reader.feed_eof()
        return await read_frame(reader)

    return asyncio.run(run())


@given(frames)
def test_a_frame_survives_the_wire(frame: Frame) -> None:
    assert parse(encode_frame(frame)) == frame


@given(frames, st.data())
def test_any_flipped_bit_is_refused(frame: Frame, data: st.DataObject) -> None:
    raw = bytearray(encode_frame(frame))
    bit = data.draw(st.integers(0, len(raw) * 8 - 1))
    raw[bit // 8] ^= 1 << bit % 8
    with pytest.raises(FrameError):
        parse(bytes(raw))


@given(frames, st.data())
def test_half_a_frame_is_refused(frame: Frame, data: st.DataObject) -> None:
    raw = encode_frame(frame)
    with pytest.raises(FrameError, match="inside a frame"):
        parse(raw[: data.draw(st.integers(1, len(raw) - 1))])


@given(st.binary(min_size=1, max_size=100))
def test_garbage_is_refused(data: bytes) -> None:
    with pytest.raises(FrameError):
        parse(data)


def test_a_clean_end_is_no_error_of_the_peer() -> None:
    with pytest.raises(EOFError):
        parse(b"")


@pytest.mark.parametrize("kind", list(FrameType))
def test_a_body_over_its_cap_is_neither_sent_nor_read(kind: FrameType) -> None:
    with pytest.raises(FrameError, match="at most"):
        encode_frame(Frame(kind, bytes(BODY_CAPS[kind] + 1)))
    header = bytearray(encode_frame(Frame(kind)))[:HEADER_BYTES]
    header[20:24] = (BODY_CAPS[kind] + 1).to_bytes(4, "little")
    with pytest.raises(FrameError, match="at most"):
        parse(bytes(header))  # refused by the header alone, nothing is allocated or awaited


@given(st.lists(entries, max_size=6, unique_by=lambda entry: entry.sequence_id), u32.filter(lambda v: v < 2**16))
def test_steps_survive(some: list[StepEntry], limit: int) -> None:
    rows = sum(entry.rows for entry in some)
    step = Step(tuple(some), bytes(rows * 3 * 4), 3, limit)
    assert decode_step(encode_step(step), 3) == step
    with pytest.raises(FrameError, match="hidden size"):
        decode_step(encode_step(step), 4)
    with pytest.raises(FrameError, match="tensor of"):
        decode_step(encode_step(step) + b"\0", 3)


@given(st.lists(results, max_size=6), u32.filter(lambda v: v < 2**16))
def test_tokens_survive(some: list[TokenResult], limit: int) -> None:
    tokens = Tokens(tuple(some), limit)
    assert decode_tokens(encode_tokens(tokens)) == tokens
    with pytest.raises(FrameError, match="after the last"):
        decode_tokens(encode_tokens(tokens) + b"\0")


@given(st.binary(max_size=200))
def test_bodies_of_garbage_are_refused_as_such(data: bytes) -> None:
    for decode in (decode_tokens, lambda body: decode_step(body, 64)):
        try:
            decode(data)
        except FrameError:
            continue  # any other exception fails the test


REQUEST = GenerateRequest(2**64 - 3, "request", (1, 2), 3, (0,), SamplingParameters(logprobs=None, top_p=1))


@pytest.mark.parametrize(
    "message",
    [
        REQUEST,
        Hello(1, "gateway", "control", "lab", "0" * 64, "exact", 3, "0.1.0", {"ring": "x"}),
        TokenMessage(7, TokenEvent(0, 5, -0.25, (TokenLogprob(5, -0.25), TokenLogprob(9, -4.0)))),
        Free((1, 2, 3)),
    ],
    ids=lambda message: type(message).__name__,
)
def test_control_messages_survive(message: object) -> None:
    assert decode_control(type(message), encode_control(message)) == message


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (b"", "Expecting value"),
        (b"[" * 60_000, "recursion"),
        (b'{"sequence_id": 1', "Expecting"),
        (b'{"sequence_id": -1}', "expected int"),
        (b'{"sequence_id": 18446744073709551616}', "expected int"),
        (b'{"sequence_id": true}', "expected int"),
        (b'{"sequence_id": "1"}', "expected int"),
        (b'{"sequence_id": 1.0}', "expected int"),
        (b'{"sequence_id": NaN}', "NaN"),
        (b'{"sequence_id": 1, "more": 2}', "unknown or missing keys"),
        (b"{}", "unknown or missing keys"),
        (b"[1]", "expected a mapping"),
        (b'{"sequence_id": \xff}', "utf-8"),
        (b'{"sequence_id": ' + b"9" * 5000 + b"}", "digits"),
    ],
)
def test_control_bodies_are_parsed_strictly(body: bytes, reason: str) -> None:
    assert len(body) <= CONTROL_BODY_BYTES
    with pytest.raises(FrameError, match=reason):
        decode_control(Cancel, body)


def test_numbers_without_end_are_refused() -> None:
    data = asdict(REQUEST)
    body = json.dumps(data).replace('"temperature": 0.0', '"temperature": 1e999').encode()
    with pytest.raises(FrameError, match="temperature"):
        decode_control(GenerateRequest, body)
    with pytest.raises(ValueError, match="JSON compliant"):
        encode_control(replace(REQUEST, sampling=SamplingParameters(temperature=math.nan)))
