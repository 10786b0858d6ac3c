"""pydantic's errors in the words of the inventory: the line, what was read, what was expected, what to write."""

from __future__ import annotations

from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from fleet.inventory.document import Document
from fleet.inventory.problems import Problem, nearest, path_text, shown
from fleet.inventory.schema import field_at, in_words, section_at
from fleet.inventory.secrets import SecretReference
from fleet.inventory.sitefile import KeyPath

NAME_RULE = "small letters, digits and hyphens, starting with a letter, at most 41 characters"
LABEL_KEY_RULE = "letters, digits and _ . / -, starting with a letter or digit, at most 63 characters"
RULES = {  # pattern of the model → the same rule in words
    "^[a-z][a-z0-9-]{0,40}$": f"a name: {NAME_RULE}",
    "^[A-Za-z0-9][A-Za-z0-9_./-]{0,62}$": f"a label: {LABEL_KEY_RULE}",
    "^[^,\\x00-\\x1f\\x7f]{0,256}$": "at most 256 characters without a comma (--limit separates by commas)",
    "^[a-z_][a-z0-9_-]{0,31}$": "the name of a Unix user",
}
LIMITS = {
    "greater_than": ("gt", "more than"),
    "greater_than_equal": ("ge", "at least"),
    "less_than_equal": ("le", "at most"),
}


def explain(error: ValidationError, document: Document, origins: dict[KeyPath, KeyPath]) -> list[Problem]:
    """Turn every error of a validation into a problem.

    Args:
        error: what pydantic found in `document.data`.
        document: lines and sources of the data.
        origins: path below a box → path under box_defaults, for merged defaults.
    """
    problems = []
    for detail in error.errors(include_url=False):
        path = _data_path(detail["loc"], document.data)
        told = path
        for end in range(len(path), 0, -1):
            if path[:end] in origins:
                told = origins[path[:end]] + path[end:]
                break
        if any(whole[:end] in document.spoiled for whole in (path, told) for end in range(len(whole) + 1)):
            continue
        line = document.line_of(path[:-1] if detail["type"] == "missing" else path)
        problems.append(Problem(line, _sentence(detail, path, told, document)))
    return problems


def _data_path(location: tuple[str | int, ...], data: object) -> KeyPath:
    """pydantic's location without the parts it adds itself (tags of alternatives, `[key]`)."""
    path: list[str | int] = []
    for position, part in enumerate(location):
        inside = isinstance(data, dict) and part in data
        inside = inside or (isinstance(data, tuple) and isinstance(part, int) and part < len(data))
        if inside:
            data = data[part]  # type: ignore[index]
        elif part == "[key]" or str(part).startswith("<") or position < len(location) - 1:
            continue
        path.append(part)
    return tuple(path)


def _sentence(detail: ErrorDetails, path: KeyPath, told: KeyPath, document: Document) -> str:
    where, kind, value = path_text(told), detail["type"], detail["input"]
    context: dict[str, Any] = detail.get("ctx", {})
    read = _read(value, document.sources.get(path))
    info = field_at(path)
    if kind == "missing":
        what = f" ({info.description})" if info is not None and info.description else ""
        return f"{where} is missing: write {path[-1]}: …{what}"
    if kind == "extra_forbidden":
        section = section_at(path[:-1])
        return f"{where}: unknown key; {nearest(str(path[-1]), section.model_fields if section else ())}"
    if kind == "literal_secret":
        # the value may be a real secret: it is not repeated
        return f"{where}: a secret stands in the file: write !env VARIABLE or !file PATH instead, and change the secret"
    if isinstance(value, SecretReference):
        return f"{where}: read {read}: references are for secrets only (gateway.api_keys[].key); write the value itself"
    if detail["loc"][-1:] == ("[key]",):
        return f"{where}: expected {RULES.get(context.get('pattern', ''), detail['msg'])}"
    return f"{where}: read {read}: {_expected(detail, path, document.sources.get(path))}"


def _expected(detail: ErrorDetails, path: KeyPath, source: str | None) -> str:
    """What the schema wants at a path, and what to write, given the text that the file has there."""
    kind, value = detail["type"], detail["input"]
    context: dict[str, Any] = detail.get("ctx", {})
    info = field_at(path)
    description = f" ({info.description})" if info is not None and info.description else ""
    if value is None and source is not None:
        return f"nothing stands here; write a value{description} or delete the key"
    if kind == "string_type":
        return f'expected text: write "{source}"' if source is not None else f"expected text{description}"
    if kind in ("int_type", "float_type"):
        return f"expected a {'whole ' if kind == 'int_type' else ''}number{_number_fix(value)}"
    if kind in ("literal_error", "enum"):
        allowed = [word.strip("'") for word in context["expected"].replace(" or ", ", ").split(", ")]
        near = nearest(value, allowed) if isinstance(value, str) else ""
        choice = f"one of {', '.join(allowed)}" if len(allowed) > 1 else allowed[0]
        return (
            f"expected {choice}"
            + (f"; {near}" if near.startswith("did you mean") else "")
            + ("" if len(allowed) > 1 else description)
        )
    if kind == "string_pattern_mismatch":
        return f"expected {RULES.get(context['pattern'], context['pattern'])}"
    if kind in ("model_type", "dict_type", "model_attributes_type"):
        section = section_at(path)
        if section is not None and isinstance(value, (str, int, float)):
            first = next(iter(section.model_fields))
            return f'expected a mapping: write {path[-1]}: {{{first}: "{source or value}"}}{description}'
        return f"expected a mapping, indented `key: value` lines{description}"
    if kind == "tuple_type":
        return f"expected a list: write [{source or (value if isinstance(value, str) else '…')}]"
    if kind in ("too_short", "string_too_short"):
        return f"expected at least one{description}"
    if kind == "too_long":
        return f"expected at most {context['max_length']} entries{description}"
    if kind in LIMITS:
        key, words = LIMITS[kind]
        return f"expected {words} {context[key]:g}{description}"
    if kind == "value_error":
        return f"expected {context['error']}"
    wanted = f"expected {in_words(info.annotation)}" if info is not None else detail["msg"]
    return f"{wanted}{description}"


def _number_fix(value: object) -> str:
    """What to write for text that someone meant as a number."""
    if isinstance(value, bool) or not isinstance(value, str):
        return ""
    plain = value.replace("_", "").strip()
    try:
        number = int(plain, 0) if plain[:2].lower() in ("0x", "0o", "0b") else int(plain)
    except ValueError:
        return ", without unit and quotes"
    return f": write {number}"


def _read(value: object, source: str | None) -> str:
    if isinstance(value, SecretReference):
        return value.reference
    if isinstance(value, dict):
        return "a mapping"
    if isinstance(value, tuple):
        return "a list"
    if value is None:
        return source or "nothing"
    if isinstance(value, bool):
        return f"the truth value {source}"
    if isinstance(value, (int, float)) and source is not None:
        return f"the number {source}"
    return shown(value)
