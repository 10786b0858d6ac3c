"""Rules between the keys of a site: each says where, what was read, and what to write."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from fleet.inventory.sitefile import SiteFile
from tests.inventory.conftest import VALID

Load = Callable[..., SiteFile]
Complaints = Callable[..., list[str]]


RULES = yaml.safe_load((Path(__file__).parent / "golden" / "rules.yaml").read_text(encoding="utf-8"))


@pytest.mark.parametrize("rule", RULES, ids=[rule["says"] for rule in RULES])
def test_one_rule_broken(complaints: Complaints, rule: dict[str, str]) -> None:
    content = VALID.replace(rule["replace"], rule["with"], 1) if "replace" in rule else VALID + rule["append"]
    assert content != VALID
    found = complaints(content, resolve_secrets=False)
    assert any(line.startswith(rule["says"]) for line in found), found


def test_every_stage_box_without_torch_is_named(complaints: Complaints) -> None:
    found = complaints(VALID.replace('    torch: {version: "2.13.0"}\n', ""))
    assert [line.split(":")[:2] for line in found] == [["7", " boxes.box1.profile"], ["8", " boxes.box2.profile"]]


@pytest.mark.parametrize(
    "layers", ["{box1: 0-14, box2: 15-29}", "{box2: 1-1, box1: 0-0}", '{box1: "0-3", box2: "4-9"}']
)
def test_explicit_layers(load: Load, layers: str) -> None:
    assert load(VALID + f"    layers: {layers}\n").site.pipelines["main"].layers != "auto"


EXTERNAL = "engine: {kind: external, command: llama-server, health_url: http://127.0.0.1:8081/health}"


def test_an_external_engine_needs_no_torch(load: Load) -> None:
    content = VALID.replace('    torch: {version: "2.13.0"}\n', "").replace("[box1, box2]", "[box1]")
    content = content.replace(
        "box2: {address: 10.0.0.2, profile: pc}", "box2: {address: 10.0.0.2, profile: pc, roles: [monitor]}"
    )
    assert load(content + f"    {EXTERNAL}\n").site.pipelines["main"].engine.kind == "external"


@pytest.mark.parametrize(
    ("key", "value", "complaint"),
    [
        ("address", "10.0.0.5:22", "expected an address without a port; write address: 10.0.0.5 and port: 22"),
        ("address", "pi@10.0.0.5", "expected an address without a user; write address: 10.0.0.5 and user: pi"),
        ("address", "10.0.0.256", "expected an IP address or a host name"),
        ("address", "10.0.0.05", "expected an IP address or a host name"),
        ("address", "10.5", 'read the number 10.5: expected text: write "10.5"'),
        ("address", "-oProxyCommand=x", "expected an IP address or a host name"),
        ("address", "''", "expected an IP address or a host name"),
        ("user", "-l", "expected the name of a Unix user"),
        ("jump", "a b", "expected [user@]host[:port]"),
        ("jump", "-oX", "expected [user@]host[:port]"),
        ("jump", "pi@gate:70000", "expected [user@]host[:port]"),
        ("jump", "'gate,'", "expected [user@]host[:port]"),
        ("roles", "[stage, gatway]", 'expected one of stage, coordinator, gateway, monitor; did you mean "gateway"?'),
        ("roles", "stage", "expected a list: write [stage]"),
        ("connection", "SSH", 'expected one of ssh, local; did you mean "ssh"?'),
        ("labels", "{'a b': c}", "expected a label: letters, digits"),
        ("labels", "{a: 'b,c'}", "expected at most 256 characters without a comma"),
        ("profile", "PC", "expected a name: small letters, digits and hyphens"),
        ("threads", "0", "expected at least 1"),
    ],
)
def test_values_of_a_box(complaints: Complaints, key: str, value: str, complaint: str) -> None:
    box = {"address": "10.0.0.1", "profile": "pc", key: value}
    content = "{" + ", ".join(f"{name}: {text}" for name, text in box.items()) + "}"
    found = complaints(VALID.replace("{address: 10.0.0.1, profile: pc}", content))
    assert found[0].startswith(f"8: boxes.box1.{key}")
    assert complaint in found[0]


@pytest.mark.parametrize("value", ["gate", "pi@gate:2222", "'a,pi@b:22,[fd00::1]:22'", "none", "10.0.0.254"])
def test_jump_hosts(load: Load, value: str) -> None:
    content = VALID.replace("{address: 10.0.0.1,", f"{{jump: {value}, address: 10.0.0.1,")
    assert load(content).site.boxes["box1"].jump == value.strip("'")


@pytest.mark.parametrize("address", ["box-1.plant.example", "'fd00::12'", "pi_1", "NO"])
def test_addresses(load: Load, address: str) -> None:
    assert load(VALID.replace("10.0.0.1", address)).site.boxes["box1"].address == address.strip("'")


@pytest.mark.parametrize(
    ("text", "fix"),
    [
        ("3.9", 'write "3.9"'),
        ('"3.9"', 'Python "3.10" or newer'),
        ('"3.11.2"', "major and minor version of Python"),
        ('"2.7"', "major and minor version of Python"),
    ],
)
def test_python_versions(complaints: Complaints, text: str, fix: str) -> None:
    [complaint] = complaints(VALID.replace('"3.11"', text))
    assert complaint.startswith("5: device_profiles.pc.python: read ")
    assert fix in complaint


def test_package_names(complaints: Complaints) -> None:
    content = VALID.replace('python: "3.11"', 'python: "3.11"\n    packages: [sudo, "-y", Python3]')
    assert [line.split(":")[1].strip() for line in complaints(content)] == [
        "device_profiles.pc.packages[1]",
        "device_profiles.pc.packages[2]",
    ]


@pytest.mark.parametrize("section", ["device_profiles", "boxes", "models", "pipelines"])
def test_missing_sections(complaints: Complaints, section: str) -> None:
    lines, keep = [], True
    for line in VALID.splitlines():
        keep = not line.startswith(section) if not line.startswith(" ") else keep
        lines += [line] if keep else []
    assert any(f"{section} is missing: write {section}: …" in line for line in complaints("\n".join(lines)))


def test_sections_that_are_empty(complaints: Complaints) -> None:
    [complaint] = complaints(VALID[: VALID.index("pipelines:")] + "pipelines:\n")
    assert complaint.startswith("15: pipelines: read nothing: nothing stands here; write a value")
    [complaint] = complaints(VALID[: VALID.index("pipelines:")] + "pipelines: {}\n")
    assert complaint.startswith("15: pipelines: read a mapping: expected at least one")
