"""Bytes of an inventory file → `Document`: encoding, size and YAML syntax, each error with its line."""

from __future__ import annotations

import re

import yaml

from fleet.inventory.document import Document
from fleet.inventory.nodes import NULL, Builder, StrictLoader, line_of_node
from fleet.inventory.problems import Problem

MAX_FILE_BYTES = 256 * 1024


def read_document(raw: bytes) -> Document:
    """Parse the bytes of an inventory. Never raises for what the bytes hold: see `Document.problems`."""
    document = Document()
    text = _decode(raw, document)
    if text is None:
        return document
    loader = StrictLoader(text)
    try:
        root = loader.get_node() if loader.check_node() else None
        if loader.check_node():
            line = int(loader.peek_event().start_mark.line) + 1  # type: ignore[no-untyped-call]
            document.problems.append(
                Problem(line, "a second document starts here: expected one site in a file; move it to its own file")
            )
            return document
    except yaml.YAMLError as error:
        document.problems.append(_syntax_problem(error, text))
        return document
    except (ValueError, OverflowError) as error:  # PyYAML lets them out for escapes such as "\UFFFFFFFF"
        document.problems.append(Problem(loader.line + 1, f"not valid YAML: {error}"))
        return document
    finally:
        loader.dispose()
    if root is None or (isinstance(root, yaml.ScalarNode) and root.tag == NULL):
        document.problems.append(
            Problem(0, "the file is empty: expected a site; to write a commented one run: fleet init")
        )
    elif not isinstance(root, yaml.MappingNode):
        kind = "a list" if isinstance(root, yaml.SequenceNode) else "a single value"
        document.problems.append(
            Problem(
                line_of_node(root),
                f"the top level is {kind}: expected keys such as `site:` and `boxes:`, without a leading hyphen",
            )
        )
    else:
        document.data = Builder(document).build(root, ())
    return document


def _decode(raw: bytes, document: Document) -> str | None:
    if len(raw) > MAX_FILE_BYTES:
        document.problems.append(
            Problem(0, f"the file is larger than {MAX_FILE_BYTES // 1024} KiB: is it an inventory?")
        )
        return None
    if raw.startswith((b"\xff\xfe", b"\xfe\xff")):
        document.problems.append(Problem(1, "the file is UTF-16: save it as UTF-8"))
        return None
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        byte = f"0x{raw[error.start]:02x}"
        document.problems.append(Problem(line, f"byte {byte} is not UTF-8 (Latin-1, perhaps): save the file as UTF-8"))
        return None
    # PyYAML would name a character offset; people look for a line
    for match in re.finditer(r"[^\t\n\r\x20-\x7e\x85\xa0-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]", text):
        line = text.count("\n", 0, match.start()) + 1
        document.problems.append(
            Problem(line, f"control character U+{ord(match[0]):04X}: YAML does not allow it; delete it")
        )
        return None
    return text.replace("\r\n", "\n")


def _syntax_problem(error: yaml.YAMLError, text: str) -> Problem:
    """A YAML error of the scanner, parser or composer in the words of someone who writes inventories."""
    mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
    what = str(getattr(error, "problem", None) or error)
    context = getattr(error, "context", None)
    line = mark.line + 1 if mark is not None else 1
    rows = text.split("\n")
    row = rows[line - 1] if line <= len(rows) else ""
    indentation = row[: len(row) - len(row.lstrip())]
    if "\t" in indentation or "'\\t'" in what:
        return Problem(line, "a tab where YAML wants spaces: replace each tab by two spaces")
    if "undefined alias" in what:
        return Problem(line, f"{what}: define it above with & before its value")
    if what.startswith("mapping values are not allowed"):
        what = "a colon where YAML expects none: check the indentation, or quote the value if it holds `: `"
    elif context:
        what = f"{what} ({context})"
    return Problem(line, f"not valid YAML: {what}")
