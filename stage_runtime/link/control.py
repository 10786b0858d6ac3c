"""Control bodies: dataclasses as JSON, parsed strictly (exact keys but for those of `later`, exact types, no NaN)."""

from __future__ import annotations

import functools
import json
import math
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from typing import Any, Literal, TypeVar, Union

from stage_runtime.link.frames import FrameError
from stage_runtime.link.messages import FinishedEvent, SamplingParameters, TokenEvent

PROTOCOL = 2
U64 = 2**64
T = TypeVar("T")
_LATER = "later"


def later(default: Any) -> Any:
    """A field that the release before did not have: it is left out where it has its default, and may be missing.

    Whoever sends another value must know that the other side takes it.
    """
    return field(default=default, metadata={_LATER: True})


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
    data, defaults = asdict(message), _later_fields(typing.cast(Any, type(message)))
    shown = {name: value for name, value in data.items() if name not in defaults or value != defaults[name]}
    return json.dumps(shown, separators=(",", ":"), allow_nan=False).encode()


@functools.cache
def _later_fields(kind: Any) -> Mapping[str, Any]:
    """Names and defaults of the fields made by `later`."""
    return {each.name: each.default for each in fields(kind) if each.metadata.get(_LATER)}


def decode_control(kind: type[T], body: bytes) -> T:
    """Parse what `encode_control` wrote.

    Raises:
        FrameError: no JSON, an unknown or missing key, or a value of another type.
    """
    try:
        data = _JSON.decode(body.decode())
        value = _checker(typing.cast(Any, kind))(data)
    except _Mismatch as error:
        raise FrameError(f"{kind.__name__} body: {'.'.join((kind.__name__, *error.path))}: {error.text}") from None
    except (ValueError, RecursionError) as error:
        raise FrameError(f"{kind.__name__} body: {error}") from None
    return typing.cast(T, value)


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is no number here")


_JSON = json.JSONDecoder(parse_constant=_refuse_constant)


class _Mismatch(Exception):
    """A value of another type; `path` grows on its way out."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.text = text
        self.path: tuple[str, ...] = ()


Checker = Callable[[Any], Any]


@functools.cache
def _checker(kind: Any) -> Checker:
    """A function that checks decoded JSON against a type hint and builds the value, or raises `_Mismatch`.

    Made once a type: heartbeats are many, and looking into type hints takes longer than everything else.
    """
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if is_dataclass(kind):
        return _dataclass_checker(kind)
    if origin in (Union, types.UnionType):
        inner = _checker(next(each for each in arguments if each is not type(None)))
        return lambda data: None if data is None else inner(data)
    if origin is Literal:
        return functools.partial(_check_literal, arguments)
    if origin is tuple:
        return functools.partial(_check_list, _checker(arguments[0]))
    if origin is dict:
        return _check_texts
    if kind is int:
        return _check_integer
    if kind is float:
        return _check_float
    return functools.partial(_check_plain, kind)


def _dataclass_checker(kind: Any) -> Checker:
    hints = typing.get_type_hints(kind)
    checkers = [(field.name, _checker(hints[field.name])) for field in fields(kind)]
    names, defaults = {name for name, _ in checkers}, _later_fields(kind)

    def check(data: Any) -> Any:
        if not isinstance(data, dict):
            raise _Mismatch("expected a mapping")
        if wrong := (names ^ data.keys()) - (defaults.keys() - data.keys()):
            raise _Mismatch(f"unknown or missing keys {sorted(wrong)}")
        values, name = [], ""
        try:
            for name, checker in checkers:
                values.append(checker(data[name]) if name in data else defaults[name])
        except _Mismatch as error:
            error.path = (name, *error.path)
            raise
        return kind(*values)

    return check


def _check_literal(allowed: tuple[Any, ...], data: Any) -> Any:
    if data not in allowed:
        raise _Mismatch(f"{data!r} is none of {allowed}")
    return data


def _check_list(item: Checker, data: Any) -> Any:
    if not isinstance(data, list):
        raise _Mismatch("expected a list")
    return tuple([item(value) for value in data])


def _check_texts(data: Any) -> Any:
    if not isinstance(data, dict) or not all(isinstance(value, str) for value in data.values()):
        raise _Mismatch("expected a mapping of text to text")
    return data


def _check_integer(data: Any) -> Any:
    if type(data) is not int or not 0 <= data < U64:
        raise _Mismatch(f"expected int, read {str(data)[:80]!r}")
    return data


def _check_float(data: Any) -> Any:
    if type(data) is int:
        try:
            data = float(data)
        except OverflowError:
            raise _Mismatch("expected float, read an integer that is none") from None
    if type(data) is not float or not math.isfinite(data):  # JSON's 1e999 is infinite
        raise _Mismatch(f"expected float, read {str(data)[:80]!r}")
    return data


def _check_plain(kind: type[Any], data: Any) -> Any:
    if not isinstance(data, kind):
        raise _Mismatch(f"expected {kind.__name__}, read {str(data)[:80]!r}")
    return data
