"""Binary bodies of micro-batches: entries (sequence, position, rows …) followed by raw little-endian tensor rows."""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from enum import IntEnum

from stage_runtime.link.frames import FrameError
from stage_runtime.link.messages import TokenLogprob

# Sequences of the ring's probe; a gateway can't use these ids.
PROBE_WHOLE_ID = 2**64 - 1
PROBE_STEPS_ID = 2**64 - 2
MAX_ENTRIES = 4096
# A batch limit that asks for no new sequences, as memory is short on a stage; the least of all, so it travels round.
SHEDDING_LIMIT = 0

_STEP_HEAD = struct.Struct("<HHBxxxI")  # entries, batch limit, dtype, hidden size
_STEP_ENTRY = struct.Struct("<QIIBBxxI")  # sequence, position, rows, output, status, kv_len
_TOKENS_HEAD = struct.Struct("<HH")  # entries, batch limit
_TOKENS_ENTRY = struct.Struct("<QIBBHIId")  # sequence, position, kind, status, alternatives, kv_len, token, value
_ALTERNATIVE = struct.Struct("<Id")  # token, log-probability


class WireDtype(IntEnum):
    """How tensor values travel; `exact` uses FP32 only."""

    FP32 = 0
    FP16 = 1
    BF16 = 2

    @property
    def size_bytes(self) -> int:
        """Bytes of one value."""
        return 4 if self is WireDtype.FP32 else 2


class Output(IntEnum):
    """Which rows of an entry the head has to see."""

    NONE = 0
    LAST = 1
    ALL = 2


class EntryStatus(IntEnum):
    """Whether the stages behind an entry could compute it."""

    OK = 0
    POSITION_DIFFERS = 1  # a stage's KV cache has another length: `kv_len` says which
    NOT_FINITE = 2  # the model's logits are infinite or no numbers


@dataclass(frozen=True)
class StepEntry:
    """One sequence's part of a micro-batch.

    Attributes:
        sequence_id: u64.
        position: tokens before this step, i.e. what every stage's KV length must be.
        rows: rows of this entry in the tensor.
        output: which rows the head has to see.
        status: not OK once a stage could not compute it; then it has no rows.
        kv_len: that stage's KV length.
    """

    sequence_id: int
    position: int
    rows: int
    output: Output
    status: EntryStatus = EntryStatus.OK
    kv_len: int = 0


@dataclass(frozen=True)
class Step:
    """A micro-batch between two stages.

    Attributes:
        entries: in the order of their rows.
        hidden: row-major, shape [sum of rows, hidden_size], little-endian.
        hidden_size: columns.
        batch_limit: least batch limit of the stages it passed, in sequences; `SHEDDING_LIMIT` if one of them sheds.
        dtype: of `hidden`.
    """

    entries: tuple[StepEntry, ...]
    hidden: bytes
    hidden_size: int
    batch_limit: int
    dtype: WireDtype = WireDtype.FP32


class TokenKind(IntEnum):
    """What the `value` of a sampled entry is."""

    NOTHING = 0  # no output was wanted
    TOKEN = 1
    TOKEN_WITH_LOGPROB = 2  # value: log-probability of the token
    PROBE = 3  # value: largest logit difference so far


@dataclass(frozen=True)
class TokenResult:
    """What the head says about one entry."""

    sequence_id: int
    position: int
    kind: TokenKind
    status: EntryStatus = EntryStatus.OK
    kv_len: int = 0
    token_id: int = 0
    value: float = 0.0
    alternatives: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True)
class Tokens:
    """The head's answer to a micro-batch."""

    results: tuple[TokenResult, ...]
    batch_limit: int


def encode_step(step: Step) -> bytes:
    """Body of STEP and OUTPUT."""
    head = _STEP_HEAD.pack(len(step.entries), step.batch_limit, step.dtype, step.hidden_size)
    entries = [_STEP_ENTRY.pack(e.sequence_id, e.position, e.rows, e.output, e.status, e.kv_len) for e in step.entries]
    return b"".join((head, *entries, step.hidden))


def decode_step(body: bytes, hidden_size: int) -> Step:
    """Parse a STEP or OUTPUT body for a model of this hidden size.

    Raises:
        FrameError: lengths, codes or the hidden size do not fit, or a sequence occurs twice.
    """
    try:
        count, limit, dtype, columns = _STEP_HEAD.unpack_from(body)
        start = _STEP_HEAD.size + count * _STEP_ENTRY.size
        if count > MAX_ENTRIES or start > len(body):
            raise FrameError(f"{count} entries in a body of {len(body)} bytes")
        entries = tuple(
            StepEntry(s, p, r, Output(o), EntryStatus(status), k)
            for s, p, r, o, status, k in _STEP_ENTRY.iter_unpack(body[_STEP_HEAD.size : start])
        )
        step = Step(entries, body[start:], columns, limit, WireDtype(dtype))
    except (struct.error, ValueError) as error:
        raise FrameError(f"step: {error}") from None
    if len({entry.sequence_id for entry in entries}) != count:
        raise FrameError("a sequence occurs twice in one micro-batch")
    if columns != hidden_size:
        raise FrameError(f"hidden size {columns}, expected {hidden_size}")
    expected = sum(entry.rows for entry in entries) * columns * step.dtype.size_bytes
    if len(step.hidden) != expected:
        raise FrameError(f"tensor of {len(step.hidden)} bytes, expected {expected}")
    return step


def encode_tokens(tokens: Tokens) -> bytes:
    """Body of TOKENS."""
    parts = [_TOKENS_HEAD.pack(len(tokens.results), tokens.batch_limit)]
    for r in tokens.results:
        parts.append(
            _TOKENS_ENTRY.pack(
                r.sequence_id, r.position, r.kind, r.status, len(r.alternatives), r.kv_len, r.token_id, r.value
            )
        )
        parts += [_ALTERNATIVE.pack(a.token_id, a.logprob) for a in r.alternatives]
    return b"".join(parts)


def _check_finite(result: TokenResult) -> None:
    """Gateways get these numbers as JSON, which has no infinities; the probe's own value may be infinite."""
    if not all(math.isfinite(other.logprob) for other in result.alternatives) or not (
        math.isfinite(result.value) or (result.kind is TokenKind.PROBE and result.value == math.inf)
    ):
        raise FrameError(f"a value of sequence {result.sequence_id} is not finite")


def decode_tokens(body: bytes) -> Tokens:
    """Parse a TOKENS body.

    Raises:
        FrameError: lengths or codes do not fit, or a log-probability is not finite.
    """
    results = []
    try:
        count, limit = _TOKENS_HEAD.unpack_from(body)
        offset = _TOKENS_HEAD.size
        for _ in range(count):
            sequence, position, kind, status, alternatives, kv_len, token, value = _TOKENS_ENTRY.unpack_from(
                body, offset
            )
            offset += _TOKENS_ENTRY.size
            end = offset + alternatives * _ALTERNATIVE.size
            if end > len(body):
                raise FrameError(f"{alternatives} alternatives in a body of {len(body)} bytes")
            others = tuple(TokenLogprob(t, p) for t, p in _ALTERNATIVE.iter_unpack(body[offset:end]))
            offset = end
            result = TokenResult(sequence, position, TokenKind(kind), EntryStatus(status), kv_len, token, value, others)
            _check_finite(result)
            results.append(result)
    except (struct.error, ValueError) as error:
        raise FrameError(f"tokens: {error}") from None
    if offset != len(body):
        raise FrameError(f"{len(body) - offset} bytes after the last entry")
    return Tokens(tuple(results), limit)
