"""Desired state against facts, as a typed list of changes. Pure: no I/O, the same input gives the same list."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from fleet.provision.desired import (
    Content,
    DesiredState,
    DirectorySpec,
    EnvironmentSpec,
    FileSpec,
    IdentitySpec,
    LinkSpec,
    ProgramSpec,
    TreeSpec,
)
from fleet.provision.facts import MISSING, Facts, PathFact

ChangeKind = Literal[
    "package",  # only reported: installing packages is the operator's work
    "user",
    "directory",
    "file",
    "tree",  # a whole content-addressed directory is missing
    "tree-file",  # one file of a tree that is there
    "environment",  # built anew
    "environment-file",  # mended from its wheel
    "link",
    "identity",  # key and certificate, or the certificate alone
    "supervisor",
    "program",
]
TEXT_DIFF_LIMIT_BYTES = 64 * 1024


@dataclass(frozen=True)
class Change:
    """One difference.

    Attributes:
        kind: what is changed. path: where (a program's, user's or package's name for those kinds).
        why: "missing", "content", "mode", "owner", "extra", "target", "kind", "certificate", "fingerprint",
            "stopped", "not enabled"; several joined by ", ".
        before, after: digest, mode, owner, target or fingerprint, "" where there is none; empty for secrets.
        bytes_to_send: upper bound of what travels for it.
        secret: content must never show.
        text_diff: unified diff of a small text file that is not secret, otherwise "".
    """

    kind: ChangeKind
    path: str
    why: str
    before: str = ""
    after: str = ""
    bytes_to_send: int = 0
    secret: bool = False
    text_diff: str = ""

    def describe(self) -> str:
        """One line for people: `file /opt/fleet/pki/ca.crt (content)`."""
        return f"{self.kind} {self.path} ({self.why})"


Changes = tuple[Change, ...]


def diff(desired: DesiredState, facts: Facts) -> Changes:
    """All differences, in the order in which they are applied; empty when the box is as it should be.

    Raises:
        KeyError: the facts answer another desired state (a managed path was not asked for).
    """
    found: list[Change] = []
    found += [Change("package", name, "missing") for name in facts.packages_missing]
    if desired.user is not None and not facts.user_present:
        found.append(Change("user", desired.user, "missing"))
    for directory in desired.directories:
        found += _directory(directory, facts, desired.privileged)
    for tree in desired.trees:
        found += _tree(tree, facts, desired)
    for environment in desired.environments:
        found += _environment(environment, facts)
    for file in desired.files:
        found += _file("file", file, facts, desired.privileged, text_path=file.path)
    identity = _identity(desired.identity, facts)
    found += identity
    issued = any(change.why not in ("mode", "owner") for change in identity)
    for link in desired.links:
        found += _link(link, facts)
    found += _supervisor(desired, facts)
    for program in desired.programs:
        found += _program(program, facts, new_certificate=issued)
    return tuple(found)


def texts_wanted(desired: DesiredState) -> tuple[str, ...]:
    """Paths whose present text makes the unified diffs of `diff` possible: small managed text files, and for the tree
    that a link will point to, the same files behind the link as it is now."""
    wanted = {file.path for file in desired.files if _shows_text(file)}
    for tree in desired.trees:
        wanted |= {_text_path(file, tree, desired) for file in tree.files if _shows_text(file)}
    return tuple(sorted(wanted))


def _shows_text(file: FileSpec) -> bool:
    data = file.content.data
    return not file.secret and data is not None and len(data) <= TEXT_DIFF_LIMIT_BYTES and b"\0" not in data


def _text_path(file: FileSpec, tree: TreeSpec, desired: DesiredState) -> str:
    for link in desired.links:
        if link.target == tree.path:
            return link.path + file.path[len(tree.path) :]
    return file.path


def _text_diff(path: str, content: Content, before: str | None, label: str) -> str:
    if content.data is None:
        return ""
    try:
        after = content.data.decode()
    except UnicodeDecodeError:
        return ""
    lines = difflib.unified_diff(
        (before or "").splitlines(keepends=True),
        after.splitlines(keepends=True),
        f"{label} (on the box)" if before is not None else "/dev/null",
        path,
    )
    return "".join(line if line.endswith("\n") else line + "\n\\ No newline at end of file\n" for line in lines)


def _attributes(fact: PathFact, mode: int, owner: str, group: str, privileged: bool) -> list[tuple[str, str, str]]:
    """(why, before, after) of mode and owner; owners count only where we may set them."""
    differences = []
    if fact.mode != mode:
        differences.append(("mode", f"{fact.mode:04o}", f"{mode:04o}"))
    if privileged and (fact.owner, fact.group) != (owner, group):
        differences.append(("owner", f"{fact.owner}:{fact.group}", f"{owner}:{group}"))
    return differences


def _joined(
    kind: ChangeKind, path: str, differences: list[tuple[str, str, str]], size: int = 0, secret: bool = False
) -> Change:
    why, before, after = (", ".join(part[index] for part in differences if part[index]) for index in range(3))
    return Change(kind, path, why, before, after, size, secret)


def _directory(spec: DirectorySpec, facts: Facts, privileged: bool) -> Iterator[Change]:
    fact = facts.paths[spec.path]
    if fact.kind != "directory":
        yield Change("directory", spec.path, "missing" if fact.kind == "missing" else "kind", fact.kind, "directory")
        return
    differences = _attributes(fact, spec.mode, spec.owner, spec.group, privileged)
    if differences:
        yield _joined("directory", spec.path, differences)


def _file(kind: ChangeKind, spec: FileSpec, facts: Facts, privileged: bool, text_path: str) -> Iterator[Change]:
    fact = facts.paths[spec.path]
    hidden = spec.secret
    text = ""
    if not hidden and _shows_text(spec) and (fact.kind != "file" or fact.sha256 != spec.content.sha256):
        text = _text_diff(spec.path, spec.content, facts.texts.get(text_path), text_path)
    if fact.kind != "file":
        why = "missing" if fact.kind == "missing" else "kind"
        after = "" if hidden else spec.content.sha256
        yield Change(kind, spec.path, why, "", after, spec.content.size_bytes, hidden, text)
        return
    differences: list[tuple[str, str, str]] = []
    size = 0
    if fact.sha256 != spec.content.sha256:
        size = spec.content.size_bytes
        differences.append(("content", "", "") if hidden else ("content", fact.sha256, spec.content.sha256))
    differences += _attributes(fact, spec.mode, spec.owner, spec.group, privileged)
    if differences:
        change = _joined(kind, spec.path, differences, size, hidden)
        yield Change(kind, change.path, change.why, change.before, change.after, size, hidden, text)


def _tree(tree: TreeSpec, facts: Facts, desired: DesiredState) -> Iterator[Change]:
    if facts.paths[tree.path].kind != "directory":
        texts = [
            change.text_diff
            for file in tree.files
            if _shows_text(file)
            and facts.texts.get(_text_path(file, tree, desired)) != (file.content.data or b"").decode(errors="replace")
            for change in _file("tree-file", file, facts, desired.privileged, _text_path(file, tree, desired))
        ]
        size = sum(file.content.size_bytes for file in tree.files)
        yield Change("tree", tree.path, "missing", bytes_to_send=size, text_diff="".join(texts))
        return
    for file in tree.files:
        yield from _file("tree-file", file, facts, desired.privileged, _text_path(file, tree, desired))
    for path in facts.extra.get(tree.path, ()):
        yield Change("tree-file", path, "extra")


def _environment(spec: EnvironmentSpec, facts: Facts) -> Iterator[Change]:
    fact = facts.environments[spec.path]
    size = spec.uv.size_bytes + sum(wheel.size_bytes for _, wheel in spec.wheels)
    if not fact.present:
        yield Change("environment", spec.path, "missing", bytes_to_send=size)
        return
    for relative, why in fact.damaged.items():
        yield Change("environment-file", f"{spec.path}/{relative}", why)


def _identity(spec: IdentitySpec, facts: Facts) -> list[Change]:
    fact = facts.identity
    attributes = ("mode", "owner")
    if fact.key and fact.key not in attributes:  # a key that nobody vouches for: new key, and so a new certificate
        return [Change("identity", spec.key_path, fact.key, secret=True)]
    found = [Change("identity", spec.key_path, fact.key, secret=True)] if fact.key else []
    wanted = {
        "common_name": spec.common_name,
        "organization": spec.organization,
        "subject_alternative_names": list(spec.subject_alternative_names),
        "ca_sha256": spec.ca_sha256,
    }
    if dict(fact.recorded) != wanted or (fact.certificate and fact.certificate not in attributes):
        found.append(Change("identity", spec.certificate_path, "certificate", fact.certificate_sha256))
    elif fact.certificate:
        found.append(Change("identity", spec.certificate_path, fact.certificate))
    return found


def _link(spec: LinkSpec, facts: Facts) -> Iterator[Change]:
    fact = facts.paths.get(spec.path, MISSING)
    if fact.kind != "link":
        yield Change("link", spec.path, "missing" if fact.kind == "missing" else "kind", "", spec.target)
    elif fact.target != spec.target:
        yield Change("link", spec.path, "target", fact.target, spec.target)


def _supervisor(desired: DesiredState, facts: Facts) -> Iterator[Change]:
    spec, fact = desired.supervisor, facts.supervisor
    name = spec.unit or spec.config_path
    whys = []
    if not fact.running:
        whys.append("stopped")
    elif fact.fingerprint != spec.fingerprint:
        whys.append("fingerprint")
    if spec.unit is not None and fact.unit_enabled is False:
        whys.append("not enabled")
    if spec.unit is not None and fact.running and fact.unit_active is False:
        whys.append("not run by its unit")
    if whys:
        yield Change("supervisor", name, ", ".join(whys), fact.fingerprint, spec.fingerprint)


def _program(spec: ProgramSpec, facts: Facts, new_certificate: bool) -> Iterator[Change]:
    fact = facts.programs.get(spec.name)
    if fact is None:
        yield Change("program", spec.name, "missing", "", spec.fingerprint)
    elif fact.fingerprint != spec.fingerprint:
        yield Change("program", spec.name, "fingerprint", fact.fingerprint, spec.fingerprint)
    elif new_certificate:
        yield Change("program", spec.name, "certificate", fact.fingerprint, spec.fingerprint)
    elif fact.state not in ("RUNNING", "STARTING", "BACKOFF"):
        yield Change("program", spec.name, "stopped", fact.state, "RUNNING")
