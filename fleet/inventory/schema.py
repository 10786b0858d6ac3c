"""The schema of an inventory as data, read from the pydantic model: for error messages and the reference page."""

from __future__ import annotations

import types
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, SecretStr
from pydantic.fields import FieldInfo

from fleet.inventory.model import Box, Site
from fleet.inventory.section import Section
from fleet.inventory.sitefile import KeyPath

ENTRY = "NAME"  # stands for the name of an entry, as in boxes.NAME.address
WORDS: dict[Any, str] = {
    str: "text",
    int: "whole number",
    float: "number",
    bool: "true or false",
    object: "any value",
    SecretStr: "!env VARIABLE or !file PATH",
    type(None): "nothing",
}


@dataclass(frozen=True)
class Key:
    """One key of the schema.

    Attributes:
        section: where it stands, e.g. `boxes.NAME`; empty at the top level.
        name: e.g. `address`.
        type: in words, e.g. `list of text`.
        required: whether the key must be there.
        default: as the file would say it; empty where there is nothing to say.
        description: one line.
    """

    section: str
    name: str
    type: str
    required: bool
    default: str
    description: str


def strip(annotation: Any) -> Any:
    """An annotation without `Annotated` and without `| None`."""
    while True:
        if get_origin(annotation) is Annotated:
            annotation = get_args(annotation)[0]
        elif get_origin(annotation) in (Union, types.UnionType):
            rest = [part for part in get_args(annotation) if part is not type(None)]
            if len(rest) != 1:
                return annotation
            annotation = rest[0]
        else:
            return annotation


def in_words(annotation: Any) -> str:
    """A type as people say it."""
    annotation = strip(annotation)
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return (
            " or ".join(str(value) for value in arguments)
            if len(arguments) < 3
            else "one of " + ", ".join(map(str, arguments))
        )
    if origin in (Union, types.UnionType):
        return " or ".join(in_words(part) for part in arguments)
    if origin is tuple:
        return f"list of {in_words(arguments[0])}"
    if origin is dict:
        value = strip(arguments[1])
        return "mapping of name to section" if _is_section(value) else f"mapping of name to {in_words(value)}"
    if isinstance(annotation, type) and issubclass(annotation, Enum):
        return "one of " + ", ".join(str(member.value) for member in annotation)
    return "section" if _is_section(annotation) else WORDS[annotation]


def sections(section: type[Section] = Site, path: str = "") -> Iterator[tuple[str, type[Section]]]:
    """Every section of the schema with its place, e.g. ("boxes.NAME", Box); a section stands before those inside it."""
    yield path, section
    for name, info in section.model_fields.items():
        inner, suffix = _inner_section(info.annotation)
        if inner is not None:
            yield from sections(inner, f"{path}.{name}{suffix}".lstrip("."))


def keys() -> Iterator[Key]:
    """Every key of the schema, section by section."""
    for path, section in sections():
        for name, info in section.model_fields.items():
            default = "" if info.is_required() else _written(info.default)
            kind = in_words(info.annotation) + _limits(info)
            yield Key(path, name, kind, info.is_required(), default, info.description or "")


def section_at(path: KeyPath) -> type[Section] | None:
    """The section whose keys stand below a path of an inventory, e.g. Box for ("boxes", "pi-1")."""
    annotation: Any = Site
    for depth, part in enumerate(path):
        annotation = strip(annotation)
        if depth == 1 and path[0] == "box_defaults":
            return None
        if _is_section(annotation):
            if part not in annotation.model_fields:
                return None
            annotation = annotation.model_fields[part].annotation
        elif get_origin(annotation) is dict:
            annotation = get_args(annotation)[1]
        elif get_origin(annotation) is tuple:
            annotation = get_args(annotation)[0]
        else:
            return None
    if path == ("box_defaults",):
        return Box
    annotation = strip(annotation)
    return annotation if _is_section(annotation) else None


def field_at(path: KeyPath) -> FieldInfo | None:
    """The field that a path leads to, or that the list or mapping it leads into belongs to."""
    for end in range(len(path), 0, -1):
        section = section_at(path[: end - 1])
        if section is not None:
            return section.model_fields.get(str(path[end - 1]))
    return None


def _is_section(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


def _inner_section(annotation: Any) -> tuple[type[Section] | None, str]:
    annotation = strip(annotation)
    if _is_section(annotation):
        return annotation, ""
    if get_origin(annotation) is dict and _is_section(strip(get_args(annotation)[1])):
        return strip(get_args(annotation)[1]), f".{ENTRY}"
    if get_origin(annotation) is tuple and _is_section(strip(get_args(annotation)[0])):
        return strip(get_args(annotation)[0]), "[]"
    return None, ""


def _limits(info: FieldInfo) -> str:
    """Bounds of a number as a suffix, e.g. `, at least 1, at most 65535`."""
    bounds = {"gt": "more than", "ge": "at least", "le": "at most"}
    found = [(words, getattr(mark, name, None)) for mark in info.metadata for name, words in bounds.items()]
    return "".join(f", {words} {value}" for words, value in found if value is not None)


def _written(value: object) -> str:
    """A default as the file would say it."""
    if value is None or isinstance(value, BaseModel):
        return ""
    if isinstance(value, Enum):
        return str(value.value)
    if isinstance(value, tuple):
        return "[" + ", ".join(_written(entry) for entry in value) + "]"
    if isinstance(value, str):
        return f'"{value}"' if value[:1].isdigit() else value
    return f"{value:g}" if isinstance(value, float) else str(value)
