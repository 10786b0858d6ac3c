"""References to secrets: read where they may stand, refused elsewhere, never shown."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from fleet.errors import FleetError
from fleet.inventory.sitefile import SiteFile
from tests.inventory.conftest import VALID

Load = Callable[..., SiteFile]
Complaints = Callable[..., list[str]]
VALUE = "correct-horse-battery-staple"


def with_key(reference: str) -> str:
    return VALID + f"gateway:\n  api_keys:\n    - name: line\n      key: {reference}\n"


@pytest.fixture
def secret_file(tmp_path: Path) -> Path:
    file = tmp_path / "key file"
    file.write_text(VALUE + "\n")
    file.chmod(0o600)
    return file


def test_from_the_environment(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SITE_KEY", VALUE)
    [key] = load(with_key("!env SITE_KEY")).site.gateway.api_keys
    assert key.key.get_secret_value() == VALUE


@pytest.mark.parametrize("reference", ["!file key file", '!file "key file"', "!file ./key file"])
def test_from_a_file_beside_the_inventory(load: Load, secret_file: Path, reference: str) -> None:
    [key] = load(with_key(reference)).site.gateway.api_keys
    assert key.key.get_secret_value() == VALUE


def test_a_secret_shows_as_its_reference(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SITE_KEY", VALUE)
    site = load(with_key("!env SITE_KEY")).site
    for shown in (
        str(site),
        repr(site),
        site.model_dump_json(),
        str(site.model_dump()),
        f"{site.gateway.api_keys[0].key}",
    ):
        assert VALUE not in shown
        assert "!env SITE_KEY" in shown


def test_without_secrets_a_reference_stays_one(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SITE_KEY", VALUE)
    [key] = load(with_key("!env SITE_KEY"), resolve_secrets=False).site.gateway.api_keys
    assert str(key.key) == "!env SITE_KEY"
    with pytest.raises(FleetError, match="was not read"):
        key.key.get_secret_value()


def test_sites_with_unread_secrets_compare(load: Load) -> None:
    first = load(with_key("!env ONE"), resolve_secrets=False).site
    assert first == load(with_key("!env ONE"), resolve_secrets=False).site
    assert first != load(with_key("!env TWO"), resolve_secrets=False).site


@pytest.mark.parametrize("literal", [VALUE, "12345678", "true", f"[{VALUE}]", f"!!str {VALUE}", f'"!env {VALUE}"'])
def test_a_secret_in_the_file_is_refused_and_not_repeated(complaints: Complaints, literal: str) -> None:
    [complaint] = complaints(with_key(literal))
    assert complaint.startswith("22: gateway.api_keys[0].key: a secret stands in the file: write !env VARIABLE")
    assert VALUE not in complaint


def test_a_missing_or_empty_variable(complaints: Complaints, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SITE_KEY", raising=False)
    expected = "22: gateway.api_keys[0].key: environment variable SITE_KEY is {}; run: export SITE_KEY=…"
    assert complaints(with_key("!env SITE_KEY")) == [expected.format("not set")]
    monkeypatch.setenv("SITE_KEY", "")
    assert complaints(with_key("!env SITE_KEY")) == [expected.format("empty")]


def test_missing_secrets_come_with_the_other_errors(complaints: Complaints, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SITE_KEY", raising=False)
    content = with_key("!env SITE_KEY").replace("apache-2.0", "3")
    assert [complaint.split(":")[0] for complaint in complaints(content)] == ["14", "22"]


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o604, 0o620, 0o601])
def test_a_file_open_to_others_is_refused_with_the_command(
    complaints: Complaints, secret_file: Path, mode: int
) -> None:
    secret_file.chmod(mode)
    [complaint] = complaints(with_key("!file key file"))
    assert f"is open to other users (mode {mode:04o}); run: chmod 600 '{secret_file}'" in complaint


@pytest.mark.parametrize(
    ("content", "what"),
    [
        (b"", "must hold the secret as one line"),
        (b"\n", "must hold the secret as one line"),
        (b"one\ntwo\n", "must hold the secret as one line"),
        (b"\xff\xfe\n", "is not UTF-8 text"),
        (b"x" * 70_000, "is larger than 65536 bytes"),
    ],
)
def test_a_file_that_holds_no_secret(complaints: Complaints, secret_file: Path, content: bytes, what: str) -> None:
    secret_file.write_bytes(content)
    [complaint] = complaints(with_key("!file key file"))
    assert complaint.startswith("22: gateway.api_keys[0].key: secret file ")
    assert what in complaint


def test_a_missing_file_a_directory_and_a_pipe(complaints: Complaints, tmp_path: Path) -> None:
    assert "cannot be read (No such file or directory)" in complaints(with_key("!file nowhere"))[0]
    (tmp_path / "directory").mkdir(mode=0o700)
    assert "is not a regular file" in complaints(with_key("!file directory"))[0]
    os.mkfifo(tmp_path / "pipe", 0o600)
    assert "is not a regular file" in complaints(with_key("!file pipe"))[0]


@pytest.mark.parametrize("reference", ["!env", "!env 'a b'", "!env $HOME", "!env 1A", "!file", "!file ''"])
def test_a_reference_to_nothing(complaints: Complaints, reference: str) -> None:
    [complaint] = complaints(with_key(reference))
    assert complaint.startswith(f"22: gateway.api_keys[0].key: read {reference.split(maxsplit=1)[0]} ")
    assert "expected " in complaint


@pytest.mark.parametrize(
    ("before", "after", "where"),
    [
        ("site: lab", "site: !env NAME", "1: site"),
        ("licence: apache-2.0", "licence: !file x", "14: models.tiny.licence"),
        ("boxes: [box1, box2]", "boxes: !env BOXES", "18: pipelines.main.boxes"),
        ("boxes: [box1, box2]", "boxes: [box1, !env BOX]", "18: pipelines.main.boxes[1]"),
        ("profile: pc}", "profile: pc, port: !env PORT}", "8: boxes.box1.port"),
        ("profile: pc}", "profile: pc, mac: !env MAC}", "8: boxes.box1.mac"),
        ("profile: pc}", "profile: pc, roles: !env ROLES}", "8: boxes.box1.roles"),
        ("    torch: ", "    cores: !env CORES\n    torch: ", "6: device_profiles.pc.cores"),
    ],
)
def test_references_are_for_secrets_only(complaints: Complaints, before: str, after: str, where: str) -> None:
    complaint = complaints(VALID.replace(before, after, 1))[0]
    assert complaint.startswith(f"{where}: read !")
    assert "references are for secrets only" in complaint


def test_a_reference_tag_on_a_list(complaints: Complaints) -> None:
    assert "unknown tag" in complaints(with_key("!env [A]"))[0]
