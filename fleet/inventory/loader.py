"""An inventory file → `SiteFile`, or one error that names every line to mend."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar

from pydantic import ValidationError

from fleet.errors import ExitCode, FleetError
from fleet.inventory.checks import check_site
from fleet.inventory.document import Document
from fleet.inventory.explain import explain
from fleet.inventory.model import MAX_BOXES, Site
from fleet.inventory.problems import Problem, invalid_inventory
from fleet.inventory.reader import MAX_FILE_BYTES, read_document
from fleet.inventory.secrets import SecretReference
from fleet.inventory.sitefile import KeyPath, SiteFile

FREE_KEY_PREFIX = "x-"  # top-level keys that only hold anchors for `<<`, as in Compose files
Note = TypeVar("Note", int, str)
ALWAYS_TEXT = "mac"  # the one key whose text may look like a number: 525400123456


def load_site(path: Path, *, resolve_secrets: bool = True) -> SiteFile:
    """Read and check an inventory.

    Args:
        path: the inventory file.
        resolve_secrets: False where no secret is needed, as in the office: references stay references, and
            `get_secret_value` of one is an error.

    Returns:
        The site with defaults and box_defaults applied.

    Raises:
        FleetError: exit code 78; every line of its message is `file:line: what was read, expected, to write`.
    """
    document = read_document(_read_file(path))
    problems = list(document.problems)
    site = None
    if isinstance(document.data, dict):
        for key in [key for key in document.data if key.startswith(FREE_KEY_PREFIX)]:
            del document.data[key]
        _keep_text(document)
        origins = _merge_box_defaults(document)
        wrong: set[KeyPath] = set()
        try:
            site = Site.model_validate(document.data)
        except ValidationError as error:
            found = explain(error, document, origins)
            wrong = {tuple(part for part in detail["loc"]) for detail in error.errors(include_url=False)}
            problems += found
        else:
            problems += check_site(site, document)
        if resolve_secrets:
            problems += _resolve(document, path, wrong)
    if problems or site is None:
        raise invalid_inventory(path, problems)
    return SiteFile(site=site, file=path, lines=document.lines)


def _read_file(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(MAX_FILE_BYTES + 1)
    except FileNotFoundError as error:
        message, hint = f"{path}: no such file", f"name the inventory, or write one with: fleet init {path.parent}"
        raise FleetError(message, hint=hint, exit_code=ExitCode.INVALID_INVENTORY) from error
    except IsADirectoryError as error:
        message, hint = f"{path}: a directory, expected an inventory file", f"name the file, e.g. {path / 'site.yaml'}"
        raise FleetError(message, hint=hint, exit_code=ExitCode.INVALID_INVENTORY) from error
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        message, hint = f"{path}: cannot be read: {reason}", "make the file readable for you, or name another one"
        raise FleetError(message, hint=hint, exit_code=ExitCode.INVALID_INVENTORY) from error


def _box_mappings(document: Document) -> list[tuple[KeyPath, dict[str, object]]]:
    """Path and keys of box_defaults and of every box, as far as the file has them."""
    assert isinstance(document.data, dict)  # noqa: S101 - the caller has looked
    boxes = document.data.get("boxes")
    found: list[tuple[KeyPath, object]] = [(("box_defaults",), document.data.get("box_defaults"))]
    found += [(("boxes", name), box) for name, box in boxes.items()] if isinstance(boxes, dict) else []
    return [(path, mapping) for path, mapping in found if isinstance(mapping, dict)]


def _keep_text(document: Document) -> None:
    for path, mapping in _box_mappings(document):
        source = document.sources.get((*path, ALWAYS_TEXT))
        if source is not None and isinstance(mapping[ALWAYS_TEXT], int) and not isinstance(mapping[ALWAYS_TEXT], bool):
            mapping[ALWAYS_TEXT] = source


def _merge_box_defaults(document: Document) -> dict[KeyPath, KeyPath]:
    """Give every box the defaults it does not set, with the defaults' lines.

    Returns:
        path below a box → path under box_defaults.
    """
    origins: dict[KeyPath, KeyPath] = {}
    mappings = dict(_box_mappings(document))
    if len(mappings) > MAX_BOXES + 1:
        return origins  # the schema refuses so many boxes
    for key, value in mappings.pop(("box_defaults",), {}).items():
        source = ("box_defaults", key)
        lines, sources = _below(document.lines, source), _below(document.sources, source)
        for path, box in mappings.items():
            if key in box:
                continue
            box[key] = value
            here = (*path, key)
            origins[here] = source
            document.lines.update({(*here, *rest): line for rest, line in lines.items()})
            document.sources.update({(*here, *rest): text for rest, text in sources.items()})
    return origins


def _below(notes: Mapping[KeyPath, Note], path: KeyPath) -> dict[KeyPath, Note]:
    """What is noted for a path and below it, with paths relative to it."""
    return {noted[len(path) :]: note for noted, note in notes.items() if noted[: len(path)] == path}


def _resolve(document: Document, file: Path, wrong: set[KeyPath]) -> list[Problem]:
    """Read the value of every secret that stands where one may stand."""
    assert isinstance(document.data, dict)  # noqa: S101 - the caller has looked
    gateway = document.data.get("gateway")
    api_keys = gateway.get("api_keys") if isinstance(gateway, dict) else None
    problems = []
    for index, entry in enumerate(api_keys if isinstance(api_keys, tuple) else ()):
        path: KeyPath = ("gateway", "api_keys", index, "key")
        reference = entry.get("key") if isinstance(entry, dict) else None
        if isinstance(reference, SecretReference) and reference.target and path not in wrong:
            trouble = reference.resolve(file.resolve().parent)
            if trouble:
                problems.append(Problem(document.line_of(path), f"gateway.api_keys[{index}].key: {trouble}"))
    return problems
