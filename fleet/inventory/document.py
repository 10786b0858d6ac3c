"""What an inventory file says, before the schema judges it."""

from __future__ import annotations

from dataclasses import dataclass, field

from fleet.inventory.problems import Problem
from fleet.inventory.sitefile import KeyPath


@dataclass
class Document:
    """What a file says, before the schema judges it.

    Attributes:
        data: dicts, tuples, text, numbers, booleans, None and `SecretReference`s.
        lines: key path → 1-based line of the key or list entry.
        sources: key path → text as written, for every plain scalar that is not text.
        problems: what is wrong already.
        spoiled: key paths whose value is lost by one of those problems: the schema's view of them is no news.
    """

    data: object = None
    lines: dict[KeyPath, int] = field(default_factory=dict)
    sources: dict[KeyPath, str] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    spoiled: set[KeyPath] = field(default_factory=set)

    def line_of(self, path: KeyPath) -> int:
        """Line of a key path, or of the nearest one above it that has one."""
        while path and path not in self.lines:
            path = path[:-1]
        return self.lines.get(path, 1)
