"""YAML nodes → plain data with the line of every key, stricter than YAML 1.1.

PyYAML parses and composes the node tree; this module turns nodes into data itself, because PyYAML's own constructor
loses lines, overwrites duplicate keys, and reads `NO` as false, `0644` as 420 and `52:54:00:12:34:56` as a number in
base 60. Plain scalars follow YAML 1.2's core schema, narrowed: what a human may have meant as text stays text.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Hashable
from typing import Literal

import yaml

from fleet.inventory.document import Document
from fleet.inventory.problems import Problem, path_text, shown
from fleet.inventory.secrets import MAX_TARGET_CHARACTERS, VARIABLE_NAME, SecretReference
from fleet.inventory.sitefile import KeyPath

MAX_NESTING = 24
MAX_NODES = 50_000  # after aliases are expanded; 60 boxes with every key written out need about 2 000
MAX_PROBLEMS = 200

YAML_TAG = "tag:yaml.org,2002:"
STR, MAP, SEQ, NULL, BOOL, INT, FLOAT, MERGE = (
    YAML_TAG + name for name in ("str", "map", "seq", "null", "bool", "int", "float", "merge")
)
PLAIN_SCALARS = {
    NULL: re.compile(r"~|null|Null|NULL|"),
    BOOL: re.compile(r"true|false"),
    # no leading zero (0644 is text), no underscores, at most 15 digits (longer ones are serial numbers, not counts)
    INT: re.compile(r"[-+]?(?:0|[1-9][0-9]{0,14})"),
    # 17 digits tell every double apart, and up to 4 zeros stand before them: programs write 0.0010000000000000002
    FLOAT: re.compile(
        r"[-+]?(?:0|[1-9][0-9]{0,14})?(?:\.[0-9]{1,21})(?:[eE][-+]?[0-9]{1,3})?"
        r"|[-+]?[1-9][0-9]{0,14}(?:\.|\.?[eE][-+]?[0-9]{1,3})"
    ),
    MERGE: re.compile(r"<<"),
}


class StrictLoader(yaml.SafeLoader):
    """PyYAML's scanner, parser and composer with plain scalars as in `PLAIN_SCALARS` and a limit on nesting."""

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012 - PyYAML's own protocol
    depth = 0

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        """Compose one node; deeper than `MAX_NESTING` is refused before Python's own stack would overflow."""
        if self.depth > MAX_NESTING:
            mark = self.peek_event().start_mark  # type: ignore[no-untyped-call]
            raise yaml.MarkedYAMLError(problem=f"nested more than {MAX_NESTING} levels deep", problem_mark=mark)
        self.depth += 1
        try:
            return super().compose_node(parent, index)
        finally:
            self.depth -= 1

    def resolve(self, kind: type[yaml.Node], value: str | None, implicit: tuple[bool, bool]) -> str:
        """The tag of a node that carries none."""
        if kind is yaml.ScalarNode and implicit[0] and value is not None:
            return next((tag for tag, pattern in PLAIN_SCALARS.items() if pattern.fullmatch(value)), STR)
        return {yaml.ScalarNode: STR, yaml.SequenceNode: SEQ}.get(kind, MAP)


def line_of_node(node: yaml.Node) -> int:
    return int(node.start_mark.line) + 1


class Builder:
    """Turns nodes into data and notes lines, sources and problems in a document."""

    def __init__(self, document: Document) -> None:
        self.document = document
        self.nodes = 0
        self.open: list[yaml.Node] = []  # collections being built, to find an alias inside its own anchor

    def problem(self, node: yaml.Node, message: str, spoiled: KeyPath | None = None) -> None:
        """Note what is wrong with a node; `spoiled`: the path whose value is lost by it."""
        if len(self.document.problems) < MAX_PROBLEMS:
            self.document.problems.append(Problem(line_of_node(node), message))
        if spoiled is not None:
            self.document.spoiled.add(spoiled)

    def room_for(self, node: yaml.Node, number: int) -> bool:
        """Count values against `MAX_NODES`; the first one too many is a problem."""
        before, self.nodes = self.nodes, self.nodes + number
        if before <= MAX_NODES < self.nodes:
            message = f"the file grows beyond {MAX_NODES} values by its aliases (`*name`): write fewer of them"
            self.problem(node, message)
        return self.nodes <= MAX_NODES

    def build(self, node: yaml.Node, path: KeyPath) -> object:
        """The data of a node; None, with a problem noted, if it cannot be data of an inventory."""
        if not self.room_for(node, 1):
            self.document.spoiled.add(path)
            return None
        if any(node is above for above in self.open):
            self.problem(node, f"{path_text(path)}: this alias contains itself", path)
            return None
        if isinstance(node, yaml.ScalarNode):
            return self.scalar(node, path)
        self.open.append(node)
        try:
            if isinstance(node, yaml.MappingNode) and node.tag == MAP:
                return self.mapping(node, path)
            if isinstance(node, yaml.SequenceNode) and node.tag == SEQ:
                return self.sequence(node, path)
        finally:
            self.open.pop()
        self.problem(node, f"{path_text(path)}: unknown tag {_short_tag(node.tag)}: {TAGS_HINT}", path)
        return None

    def sequence(self, node: yaml.SequenceNode, path: KeyPath) -> tuple[object, ...]:
        entries = []
        for index, entry in enumerate(node.value):
            here = (*path, index)
            self.document.lines[here] = line_of_node(entry)
            entries.append(self.build(entry, here))
        return tuple(entries)

    def mapping(self, node: yaml.MappingNode, path: KeyPath) -> dict[str, object]:
        data: dict[str, object] = {}
        for key, (key_node, value_node) in self.flatten(node, path).items():
            here = (*path, key)
            self.document.lines[here] = line_of_node(key_node)
            data[key] = self.build(value_node, here)
        return data

    def flatten(self, node: yaml.MappingNode, path: KeyPath) -> dict[str, tuple[yaml.Node, yaml.Node]]:
        """The keys of a mapping with those merged by `<<` (which never replace a mapping's own)."""
        own: dict[str, tuple[yaml.Node, yaml.Node]] = {}
        merged: dict[str, tuple[yaml.Node, yaml.Node]] = {}
        merge_line = 0
        for key_node, value_node in node.value:
            if key_node.tag == MERGE:
                if merge_line:
                    self.problem(
                        key_node, f"a second `<<` (the first is on line {merge_line}): write one, <<: [*first, *second]"
                    )
                    continue
                merge_line = line_of_node(key_node)
                for source in self.merge_sources(value_node, path):
                    for key, pair in source.items():
                        merged.setdefault(key, pair)
                continue
            name = self.key(key_node, path)
            if name is None:
                continue
            if name in own:
                first = line_of_node(own[name][0])
                self.problem(
                    key_node,
                    f"{path_text((*path, name))} stands here and on line {first}: expected it once; "
                    "rename or delete one",
                )
                continue
            own[name] = (key_node, value_node)
        return {**own, **{key: pair for key, pair in merged.items() if key not in own}}

    def merge_sources(self, node: yaml.Node, path: KeyPath) -> list[dict[str, tuple[yaml.Node, yaml.Node]]]:
        nodes = node.value if isinstance(node, yaml.SequenceNode) else [node]
        sources = []
        for source in nodes:
            if not isinstance(source, yaml.MappingNode) or source.tag != MAP:
                self.problem(
                    source, f"{path_text(path)}: `<<` merges mappings only: write <<: *name of an anchored mapping"
                )
            elif any(source is above for above in self.open):
                self.problem(source, f"{path_text(path)}: this alias contains itself")
            elif self.room_for(source, len(source.value)):
                self.open.append(source)
                sources.append(self.flatten(source, path))
                self.open.pop()
        return sources

    def key(self, node: yaml.Node, path: KeyPath) -> str | None:
        """A key is always text: `on`, `NO` and `1` stay what the file says."""
        if not isinstance(node, yaml.ScalarNode):
            self.problem(
                node, f"{path_text(path)}: a list or mapping as a key: quote the text if it holds braces or brackets"
            )
            return None
        if node.tag not in (STR, NULL, BOOL, INT, FLOAT):
            self.problem(node, f"{path_text(path)}: unknown tag {_short_tag(node.tag)} on a key: delete the tag")
            return None
        return str(node.value)

    def scalar(self, node: yaml.ScalarNode, path: KeyPath) -> object:
        text = str(node.value)
        if node.tag in ("!env", "!file"):
            return self.reference(node, "env" if node.tag == "!env" else "file", text.strip(), path)
        if node.tag in (STR, MERGE):
            # `"\0"` and `"\ud800"` are YAML, but no value of an inventory; every value is one line
            odd = next((character for character in text if unicodedata.category(character) in ("Cc", "Cs")), None)
            if odd is not None:
                self.problem(
                    node,
                    f"{path_text(path)}: holds U+{ord(odd):04X}: expected one line of text, without control characters",
                    path,
                )
                return ""
            return text
        if node.tag not in (NULL, BOOL, INT, FLOAT) or not PLAIN_SCALARS[node.tag].fullmatch(text):
            self.problem(node, f"{path_text(path)}: unknown tag {_short_tag(node.tag)}: {TAGS_HINT}", path)
            return None
        self.document.sources[path] = text
        if node.tag == NULL:
            return None
        if node.tag == BOOL:
            return text == "true"
        return int(text) if node.tag == INT else float(text)

    def reference(self, node: yaml.ScalarNode, kind: Literal["env", "file"], target: str, path: KeyPath) -> object:
        usable = (
            VARIABLE_NAME.fullmatch(target)
            if kind == "env"
            else target.isprintable() and 0 < len(target) <= MAX_TARGET_CHARACTERS
        )
        if usable:
            return SecretReference(kind, target)
        wanted = (
            "the name of a variable, e.g. !env SITE_API_KEY" if kind == "env" else "a path, e.g. !file secrets/api-key"
        )
        self.problem(node, f"{path_text(path)}: read !{kind} {shown(target)}: expected {wanted}")
        return SecretReference(kind, "")


TAGS_HINT = "expected a plain value; the only tags are !env VARIABLE and !file PATH, for secrets"


def _short_tag(tag: Hashable) -> str:
    text = str(tag)
    return "!!" + text.removeprefix(YAML_TAG) if text.startswith(YAML_TAG) else shown(text)
