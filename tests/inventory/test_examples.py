"""The inventories of the repository: documentation, examples and schema test at once."""

from __future__ import annotations

import platform
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from fleet.inventory.loader import load_site
from fleet.inventory.model import Role
from fleet.inventory.reader import read_document
from fleet.inventory.reference import reference_page
from fleet.inventory.schema import keys, sections
from fleet.inventory.sitefile import KeyPath

DIRECTORY = Path(__file__).parents[2] / "inventory"


@pytest.mark.parametrize("name", ["site", "local", "lab"])
def test_every_inventory_of_the_repository_is_right(name: str) -> None:
    site = load_site(DIRECTORY / f"{name}.yaml", resolve_secrets=False)
    assert len(site.boxes_with(Role.STAGE)) >= 3
    assert len(site.boxes_with(Role.GATEWAY)) == 1


def test_the_example_shows_every_section_and_every_key() -> None:
    data = read_document((DIRECTORY / "site.yaml").read_bytes()).data
    shown = {place.replace("box_defaults.", "boxes.NAME.") for place in places(data, ())}
    wanted = {
        f"{section}.{key.name}".lstrip(".") for section, _ in sections() for key in keys() if key.section == section
    }
    finer = {place for place in wanted if place.count(".") == 2 and place.startswith("guards.")}
    assert wanted - finer - shown == set()
    assert len(finer & shown) > 8


def places(data: object, path: tuple[str, ...]) -> list[str]:
    """Every key of data in the notation of the schema: entries of named mappings become NAME, of lists []."""
    found = []
    for key, value in data.items() if isinstance(data, dict) else []:
        here = f"{'.'.join(path)}.{key}".lstrip(".")
        found.append(here)
        found += places(value, (*path, key))
        if isinstance(value, dict):
            found += [place for entry in value.values() for place in places(entry, (*path, key, "NAME"))]
        if isinstance(value, tuple):
            found += [place for entry in value for place in places(entry, (*path, f"{key}[]"))]
    return found


def test_the_example_shows_the_defaults_where_it_says_so() -> None:
    site = load_site(DIRECTORY / "site.yaml", resolve_secrets=False).site
    for section in (site.ports, site.rollout, site.timing, site.guards):
        assert section == type(section)()
    assert site.gateway.model_copy(update={"api_keys": ()}) == type(site.gateway)()


def test_the_example_is_a_site_of_five_unlike_boxes() -> None:
    site = load_site(DIRECTORY / "site.yaml", resolve_secrets=False)
    assert [site.target_of(box) for box in site.site.boxes] == [
        ("aarch64", "3.10"),
        ("aarch64", "3.11"),
        ("aarch64", "3.11"),
        ("aarch64", "3.11"),
        ("x86_64", "3.11"),
    ]
    assert site.site.boxes["ipc-1"].roles == (Role.COORDINATOR, Role.GATEWAY, Role.MONITOR)
    assert site.site.pipelines["replica"].engine.kind == "external"


def test_the_example_is_plain_yaml_too() -> None:
    """PyYAML's own reader sees the same values: nothing in the example hangs on our rules, except for the secrets."""

    class Plain(yaml.SafeLoader):
        pass

    Plain.add_multi_constructor("!", lambda loader, suffix, node: f"!{suffix} {node.value}")
    plain: dict[str, Any] = yaml.load((DIRECTORY / "site.yaml").read_text(encoding="utf-8"), Plain)  # noqa: S506
    site = load_site(DIRECTORY / "site.yaml", resolve_secrets=False).site.model_dump(mode="json")
    for name, box in plain["boxes"].items():
        merged = {**plain["box_defaults"], **box}
        assert {key: site["boxes"][name][key] for key in merged} == merged
    for section in ("device_profiles", "models", "pipelines"):
        for name, entry in plain[section].items():
            for key, value in entry.items():
                seen = site[section][name][key]
                assert (seen if not isinstance(value, dict) else {part: seen[part] for part in value}) == value
    assert plain["gateway"] == site["gateway"]


def test_the_local_site_is_this_machine() -> None:
    site = load_site(DIRECTORY / "local.yaml")
    running = f"{sys.version_info.major}.{sys.version_info.minor}"
    assert {site.target_of(box) for box in site.site.boxes} == {(platform.machine(), running)}
    assert site.prefix_of("box1") == str(DIRECTORY.parent / "build" / "demo" / "box1")
    assert site.state_directory == DIRECTORY.parent / "build" / "state" / "local"
    assert site.site.pipelines["main"].boxes == ("box1", "box2", "box3")
    assert site.boxes_with(Role.COORDINATOR) == ("control",)


def test_the_lab_site_is_like_the_local_one_over_ssh() -> None:
    lab, local = load_site(DIRECTORY / "lab.yaml"), load_site(DIRECTORY / "local.yaml")
    assert list(lab.site.boxes) == list(local.site.boxes)
    assert lab.site.models == local.site.models
    assert lab.site.pipelines == local.site.pipelines
    assert {box.address for box in lab.site.boxes.values()} == {f"10.77.0.{number}" for number in (11, 12, 13, 14)}
    assert {box.connection for box in lab.site.boxes.values()} == {"ssh"}
    assert lab.prefix_of("box1") == "/opt/fleet"


def test_every_key_has_a_line() -> None:
    loaded = load_site(DIRECTORY / "local.yaml")
    text = (DIRECTORY / "local.yaml").read_text(encoding="utf-8").splitlines()
    path: KeyPath = ("models", "smollm2-135m", "source", "python_package")
    assert "python_package: " in text[loaded.lines[path] - 1]
    assert "connection: local" in text[loaded.lines[("boxes", "box2", "connection")] - 1]
    assert "[box1, box2, box3]" in text[loaded.lines[("pipelines", "main", "boxes", 2)] - 1]


def test_the_reference_page_names_every_field() -> None:
    page = reference_page()
    for path, section in sections():
        part = page.split(f"\n## {f'`{path}`' if path else 'Top level'}\n")[1].split("\n## ")[0]
        assert (section.__doc__ or "").splitlines()[0] in part
        for name, info in section.model_fields.items():
            assert info.description, f"{section.__name__}.{name} has no description"
            [row] = [row for row in part.splitlines() if row.startswith(f"| `{name}` |")]
            assert info.description in row.replace("\\|", "|")
            assert ("must be there" in row) == info.is_required()


def test_the_reference_page_says_types_and_defaults() -> None:
    page = reference_page()
    for row in (
        "| `port` | whole number, at least 1, at most 65535 | `22` | ssh port |",
        "| `connection` | ssh or local | `ssh` | local: directories on this machine, no root |",
        "| `roles` | list of one of stage, coordinator, gateway, monitor | `[stage]` | what runs on it |",
        '| `python` | text | `"3.11"` |',
        "| `key` | !env VARIABLE or !file PATH | must be there |",
        "| `forks` | whole number, at least 1, at most 256 | `10` | boxes worked on at once |",
        "| `boxes` | mapping of name to section | must be there |",
    ):
        assert row in page
