"""Typed access to the fields of a JSON request body; every complaint names the field."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from fleet.gateway.errors import ApiError, invalid

Body = Mapping[str, Any]


def decode_body(raw: bytes) -> dict[str, Any]:
    """The JSON object in a request body.

    Raises:
        ApiError: 400, not UTF-8, not JSON, nested too deeply, or not an object.
    """
    try:
        body = json.loads(raw.decode("utf-8"), parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:  # ValueError covers JSONDecodeError and UnicodeDecodeError
        reason = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise ApiError(400, f"the request body is not JSON: {reason}", code="invalid_json") from None
    if not isinstance(body, dict):
        raise ApiError(400, f"the request body is a JSON {_kind(body)}, expected an object", code="invalid_json")
    return body


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is no JSON number")


def _kind(value: object) -> str:
    """JSON's name for a value's type."""
    if isinstance(value, bool):
        return "boolean"
    names: dict[type, str] = {str: "string", int: "integer", float: "number", list: "array", dict: "object"}
    return names.get(type(value), "null")


def text(value: object, param: str) -> str:
    """A string that can be encoded as UTF-8.

    Raises:
        ApiError: not a string, or one with half a surrogate pair.
    """
    if not isinstance(value, str):
        raise invalid(param, f"expected a string, got {_kind(value)}")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        raise invalid(param, "the string holds half a surrogate pair, which is no Unicode text") from None
    return value


def boolean(body: Body, param: str, default: bool) -> bool:
    """A boolean field; null counts as absent."""
    value = body.get(param)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise invalid(param, f"expected a boolean, got {_kind(value)}")
    return value


def integer(body: Body, param: str, low: int, high: int) -> int | None:
    """An integer field in [low, high], None if absent or null."""
    value = body.get(param)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int):
        raise invalid(param, f"expected an integer, got {_kind(value)}")
    if not low <= value <= high:
        raise invalid(param, f"expected an integer from {low} to {high}, got {_shorten(value)}")
    return value


def number(body: Body, param: str, low: float, high: float, default: float) -> float:
    """A number field in [low, high]."""
    value = body.get(param)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise invalid(param, f"expected a number, got {_kind(value)}")
    if not low <= value <= high:  # also refuses infinity, which JSON's 1e999 becomes
        raise invalid(param, f"expected a number from {low:g} to {high:g}, got {_shorten(value)}")
    return float(value)


def _shorten(value: float) -> str:
    """A number for an error message; integers may be thousands of digits long."""
    if isinstance(value, int) and abs(value) >= 10**20:
        return f"an integer of {value.bit_length()} bits"
    return str(value)


def refuse_unsupported(body: Body, names: Mapping[str, tuple[Any, ...]]) -> None:
    """Refuse the known but unsupported fields that ask for something.

    Args:
        names: field → values that ask for nothing and are let through, beside null, false, [] and {}.

    Raises:
        ApiError: 400, naming every such field.
    """
    asked = [
        name
        for name, harmless in names.items()
        if body.get(name) not in (None, False, [], {}) and body.get(name) not in harmless
    ]
    if asked:
        raise ApiError(
            400, f"this server does not support: {', '.join(asked)}", param=asked[0], code="unsupported_parameter"
        )
