"""The pure comparison: equal states differ in nothing, every single difference is named once, secrets never show."""

from __future__ import annotations

import hashlib
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleet.provision.desired import (
    Content,
    DesiredState,
    DirectorySpec,
    EnvironmentSpec,
    FileSpec,
    IdentitySpec,
    LinkSpec,
    ProgramSpec,
    SupervisorSpec,
    TreeSpec,
)
from fleet.provision.diff import diff, texts_wanted
from fleet.provision.facts import (
    MISSING,
    EnvironmentFact,
    Facts,
    IdentityFact,
    PathFact,
    ProgramFact,
    SupervisorFact,
)
from fleet.provision.sending import spec_json

NAMES = st.lists(st.text("abcdefgh", min_size=1, max_size=6), unique=True, max_size=5)
MODES = st.sampled_from([0o600, 0o644, 0o755])


def content(data: bytes) -> Content:
    return Content(hashlib.sha256(data).hexdigest(), len(data), data=data)


@st.composite
def files(draw: st.DrawFn, below: str) -> tuple[FileSpec, ...]:
    return tuple(
        FileSpec(
            f"{below}/{name}",
            content(draw(st.binary(max_size=40))),
            draw(MODES),
            draw(st.sampled_from(["root", "fleet"])),
            "root",
            draw(st.booleans()),
        )
        for name in draw(NAMES)
    )


@st.composite
def states(draw: st.DrawFn) -> DesiredState:
    release = f"/opt/fleet/releases/{draw(st.text('0123456789abcdef', min_size=16, max_size=16))}"
    return DesiredState(
        box="one",
        prefix="/opt/fleet",
        privileged=draw(st.booleans()),
        user=draw(st.sampled_from([None, "fleet"])),
        packages=(),
        directories=tuple(DirectorySpec(f"/opt/fleet/d-{name}", draw(MODES)) for name in draw(NAMES)),
        files=draw(files("/opt/fleet/etc")),
        trees=(TreeSpec(release, draw(files(release))),),
        environments=(EnvironmentSpec("/opt/fleet/envs/a", "3.11", content(b"uv"), (), ""),),
        links=(LinkSpec("/opt/fleet/current", release),),
        identity=IdentitySpec("/k", "/c", "one", "site", ("DNS:one",), "ca"),
        supervisor=SupervisorSpec("/s.conf", "/python", "/s.sock", draw(st.sampled_from([None, "fleet"])), "print"),
        programs=tuple(ProgramSpec(name, f"print-{name}") for name in draw(NAMES)),
        health_gate_seconds=1.0,
    )


def equal_facts(desired: DesiredState) -> Facts:
    """What a box that is as it should be answers."""
    paths = {
        one.path: PathFact("directory", mode=one.mode, owner=one.owner, group=one.group) for one in desired.directories
    }
    for tree in desired.trees:
        paths[tree.path] = PathFact("directory")
    for file in [*desired.files, *(file for tree in desired.trees for file in tree.files)]:
        paths[file.path] = PathFact(
            "file", file.content.sha256, file.content.size_bytes, file.mode, file.owner, file.group
        )
    paths |= {link.path: PathFact("link", target=link.target) for link in desired.links}
    recorded = {
        "common_name": desired.identity.common_name,
        "organization": desired.identity.organization,
        "subject_alternative_names": list(desired.identity.subject_alternative_names),
        "ca_sha256": desired.identity.ca_sha256,
    }
    has_unit = True if desired.supervisor.unit else None
    return Facts(
        paths=paths,
        environments={one.path: EnvironmentFact(True) for one in desired.environments},
        identity=IdentityFact("", "", recorded, "digest"),
        supervisor=SupervisorFact(True, desired.supervisor.fingerprint, has_unit, has_unit),
        programs={one.name: ProgramFact("RUNNING", one.fingerprint) for one in desired.programs},
    )


@given(states())
def test_equal_states_have_no_difference(desired: DesiredState) -> None:
    assert diff(desired, equal_facts(desired)) == ()


@given(states(), st.data())
def test_one_damaged_path_is_one_change(desired: DesiredState, data: st.DataObject) -> None:
    facts = equal_facts(desired)
    managed = [one.path for one in (*desired.files, *desired.trees[0].files, *desired.directories)]
    if not managed:
        return
    path = data.draw(st.sampled_from(managed))
    fact = facts.paths[path]
    damage = data.draw(st.sampled_from(["missing", "mode", "kind"] + (["content"] if fact.kind == "file" else [])))
    damaged = {
        "missing": MISSING,
        "mode": replace(fact, mode=0o777),
        "kind": replace(fact, kind="other"),
        "content": replace(fact, sha256="0" * 64),
    }[damage]
    changes = diff(desired, replace(facts, paths={**facts.paths, path: damaged}))
    assert [(one.path, one.why) for one in changes] == [(path, damage)]


@given(states())
def test_empty_box_needs_everything_and_secrets_never_show(desired: DesiredState) -> None:
    empty = replace(
        equal_facts(desired),
        paths=dict.fromkeys(equal_facts(desired).paths, MISSING),
        environments={one.path: EnvironmentFact(False) for one in desired.environments},
        identity=IdentityFact(),
        supervisor=SupervisorFact(),
        programs={},
        user_present=False,
    )
    changes = diff(desired, empty)
    found = {(one.kind, one.path) for one in changes}
    assert {("file", one.path) for one in desired.files} <= found
    assert {("tree", one.path) for one in desired.trees} <= found
    assert {("program", one.name) for one in desired.programs} <= found
    assert (("user", "fleet") in found) is (desired.user is not None)
    for change in changes:
        if change.secret:
            assert (change.before, change.after, change.text_diff) == ("", "", "")
    for file in [*desired.files, *desired.trees[0].files]:
        if file.secret:
            assert file.path not in texts_wanted(desired)


@given(states())
def test_order_is_trees_before_links_before_programs(desired: DesiredState) -> None:
    facts = equal_facts(desired)
    changed = replace(
        facts,
        paths={**facts.paths, desired.trees[0].path: MISSING, desired.links[0].path: MISSING},
        programs={},
    )
    kinds = [one.kind for one in diff(desired, changed)]
    assert kinds == ["tree", "link", *["program"] * len(desired.programs)]


@given(states())
def test_owners_count_only_where_they_can_be_set(desired: DesiredState) -> None:
    facts = equal_facts(desired)
    strangers = {path: replace(fact, owner="stranger") for path, fact in facts.paths.items()}
    changes = diff(desired, replace(facts, paths=strangers))
    assert bool(changes) is (
        desired.privileged and bool(desired.files or desired.trees[0].files or desired.directories)
    )
    assert {one.why for one in changes} <= {"owner"}


@pytest.mark.parametrize(
    ("identity", "expected"),
    [
        (IdentityFact(), [("/k", "missing")]),
        (IdentityFact("content", "", {}, "x"), [("/k", "content")]),
        (IdentityFact("mode", "", {}, "x"), [("/k", "mode"), ("/c", "certificate")]),
        (IdentityFact("", "", {"ca_sha256": "another"}, "x"), [("/c", "certificate")]),
    ],
)
def test_identity(identity: IdentityFact, expected: list[tuple[str, str]]) -> None:
    desired = DesiredState(
        "one", "/p", False, None, (), (), (), (), (), (), IdentitySpec("/k", "/c", "one", "s", (), "ca"),
        SupervisorSpec("/s.conf", "/python", "/s.sock", None, "print"), (ProgramSpec("stage", "print"),), 1.0,
    )  # fmt: skip
    facts = replace(equal_facts(desired), identity=identity)
    changes = diff(desired, facts)
    assert [(one.path, one.why) for one in changes if one.kind == "identity"] == expected
    assert [one.why for one in changes if one.kind == "program"] == ["certificate"]


def test_text_diff_of_a_new_release_compares_with_the_running_one() -> None:
    file = FileSpec("/p/releases/new/etc/a.json", content(b"one\ntwo\n"))
    desired = DesiredState(
        "one", "/p", False, None, (), (), (), (TreeSpec("/p/releases/new", (file,)),), (),
        (LinkSpec("/p/current", "/p/releases/new"),), IdentitySpec("/k", "/c", "one", "s", (), "ca"),
        SupervisorSpec("/s.conf", "/python", "/s.sock", None, "print"), (), 1.0,
    )  # fmt: skip
    assert texts_wanted(desired) == ("/p/current/etc/a.json",)
    facts = equal_facts(desired)
    paths = {**facts.paths, "/p/releases/new": MISSING, file.path: MISSING}
    change = diff(desired, replace(facts, paths=paths, texts={"/p/current/etc/a.json": "one\n2\n"}))[0]
    assert change.kind == "tree"
    assert "-2\n+two\n" in change.text_diff


@given(states())
def test_contents_never_enter_the_specification(desired: DesiredState) -> None:
    spec = spec_json(desired)
    assert spec["trees"][0]["files"] == [
        {
            "path": file.path,
            "mode": file.mode,
            "owner": file.owner,
            "group": file.group,
            "secret": file.secret,
            "sha256": file.content.sha256,
            "size_bytes": file.content.size_bytes,
        }
        for file in desired.trees[0].files
    ]
