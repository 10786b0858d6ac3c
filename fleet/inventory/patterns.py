"""Which boxes `--limit` means: names, globs, roles, labels, exclusions. Pure."""

from __future__ import annotations

from collections.abc import Collection
from fnmatch import fnmatchcase

from fleet.errors import ExitCode, FleetError
from fleet.inventory.model import Role, Site
from fleet.inventory.problems import nearest, shown

MAX_PATTERN_CHARACTERS = 4096
GLOB_CHARACTERS = "*?["
ROLE, LABEL, FAILED = "role:", "label:", "@failed"


def select(site: Site, pattern: str, failed: Collection[str] = ()) -> list[str]:
    """Choose boxes.

    Args:
        site: the inventory.
        pattern: comma-separated terms, e.g. `pi-*,!pi-07,role:stage,label:rack=a,@failed`. A term adds boxes, a term
            with `!` takes boxes away, whatever the order. Without an adding term, all boxes are the start.
        failed: the boxes that `@failed` means: those of the last run that did not end well.

    Returns:
        Names in inventory order, at least one; all of them for an empty pattern.

    Raises:
        FleetError: exit code 2; a term names nothing, or no box is left.
    """
    if len(pattern) > MAX_PATTERN_CHARACTERS:
        raise _unusable(
            f"--limit has {len(pattern)} characters, expected at most {MAX_PATTERN_CHARACTERS}", "use globs"
        )
    terms = [term.strip() for term in pattern.split(",") if term.strip()]
    added: set[str] = set()
    removed: set[str] = set()
    for term in terms:
        chosen = removed if term.startswith("!") else added
        chosen |= _boxes_of(site, term.removeprefix("!").strip(), failed)
    if all(term.startswith("!") for term in terms):
        added = set(site.boxes)
    selected = [name for name in site.boxes if name in added - removed]
    if not selected:
        why = "no box failed in the last run" if terms == [FAILED] else "it leaves no box"
        raise _unusable(f"--limit {shown(pattern)}: {why}", f"boxes of {site.site}: {', '.join(site.boxes)}")
    return selected


def _boxes_of(site: Site, term: str, failed: Collection[str]) -> set[str]:
    """The boxes of one term without its `!`."""
    if term == FAILED:
        return set(failed) & set(site.boxes)
    if term.startswith("@"):
        raise _unusable(f"--limit: read {shown(term)}: the only group is {FAILED}", f"write {FAILED}")
    if term.startswith(ROLE):
        return _with_role(site, term.removeprefix(ROLE))
    if term.startswith(LABEL):
        return _with_label(site, term.removeprefix(LABEL))
    if any(character in term for character in GLOB_CHARACTERS):
        matching = {name for name in site.boxes if fnmatchcase(name, term)}
    else:
        matching = {term} & set(site.boxes)
    if not matching:
        raise _unusable(f"--limit: no box {shown(term)} in site {site.site}", nearest(term, site.boxes))
    return matching


def _with_role(site: Site, name: str) -> set[str]:
    roles = {role.value: role for role in Role}
    if name not in roles:
        raise _unusable(f"--limit: no role {shown(name)}", nearest(name, roles))
    return {box for box, spec in site.boxes.items() if roles[name] in spec.roles}


def _with_label(site: Site, text: str) -> set[str]:
    key, equals, value = text.partition("=")
    values = {spec.labels[key] for spec in site.boxes.values() if key in spec.labels}
    if not values:
        keys = sorted({key for spec in site.boxes.values() for key in spec.labels})
        raise _unusable(f"--limit: no box has a label {shown(key)}", nearest(key, keys))
    if equals and not any(fnmatchcase(known, value) for known in values):
        raise _unusable(f"--limit: no box has the label {key}={value}", nearest(value, sorted(values)))
    return {
        box
        for box, spec in site.boxes.items()
        if key in spec.labels and (not equals or fnmatchcase(spec.labels[key], value))
    }


def _unusable(message: str, hint: str) -> FleetError:
    return FleetError(message, hint=hint, exit_code=ExitCode.USAGE)
