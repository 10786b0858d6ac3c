"""Typed access to the JSON configuration of stages and gateways; every complaint names the key and what was read."""

from __future__ import annotations

import difflib
import math
from collections.abc import Collection
from pathlib import Path
from typing import Any

LARGEST_PORT = 65535
LONGEST_SECONDS = 7 * 24 * 3600.0
SHOWN_CHARACTERS = 80


class Section:
    """A JSON object in a configuration file.

    Args:
        data: the decoded value.
        where: dotted path of the object in the file; empty for the whole file.

    Raises:
        ValueError: it is no object.
    """

    def __init__(self, data: Any, where: str = "") -> None:
        self._where = where
        if not isinstance(data, dict):
            raise ValueError(f"{where or 'the file'}: read {_shown(data)}, expected a mapping")
        self._data: dict[str, Any] = data

    def only(self, *keys: str) -> Section:
        """This object, if it has no other keys than these; ValueError otherwise."""
        for key in self._data:
            if key not in keys:
                near = difflib.get_close_matches(key, keys, 1)
                asked = f", did you mean {near[0]!r}?" if near else ""
                raise ValueError(f"unknown key {self._name(key)[:SHOWN_CHARACTERS]!r}{asked}")
        return self

    def names(self) -> list[str]:
        """The keys, in the order of the file."""
        return list(self._data)

    def optional(self, key: str) -> bool:
        """Whether the key is there and not null."""
        return self._data.get(key) is not None

    def section(self, key: str) -> Section:
        """A nested object; ValueError otherwise."""
        return Section(self._value(key), self._name(key))

    def sections(self, key: str) -> list[Section]:
        """An array of objects; ValueError otherwise."""
        value = self._value(key)
        if not isinstance(value, list):
            raise self._wrong(key, value, "an array")
        return [Section(item, f"{self._name(key)}[{index}]") for index, item in enumerate(value)]

    def text(self, key: str) -> str:
        """A string that is not empty; ValueError otherwise."""
        value = self._value(key)
        if not isinstance(value, str) or not value:
            raise self._wrong(key, value, "a string")
        return value

    def one_of(self, key: str, allowed: Collection[str]) -> str:
        """One of these strings; ValueError otherwise."""
        value = self.text(key)
        if value not in allowed:
            raise self._wrong(key, value, " or ".join(allowed))
        return value

    def path(self, key: str) -> Path:
        """A file name; ValueError otherwise."""
        return Path(self.text(key))

    def optional_path(self, key: str) -> Path | None:
        """A file name, or None if the key is missing or null; ValueError otherwise."""
        return self.path(key) if self.optional(key) else None

    def integer(self, key: str, low: int, high: int = 2**31 - 1) -> int:
        """An integer in [low, high]; ValueError otherwise."""
        value = self._value(key)
        if type(value) is not int or not low <= value <= high:
            raise self._wrong(key, value, f"an integer from {low} to {high}")
        return value

    def texts(self, key: str) -> list[str]:
        """An array of strings, none of them empty; ValueError otherwise."""
        value = self._value(key)
        if not isinstance(value, list) or not all(isinstance(each, str) and each for each in value):
            raise self._wrong(key, value, "an array of strings")
        return list(value)

    def value(self, key: str) -> Any:
        """Whatever stands there, for a parser of its own; ValueError if nothing does."""
        return self._value(key)

    def boolean(self, key: str) -> bool:
        """true or false; ValueError otherwise."""
        value = self._value(key)
        if not isinstance(value, bool):
            raise self._wrong(key, value, "true or false")
        return value

    def port(self, key: str, *, low: int = 1) -> int:
        """A TCP port; with `low=0` also 0, which lets the system choose one to listen on; ValueError otherwise."""
        return self.integer(key, low, LARGEST_PORT)

    def seconds(self, key: str) -> float:
        """A time in seconds, more than 0 and at most a week; ValueError otherwise."""
        value = self._value(key)
        if type(value) not in (int, float) or not (math.isfinite(value) and 0 < value <= LONGEST_SECONDS):
            raise self._wrong(key, value, f"seconds, more than 0 and at most {LONGEST_SECONDS:g}")
        return float(value)

    def _name(self, key: str) -> str:
        return f"{self._where}.{key}" if self._where else key

    def _value(self, key: str) -> Any:
        if key not in self._data:
            raise ValueError(f"key {self._name(key)!r} is missing")
        return self._data[key]

    def _wrong(self, key: str, value: Any, expected: str) -> ValueError:
        return ValueError(f"{self._name(key)}: read {_shown(value)}, expected {expected}")


def _shown(value: Any) -> str:
    text = f"an integer of {value.bit_length()} bits" if type(value) is int and value.bit_length() > 64 else repr(value)
    return text if len(text) <= SHOWN_CHARACTERS else text[:SHOWN_CHARACTERS] + "…"
