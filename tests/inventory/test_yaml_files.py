"""Merges, limits, tags, and files that are no inventories."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fleet.errors import FleetError
from fleet.inventory.document import Document
from fleet.inventory.reader import MAX_FILE_BYTES, read_document
from fleet.inventory.sitefile import SiteFile
from tests.inventory.conftest import VALID, with_box1, with_labels

Load = Callable[..., SiteFile]
Complaints = Callable[..., list[str]]


def test_merge_keys_and_anchors(load: Load) -> None:
    content = VALID.replace(
        "  box1: {address: 10.0.0.1, profile: pc}\n  box2: {address: 10.0.0.2, profile: pc}\n",
        "  box1: &first\n    address: 10.0.0.1\n    profile: pc\n    labels: {rack: a}\n    user: one\n"
        "  box2:\n    <<: [*first, {user: two, threads: 3}]\n    address: 10.0.0.2\n",
    )
    loaded = load(content)
    box = loaded.site.boxes["box2"]
    assert (box.address, box.labels, box.user, box.threads) == ("10.0.0.2", {"rack": "a"}, "one", 3)
    assert loaded.lines[("boxes", "box2", "address")] == 15
    assert loaded.lines[("boxes", "box2", "labels")] == 11


def test_top_level_keys_for_anchors(load: Load) -> None:
    content = VALID.replace("box1: {address: 10.0.0.1, profile: pc}", "box1: {<<: *common, address: 10.0.0.1}")
    assert load("x-common: &common {profile: pc, user: pi}\n" + content).site.boxes["box1"].user == "pi"


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("<<: 3", "`<<` merges mappings only"),
        ("<<: [3]", "`<<` merges mappings only"),
        ("<<: {user: a}, <<: {port: 3}", "a second `<<`"),
        ("<<: *nowhere", "undefined alias"),
        ("user: *nowhere", "undefined alias"),
        ("labels: &a {b: *a}", "contains itself"),
        ("labels: &a {<<: *a}", "contains itself"),
        ("roles: &a [*a]", "contains itself"),
    ],
)
def test_merges_and_aliases_that_cannot_be(complaints: Complaints, text: str, what: str) -> None:
    complaint = complaints(with_box1(text))[0]
    assert complaint.startswith("8: ")
    assert what in complaint


def test_aliases_cannot_grow_the_file(complaints: Complaints) -> None:
    bomb = ["x-a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    bomb += [f"x-a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 12)]
    assert any("grows beyond" in complaint for complaint in complaints("\n".join(bomb) + "\n" + VALID))


def test_merges_cannot_grow_the_file(complaints: Complaints) -> None:
    bomb = ["x-a0: &a0 {k: v}"]
    bomb += [f"x-a{n}: &a{n} {{<<: [{', '.join([f'*a{n - 1}'] * 20)}]}}" for n in range(1, 20)]
    assert any("grows beyond" in complaint for complaint in complaints("\n".join(bomb) + "\n" + VALID))


@pytest.mark.parametrize("opening", ["[", "{a: ", "- ", "? "])
def test_nesting_has_a_limit(complaints: Complaints, opening: str) -> None:
    [complaint] = complaints("x-deep: " + ("\n" if opening in "- ? " else "") + opening * 3000)
    assert "nested more than 24 levels deep" in complaint or "not valid YAML" in complaint


def test_the_number_of_boxes_has_a_limit(complaints: Complaints) -> None:
    more = "".join(f"  more{number}: {{address: m{number}, profile: pc}}\n" for number in range(600))
    [complaint] = complaints(VALID.replace("boxes:\n", "boxes:\n" + more, 1) + "box_defaults: {user: pi}\n")
    assert complaint.startswith("7: boxes: read a mapping: expected at most 512 entries")


def test_size_has_a_limit(complaints: Complaints) -> None:
    assert complaints(VALID + "#" * MAX_FILE_BYTES) == ["the file is larger than 256 KiB: is it an inventory?"]


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b"", "the file is empty: expected a site; to write a commented one run: fleet init"),
        (b"# nothing\n\n", "the file is empty: expected a site; to write a commented one run: fleet init"),
        (b"---\n...\n", "the file is empty: expected a site; to write a commented one run: fleet init"),
        (b"- site: a\n", "1: the top level is a list: expected keys such as `site:` and `boxes:`"),
        (b"\nhello\n", "2: the top level is a single value: expected keys such as `site:` and `boxes:`"),
        (b"site: a\nports:\n\tring: 7401\n", "3: a tab where YAML wants spaces: replace each tab by two spaces"),
        (b"site: a\nports:\n  ring:\t7401\n", "3: a tab where YAML wants spaces: replace each tab by two spaces"),
        (b"site: a\n# Z\xfcrich\n", "2: byte 0xfc is not UTF-8 (Latin-1, perhaps): save the file as UTF-8"),
        ("site: a\n".encode("utf-16"), "1: the file is UTF-16: save it as UTF-8"),
        (b"site: a\nx: \x00\n", "2: control character U+0000: YAML does not allow it; delete it"),
        (b"site: a\n---\nsite: b\n", "2: a second document starts here: expected one site in a file"),
        (b'site: a\nx: "\\UFFFFFFFF"\n', "2: not valid YAML: "),
        (b"site: a\nx: [1, 2\ny: 3\n", "3: not valid YAML: "),
        (b"site: a: b\n", "1: not valid YAML: a colon where YAML expects none: check the indentation, or quote"),
        (b"%YAML 2.0\n---\nsite: a\n", "1: not valid YAML: "),
    ],
)
def test_files_that_are_no_inventory(complaints: Complaints, content: bytes, complaint: str) -> None:
    [found] = complaints(content)
    assert found.startswith(complaint)


def test_bom_and_crlf_are_accepted(load: Load) -> None:
    loaded = load(b"\xef\xbb\xbf" + VALID.replace("\n", "\r\n").encode())
    assert loaded.site == load(VALID).site
    assert loaded.lines[("boxes", "box2")] == 9


@pytest.mark.parametrize(
    ("key", "near"),
    [
        ("adress", 'did you mean "address"?'),
        ("Roles", 'did you mean "roles"?'),
        ("zzz", "valid here: address, connection"),
    ],
)
def test_unknown_keys_get_the_nearest_valid_name(complaints: Complaints, key: str, near: str) -> None:
    [complaint] = complaints(with_box1(f"{key}: x"))
    assert complaint.startswith(f"8: boxes.box1.{key}: unknown key; {near}")


def test_unknown_keys_of_box_defaults_are_told_once_and_there(complaints: Complaints) -> None:
    assert complaints(VALID + "box_defaults:\n  prot: 22\n") == [
        '20: box_defaults.prot: unknown key; did you mean "port"?'
    ]


@pytest.mark.parametrize(
    ("text", "tag"),
    [
        ("!!python/object/apply:os.system [id]", "!!python/object/apply:os.system"),
        ("!!binary aGk=", "!!binary"),
        ("!!set {a: null}", "!!set"),
        ("!vault abc", '"!vault"'),
        ("!!int abc", "!!int"),
        ("!!timestamp 2024-01-31", "!!timestamp"),
    ],
)
def test_unknown_tags(complaints: Complaints, text: str, tag: str) -> None:
    assert f"8: boxes.box1.labels.a: unknown tag {tag}" in complaints(with_labels(f"a: {text}"))[0]


def test_an_explicit_string_tag_is_a_string(load: Load) -> None:
    assert load(with_labels("a: !!str 1.10")).site.boxes["box1"].labels == {"a": "1.10"}


@pytest.mark.parametrize("text", ['"a\\nb"', '"a\\0b"', '"a\\ud800b"', '"\\x1b[31m"', "'two\n\n      lines'"])
def test_values_are_one_line_of_text(complaints: Complaints, text: str) -> None:
    [complaint] = complaints(with_labels(f"a: {text}"))
    assert "expected one line of text" in complaint


def test_a_template_left_in_the_file(complaints: Complaints) -> None:
    assert "quote the text if it holds braces" in complaints(VALID.replace("site: lab", "site: {{ name }}"))[0]


def test_all_errors_of_a_file_come_together_up_to_a_cap(complaints: Complaints) -> None:
    content = VALID.replace("apache-2.0", "3").replace("10.0.0.1", "a b").replace("[box1, box2]", "box1")
    assert [complaint.split(":")[0] for complaint in complaints(content)] == ["8", "14", "18"]
    many = complaints(VALID + "".join(f"unknown{n}: x\n" for n in range(70)))
    assert len(many) == 21
    assert many[-1] == "… and 50 more"


def test_lines_of_box_defaults_are_their_own(load: Load) -> None:
    loaded = load(VALID + "box_defaults:\n  labels:\n    rack: a\n")
    assert loaded.site.boxes["box1"].labels == {"rack": "a"}
    assert loaded.lines[("boxes", "box1", "labels", "rack")] == 21
    assert loaded.lines[("boxes", "box1", "address")] == 8


ANY_TEXT = st.one_of(
    st.binary(max_size=300),
    st.text(max_size=300).map(lambda text: text.encode("utf-8", "surrogatepass")),
    st.text(alphabet="ab:-?*&!|>%@`{}[],#'\"\\\n\t <~.0123456789", max_size=200).map(str.encode),
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=300)
@given(content=ANY_TEXT)
def test_any_bytes_give_a_site_or_an_error(load: Load, content: bytes) -> None:
    try:
        load(content)
    except FleetError as error:
        assert error.message


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=300)
@given(data=st.data())
def test_any_change_of_a_valid_file_gives_a_site_or_an_error(load: Load, data: st.DataObject) -> None:
    start = data.draw(st.integers(0, len(VALID)))
    end = data.draw(st.integers(start, min(len(VALID), start + 12)))
    piece = data.draw(st.text(alphabet="ab1.:-{}[]*&!#'\"\\\n\t |>~<", max_size=8) | st.sampled_from(VALID.split()))
    try:
        loaded = load(VALID[:start] + piece + VALID[end:])
    except FleetError as error:
        assert error.message
        return
    assert loaded.site.boxes


@given(st.text(max_size=40))
def test_quoted_text_is_read_as_it_is(text: str) -> None:
    import json

    document: Document = read_document(f"key: {json.dumps(text)}".encode())
    assert document.problems or document.data == {"key": text}
