"""What YAML makes of innocent text: it stays text, or the error says what to write."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from fleet.inventory.sitefile import SiteFile
from tests.inventory.conftest import VALID, with_box1, with_labels

Load = Callable[..., SiteFile]
Complaints = Callable[..., list[str]]

INNOCENT = """
NO no on off yes y N True TRUE False 2024-01-31 2024-01-31T10:00:00Z 12:30:45 0644 012345 0x1F 0o17 0b1 1_000 1.2.3
10.0.0.1 190:20:30 .inf .nan -.inf = 2.13.0+cpu 1e - 123456789012345678901234567890 1.2e <<
"""


@pytest.mark.parametrize("text", INNOCENT.split())
def test_innocent_text_stays_text(load: Load, text: str) -> None:
    assert load(with_labels(f"value: {text}")).site.boxes["box1"].labels == {"value": text}


@pytest.mark.parametrize("text", ["0.0010000000000000002", "0.00012345678901234567", "1.5e-07", "30.000000000000004"])
def test_a_number_as_programs_write_it_is_a_number(load: Load, text: str) -> None:
    site = load(VALID + f"timing: {{drain_seconds: {text}}}\n").site
    assert site.timing.drain_seconds == float(text)


@pytest.mark.parametrize("key", ["on", "NO", "yes", "true", "1", "1.10", "0644", "2024-01-31"])
def test_keys_are_text(load: Load, key: str) -> None:
    assert load(with_labels(f"{key}: value")).site.boxes["box1"].labels == {key: "value"}


def test_a_host_called_no(load: Load) -> None:
    assert load(VALID.replace("10.0.0.1", "NO")).site.boxes["box1"].address == "NO"


@pytest.mark.parametrize(
    ("text", "fix"),
    [
        ("1.10", 'read the number 1.10: expected text: write "1.10"'),
        ("7", 'read the number 7: expected text: write "7"'),
        ("1e3", 'read the number 1e3: expected text: write "1e3"'),
        ("true", 'read the truth value true: expected text: write "true"'),
        ("null", "read null: nothing stands here"),
        ("~", "read ~: nothing stands here"),
        ("", "read nothing: nothing stands here"),
        ("[a]", "read a list: expected text"),
        ("{a: b}", "read a mapping: expected text"),
    ],
)
def test_what_is_not_text_is_refused_with_the_fix(complaints: Complaints, text: str, fix: str) -> None:
    [complaint] = complaints(with_labels(f"value: {text}"))
    assert complaint.startswith(f"8: boxes.box1.labels.value: {fix}")


def test_a_version_read_as_a_number(complaints: Complaints) -> None:
    assert complaints(VALID.replace('"2.13.0"', "1.10")) == [
        '6: device_profiles.pc.torch.version: read the number 1.10: expected text: write "1.10"'
    ]
    assert complaints(VALID.replace('python: "3.11"', "python: 3.10")) == [
        '5: device_profiles.pc.python: read the number 3.10: expected text: write "3.10"'
    ]


def test_a_version_alone_where_a_section_belongs(complaints: Complaints) -> None:
    [complaint] = complaints(VALID.replace('torch: {version: "2.13.0"}', "torch: 1.10"))
    assert complaint.startswith("6: device_profiles.pc.torch: read the number 1.10")
    assert 'write torch: {version: "1.10"}' in complaint


def test_a_date_like_version_is_text_and_no_version(complaints: Complaints) -> None:
    [complaint] = complaints(VALID.replace('"2.13.0"', "2024-01-31"))
    assert 'read "2024-01-31": expected an exact release' in complaint


@pytest.mark.parametrize(
    ("text", "fix"),
    [
        ("022", "write 22"),
        ("0x16", "write 22"),
        ("0o26", "write 22"),
        ("2_2", "write 22"),
        ('"22"', "write 22"),
        ("22 tcp", "without unit"),
        ("22.5", "whole number"),
        ("true", "whole number"),
        ("0", "at least 1"),
        ("65536", "at most 65535"),
    ],
)
def test_a_number_written_otherwise_is_refused_with_the_fix(complaints: Complaints, text: str, fix: str) -> None:
    [complaint] = complaints(with_box1(f"port: {text}"))
    assert complaint.startswith("8: boxes.box1.port: read ")
    assert fix in complaint


@pytest.mark.parametrize("text", ["1e999", ".inf", ".nan", "-1", "0", "1_000.5"])
def test_a_duration_is_a_finite_positive_number(complaints: Complaints, text: str) -> None:
    [complaint] = complaints(VALID + f"timing: {{drain_seconds: {text}}}\n")
    assert complaint.startswith("19: timing.drain_seconds: read ")


@pytest.mark.parametrize(
    "text", ["525400123456", "52:54:00:12:34:56", "52-54-00-12-34-56", '"52:54:00:12:34:56"', "5254.0012.3456"]
)
def test_macs_stay_text(load: Load, complaints: Complaints, text: str) -> None:
    if "." in text:
        assert "expected a MAC address of six bytes" in complaints(with_box1(f"mac: {text}"))[0]
    else:
        assert load(with_box1(f"mac: {text}")).site.boxes["box1"].mac == "52:54:00:12:34:56"


@pytest.mark.parametrize("text", ["027700000001", "02:77:00:00:00:01", "02:77:00:00:00:01 # note"])
def test_a_mac_with_a_leading_zero(load: Load, text: str) -> None:
    content = VALID.replace(
        "box1: {address: 10.0.0.1, profile: pc}", f"box1:\n    address: 10.0.0.1\n    profile: pc\n    mac: {text}"
    )
    assert load(content).site.boxes["box1"].mac == "02:77:00:00:00:01"


@pytest.mark.parametrize(
    "text", ["52:54:00:12:34", "5254001234567", "52:54:00:12:34:5g", "ff:ff:ff:ff:ff:ff", "1.5", "true"]
)
def test_what_is_no_mac(complaints: Complaints, text: str) -> None:
    [complaint] = complaints(with_box1(f"mac: {text}"))
    assert complaint.startswith("8: boxes.box1.mac: read ")


def test_the_same_box_twice_names_both_lines(complaints: Complaints) -> None:
    content = VALID.replace("  control:", "  box1: {address: 10.0.0.3, profile: pc}\n  control:")
    assert complaints(content) == ["10: boxes.box1 stands here and on line 8: expected it once; rename or delete one"]


def test_the_same_key_twice_names_both_lines(complaints: Complaints) -> None:
    assert complaints(VALID + "site: other\n") == [
        "19: site stands here and on line 1: expected it once; rename or delete one"
    ]


@pytest.mark.parametrize("address", ["10.0.0.1", '"10.0.0.1"'])
def test_two_boxes_with_one_address_names_both_lines(complaints: Complaints, address: str) -> None:
    [complaint] = complaints(VALID.replace("10.0.0.2", address))
    assert complaint == (
        "9: boxes.box2.address: 10.0.0.1 port 22 is also boxes.box1.address on line 8: two boxes cannot share one"
    )


def test_one_address_with_two_ports_is_two_boxes(load: Load) -> None:
    content = VALID.replace("address: 10.0.0.2", "address: 10.0.0.1, port: 2222")
    assert load(content).site.boxes["box2"].port == 2222


def test_spellings_of_one_address_are_one(complaints: Complaints) -> None:
    content = VALID.replace("10.0.0.1", '"fd00::1"').replace("10.0.0.2", '"FD00:0:0:0:0:0:0:1"')
    assert "is also boxes.box1.address on line 8" in complaints(content)[0]


def test_two_boxes_with_one_mac_names_both_lines(complaints: Complaints) -> None:
    content = VALID.replace("address: 10.0.0.1", "mac: 52:54:00:12:34:56, address: 10.0.0.1")
    content = content.replace("address: 10.0.0.2", "mac: 525400123456, address: 10.0.0.2")
    [complaint] = complaints(content)
    assert complaint.startswith("9: boxes.box2.mac: 52:54:00:12:34:56 is also boxes.box1.mac on line 8")


def test_local_boxes_share_an_address(load: Load) -> None:
    content = VALID.replace("10.0.0.1", "127.0.0.1").replace("10.0.0.2", "127.0.0.1").replace("10.0.0.9", "127.0.0.1")
    site = load(content + "box_defaults: {connection: local}\n").site
    assert [box.address for box in site.boxes.values()] == ["127.0.0.1"] * 3
