"""Control bodies: dataclasses as JSON, parsed strictly (exact keys, exact types, no NaN)."""

from __future__ import annotations

import json
import math
import types
import typing
from dataclasses import asdict, dataclass, fields, is_dataclass
from typing import Any, Literal, TypeVar, Union

from stage_runtime.link.frames import FrameError
from stage_runtime.link.messages import FinishedEvent, SamplingParameters, TokenEvent

PROTOCOL = 2
U64 = 2**64
T = TypeVar("T")


@dataclass(frozen=True)
class Refused:
    """Why a handshake failed, with both values."""

    reason: str


@dataclass(frozen=True)
class Notice:
    """News for the first stage: `kind` "unreachable" (the ring can't close) or "draining" (the box stops)."""

    box: str
    kind: Literal["unreachable", "draining"]
    text: str


@dataclass(frozen=True)
class Ready:
    """The ring's probe passed with this largest logit difference."""

    largest_logit_difference: float


@dataclass(frozen=True)
class Open:
    """A sequence begins, or goes on after its ring broke or its plan changed.

    Every stage makes room; the head's holder keeps the sampling parameters and what was generated.

    Attributes:
        generated: tokens of the answer so far; empty for a new sequence.
        kv_len: tokens that every stage has kept of it (AGREED); 0 begins with an empty cache.
    """

    sequence_id: int
    request_id: str
    sampling: SamplingParameters
    generated: tuple[int, ...] = ()
    kv_len: int = 0


@dataclass(frozen=True)
class KvLength:
    """How many tokens of a sequence a KV cache holds."""

    sequence_id: int
    kv_len: int


@dataclass(frozen=True)
class KvLengths:
    """Body of SURVEY and AGREED."""

    sequences: tuple[KvLength, ...]


@dataclass(frozen=True)
class Free:
    """These sequences end; their KV caches go."""

    sequence_ids: tuple[int, ...]


@dataclass(frozen=True)
class Cancel:
    """The gateway wants no more of a sequence."""

    sequence_id: int


@dataclass(frozen=True)
class TokenMessage:
    """A generated token on its way to the gateway."""

    sequence_id: int
    event: TokenEvent


@dataclass(frozen=True)
class FinishedMessage:
    """The end of a sequence on its way to the gateway."""

    sequence_id: int
    event: FinishedEvent


def encode_control(message: Any) -> bytes:
    """A dataclass as compact JSON.

    Raises:
        ValueError: a float is NaN or infinite.
    """
    return json.dumps(asdict(message), separators=(",", ":"), allow_nan=False).encode()


def decode_control(kind: type[T], body: bytes) -> T:
    """Parse what `encode_control` wrote.

    Raises:
        FrameError: no JSON, an unknown or missing key, or a value of another type.
    """
    try:
        data = json.loads(body, parse_constant=_refuse_constant)
        value = _build(kind, data, kind.__name__)
    except (ValueError, RecursionError) as error:
        raise FrameError(f"{kind.__name__} body: {error}") from None
    return typing.cast(T, value)


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is no number here")


def _build(kind: Any, data: Any, where: str) -> Any:
    """Check `data` against a type hint and build the value; ValueError names the field."""
    origin = typing.get_origin(kind)
    if is_dataclass(kind):
        return _build_dataclass(kind, data, where)
    if origin in (Union, types.UnionType):
        if data is None:
            return None
        return _build(next(k for k in typing.get_args(kind) if k is not type(None)), data, where)
    if origin is Literal:
        if data not in typing.get_args(kind):
            raise ValueError(f"{where}: {data!r} is none of {typing.get_args(kind)}")
        return data
    if origin is tuple:
        if not isinstance(data, list):
            raise ValueError(f"{where}: expected a list")
        item = typing.get_args(kind)[0]
        return tuple(_build(item, value, where) for value in data)
    if origin is dict:
        if not isinstance(data, dict) or not all(isinstance(v, str) for v in data.values()):
            raise ValueError(f"{where}: expected a mapping of text to text")
        return data
    if kind is float and isinstance(data, int) and not isinstance(data, bool):
        data = float(data)
    if (
        not isinstance(data, kind)
        or (kind is int and (isinstance(data, bool) or not 0 <= data < U64))
        or (kind is float and not math.isfinite(data))  # JSON's 1e999 is infinite
    ):
        raise ValueError(f"{where}: expected {kind.__name__}, read {str(data)[:80]!r}")
    return data


def _build_dataclass(kind: Any, data: Any, where: str) -> Any:
    if not isinstance(data, dict):
        raise ValueError(f"{where}: expected a mapping")
    hints = _hints(kind)
    names = {field.name for field in fields(kind)}
    if names != data.keys():
        raise ValueError(f"{where}: unknown or missing keys {sorted(names ^ data.keys())}")
    return kind(**{name: _build(hints[name], value, f"{where}.{name}") for name, value in data.items()})


_HINTS: dict[Any, dict[str, Any]] = {}


def _hints(kind: Any) -> dict[str, Any]:
    """Type hints of a dataclass, resolved once (resolving is slow, tokens are many)."""
    if kind not in _HINTS:
        _HINTS[kind] = typing.get_type_hints(kind)
    return _HINTS[kind]
