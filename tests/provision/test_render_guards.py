"""`etc/guards.json`: what every box's guards are told is what `guards.config` reads."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from fleet import RELEASED_UNIX_SECONDS
from fleet.errors import FleetError
from fleet.inventory.guards import Guards
from fleet.inventory.loader import load_site
from fleet.provision.ports import choose_ports
from fleet.provision.render import RenderInputs, render
from fleet.provision.render_etc import SiteView, guards_config, pipeline_of, to_bytes
from fleet.provision.render_layout import layout_of
from guards.assembly import house_of
from guards.config import GuardsConfig, load_config
from guards.roots import Roots
from guards.settings import GuardSettings
from tests.provision.sites import etc, make_inputs, write_bundle, write_site

INVENTORIES = sorted((Path(__file__).resolve().parents[2] / "inventory").glob("*.yaml"))
FIELDS = {
    (part.name, setting.name): setting.default
    for part in dataclasses.fields(GuardSettings)
    for setting in dataclasses.fields(type(getattr(GuardSettings(), part.name)))
}


def read_back(directory: Path, document: dict[str, object]) -> GuardsConfig:
    file = directory / "guards.json"
    file.write_bytes(to_bytes(document))
    return load_config(file)


def test_a_stage_box(inputs: RenderInputs, tmp_path: Path) -> None:
    config = read_back(tmp_path, etc(render(inputs, "box2"), "guards.json"))
    assert (config.site, config.box, config.listen.port) == ("small", "box2", 7404)
    assert [program.name for program in config.programs] == ["stage"]
    assert config.programs[0].admin_socket == Path("/run/fleet/stage.sock")
    assert config.stage is not None
    assert (config.stage.admin_socket, config.stage.pipeline) == (Path("/run/fleet/stage.sock"), "main")
    assert config.coordinator is not None
    coordinator = config.coordinator
    assert (coordinator.box, coordinator.host, coordinator.port) == ("control", "10.77.0.14", 7405)
    assert config.state_directory == Path("/opt/fleet/state/guards")
    assert config.build_unix_seconds == RELEASED_UNIX_SECONDS
    assert config.stop_seconds == 35.0  # of the programs: drain_seconds and a margin
    assert config.settings == GuardSettings()
    assert config.observe is False


def test_the_control_box_has_guards_without_a_stage(inputs: RenderInputs, tmp_path: Path) -> None:
    config = read_back(tmp_path, etc(render(inputs, "control"), "guards.json"))
    coordinator, gateway = config.programs
    assert (config.stage, config.coordinator) == (None, None)
    assert coordinator.https is not None
    assert gateway.http is not None
    assert (coordinator.https.host, coordinator.https.port) == ("127.0.0.1", 7405)
    assert (gateway.http.host, gateway.http.port) == ("127.0.0.1", 8080)


def test_a_box_that_is_a_gateway_alone(tmp_path: Path) -> None:
    site_file = write_site(tmp_path)
    text = site_file.file.read_text().replace("roles: [coordinator, gateway]", "roles: [gateway]")
    site_file.file.write_text(text.replace("box3: {", "box3: {roles: [stage, coordinator], "))
    site_file = load_site(site_file.file)
    inputs = make_inputs(site_file, write_bundle(site_file))
    config = read_back(tmp_path, etc(render(inputs, "control"), "guards.json"))
    assert config.stage is None
    assert [program.name for program in config.programs] == ["gateway"]
    state = render(inputs, "control")
    (guards,) = [program for program in state.programs if program.name == "guards"]
    assert (guards.health_socket, guards.serves) == (None, False)
    both = read_back(tmp_path, etc(render(inputs, "box3"), "guards.json"))
    assert [program.name for program in both.programs] == ["stage", "coordinator"]


@pytest.mark.parametrize("file", INVENTORIES, ids=lambda path: path.stem)
def test_guards_of_every_box_of_every_example_start_with_it(file: Path, tmp_path: Path) -> None:
    """What runs there is made up for each box; guards are put together of it, each with its budgets."""
    site_file = load_site(file, resolve_secrets=False)
    ports = choose_ports(site_file, {}, lambda port: True)
    view = SiteView(site_file, {}, ports)
    for box in site_file.site.boxes:
        layout = layout_of(site_file, box, 1000)
        pipeline = pipeline_of(site_file, box)
        programs = [name for name in ("stage", "coordinator", "gateway") if name in site_file.site.boxes[box].roles]
        document = guards_config(view, box, pipeline=pipeline, programs=programs, layout=layout)
        config = read_back(tmp_path, document)
        config = dataclasses.replace(config, state_directory=tmp_path / box)
        house = house_of(config, Roots())
        assert not house.observe
        assert all(f"restart-{name}" in house.keeper.left() for name in programs)
    local = [ports[box].guards for box in ports if site_file.site.boxes[box].connection == "local"]
    assert len(set(local)) == len(local)


def test_in_local_mode_the_machine_is_left_alone(local_inputs: RenderInputs, tmp_path: Path) -> None:
    config = read_back(tmp_path, etc(render(local_inputs, "box1"), "guards.json"))
    assert config.settings.clock.corrections_per_day == 0
    assert (config.link_mbit_per_second, config.mac) == (0.0, None)
    assert config.listen.host == "127.0.0.1"
    ports = [dataclasses.asdict(ports) for ports in local_inputs.ports.values()]
    used = [port for each in ports for port in each.values() if port]
    assert len(set(used)) == len(used)


@given(
    changes=st.dictionaries(
        st.sampled_from(sorted(FIELDS)), st.floats(0, 2e9) | st.integers(0, 200) | st.just(0.05), max_size=6
    ),
    observe=st.booleans(),
)
@hypothesis_settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.filter_too_much], deadline=None
)
def test_settings_that_the_inventory_takes_arrive_as_they_are(
    inputs: RenderInputs, tmp_path: Path, changes: dict[tuple[str, str], float], observe: bool
) -> None:
    section: dict[str, Any] = {"observe": observe}
    for (part, name), value in changes.items():
        section.setdefault(part, {})[name] = value
    file = tmp_path / "given.yaml"
    file.write_text(inputs.site_file.file.read_text() + f"guards: {json.dumps(section)}\n")
    try:
        site_file = load_site(file)
    except FleetError as error:
        assert f"{file}:" in error.message
        assume(False)
    view = SiteView(site_file, inputs.specs, inputs.ports)
    layout = layout_of(site_file, "box1", 1000)
    document = guards_config(view, "box1", pipeline="main", programs=["stage"], layout=layout)
    config = read_back(tmp_path, document)
    assert config.observe is observe
    for (part, name), default in FIELDS.items():
        assert getattr(getattr(config.settings, part), name) == changes.get((part, name), default)


def test_every_setting_is_a_key_of_the_inventory_with_its_description() -> None:
    for part in dataclasses.fields(GuardSettings):
        section = Guards.model_fields[part.name].annotation
        assert section is not None
        settings = dataclasses.fields(type(getattr(GuardSettings(), part.name)))
        assert {setting.name: setting.metadata["description"] for setting in settings} == {
            name: info.description for name, info in section.model_fields.items()
        }
