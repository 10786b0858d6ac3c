"""What is wrong with an inventory: collected with line numbers, reported together."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from fleet.errors import ExitCode, FleetError

MAX_REPORTED = 20
MAX_SHOWN_CHARACTERS = 60


@dataclass(frozen=True, order=True)
class Problem:
    """One thing to mend.

    Attributes:
        line: 1-based line; 0 for the file as a whole.
        message: where (key path), what was read, what was expected, what to write.
    """

    line: int
    message: str


def invalid_inventory(file: Path, problems: Iterable[Problem]) -> FleetError:
    """One error that lists problems in line order, each as `file:line: message`.

    Args:
        file: the inventory, as the user named it.
        problems: at least one; the same problem found twice is listed once.
    """
    ordered = sorted(set(problems))
    lines = [
        f"{file}:{problem.line}: {problem.message}" if problem.line else f"{file}: {problem.message}"
        for problem in ordered
    ]
    if len(lines) == 1:
        message = lines[0]
    else:
        shown = lines[:MAX_REPORTED]
        if len(lines) > MAX_REPORTED:
            shown.append(f"… and {len(lines) - MAX_REPORTED} more")
        message = "\n".join([f"{len(lines)} errors in {file}", *shown])
    return FleetError(
        message,
        hint=f"mend the file, then run: fleet inventory check {file}",
        exit_code=ExitCode.INVALID_INVENTORY,
    )


def shown(value: object) -> str:
    """A value of the file as a message quotes it: one line, printable, short."""
    text = value if isinstance(value, str) else str(value)
    text = "".join(character if character.isprintable() else "�" for character in text)
    return f'"{text}"' if len(text) <= MAX_SHOWN_CHARACTERS else f'"{text[:MAX_SHOWN_CHARACTERS]}…"'


def path_text(path: Iterable[str | int]) -> str:
    """A key path as people write it, e.g. `boxes.pi-1.roles[0]`."""
    text = ""
    for part in path:
        if isinstance(part, int):
            text += f"[{part}]"
        else:
            text += ("." if text else "") + (
                part if part.isprintable() and len(part) <= MAX_SHOWN_CHARACTERS else shown(part)
            )
    return text


def nearest(name: str, valid: Iterable[str]) -> str:
    """`; did you mean "x"?` if a valid name is near, else the valid names."""
    names = list(valid)
    close = difflib.get_close_matches(name[:MAX_SHOWN_CHARACTERS].lower(), names, n=1, cutoff=0.6)
    if close:
        return f'did you mean "{close[0]}"?'
    return f"valid here: {', '.join(names)}" if names else "none is defined here"
