"""What a box shall look like: a golden state, and rules that hold for every box."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fleet.errors import FleetError
from fleet.inventory.loader import load_site
from fleet.provision.desired import DesiredState
from fleet.provision.render import RenderInputs, render, threads_of
from fleet.provision.render_etc import external_pipelines
from fleet.provision.render_layout import alternative_names
from tests.provision.sites import etc, make_inputs, make_specs, release_file, write_bundle, write_site


def test_a_stage_box_and_the_control_box_have_what_their_roles_need(inputs: RenderInputs) -> None:
    stage, control = render(inputs, "box1"), render(inputs, "control")
    assert [program.name for program in stage.programs] == ["stage", "guards"]
    assert [program.name for program in control.programs] == ["coordinator", "gateway", "guards"]
    assert [len(environment.wheels) for environment in stage.environments] == [2]
    assert [name for name, _ in control.environments[0].wheels] == ["supervisor-1.0-py3-none-any.whl"]

    def model_files(state: DesiredState) -> list[str]:
        trees = [tree for tree in state.trees if "/models/" in tree.path]
        return [Path(file.path).name for tree in trees for file in tree.files]

    weights = ["embedding.safetensors", "layer-000.safetensors"]
    assert [name for name in model_files(stage) if name in weights] == weights
    assert model_files(control) == ["chat_template.jinja", "model.json", "tokenizer.json"]


def test_requirements_are_pinned_by_hash(inputs: RenderInputs) -> None:
    environment = render(inputs, "box1").environments[0]
    lines = environment.requirements.splitlines()
    assert lines == [
        f"{name}==1.0 --hash=sha256:{content.sha256}"
        for name, content in sorted((file.split("-")[0], content) for file, content in environment.wheels)
    ]


def test_owners_and_modes_over_ssh(inputs: RenderInputs) -> None:
    state = render(inputs, "control")
    directories = {spec.path: (spec.mode, spec.owner) for spec in state.directories}
    assert directories["/opt/fleet"] == (0o755, "root")
    assert directories["/opt/fleet/pki"] == (0o700, "fleet")
    assert directories["/opt/fleet/state"] == (0o750, "fleet")
    assert directories["/opt/fleet/state/coordinator"] == (0o700, "fleet")
    assert directories["/opt/fleet/state/journal"] == (0o700, "fleet")
    assert {spec.path: spec.mode for spec in render(inputs, "box1").directories}["/opt/fleet/state/stage"] == 0o700
    keys = next(file for file in state.files if file.path.endswith("api_keys.json"))
    assert (keys.mode, keys.owner, keys.secret) == (0o600, "fleet", True)
    assert state.packages == ("openssl", "python3-venv")
    assert "/etc/systemd/system/fleet-supervisord.service" in {file.path for file in state.files}


def test_every_path_lies_below_the_prefix_but_logs_and_the_unit(inputs: RenderInputs) -> None:
    state = render(inputs, "box1")
    paths = [spec.path for spec in (*state.directories, *state.files, *state.trees, *state.environments, *state.links)]
    outside = [path for path in paths if path != "/opt/fleet" and not path.startswith("/opt/fleet/")]
    assert outside == ["/var/log/fleet", "/etc/systemd/system/fleet-supervisord.service"]


def test_no_secret_is_in_a_release(inputs: RenderInputs) -> None:
    marked = replace(inputs, api_keys=b'{"schema": 1, "keys": [{"name": "x", "sha256": "SECRETDIGEST"}]}')
    state = render(marked, "control")
    shown = [file for tree in state.trees for file in tree.files] + [file for file in state.files if not file.secret]
    assert all(b"SECRETDIGEST" not in (file.content.data or b"") for file in shown)


@pytest.mark.parametrize("connection", ["ssh", "local"])
@pytest.mark.parametrize("box", ["box1", "box3", "control"])
def test_equal_inputs_give_equal_states(tmp_path: Path, connection: str, box: str) -> None:
    site_file = write_site(tmp_path, connection=connection)
    states = [render(make_inputs(site_file, write_bundle(site_file)), box) for _ in range(2)]
    assert states[0] == states[1]


def test_local_boxes_need_no_root_and_share_the_machine(tmp_path: Path) -> None:
    long = tmp_path / ("d" * 75) / ("e" * 75)
    long.mkdir(parents=True)
    site_file = write_site(long, connection="local")
    inputs = make_inputs(site_file, write_bundle(site_file))
    state = render(inputs, "box1")
    assert (state.privileged, state.user, state.supervisor.unit, state.packages) == (False, None, None, ())
    assert state.supervisor.socket.startswith("/tmp/fleet-1000-")
    assert len(state.supervisor.socket) < 100
    assert {"box1", "box2"} == {
        path.rsplit("/", 2)[-2] for path in (state.supervisor.socket, render(inputs, "box2").supervisor.socket)
    }
    run = [spec for spec in state.directories if spec.path.startswith("/tmp/fleet-1000-")]
    assert [spec.mode for spec in run] == [0o700, 0o700]
    assert etc(state, "stage.json")["ring"] == {"host": "127.0.0.1", "port": 7401}
    assert etc(render(inputs, "box2"), "stage.json")["ring"] != etc(state, "stage.json")["ring"]


def test_threads_are_declared_measured_or_shared(tmp_path: Path) -> None:
    remote = write_site(tmp_path)
    inputs = make_inputs(remote, write_bundle(remote))
    assert [threads_of(inputs, box) for box in ("box1", "box2", "box3")] == [8, 4, 3]
    local = write_site(tmp_path, connection="local")
    shared = make_inputs(local, write_bundle(local))
    assert [threads_of(shared, box) for box in ("box1", "box2", "box3")] == [2, 1, 3]


@given(cores=st.integers(1, 512))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_co_located_stages_share_the_cores_and_get_at_least_one_each(local_inputs: RenderInputs, cores: int) -> None:
    given_cores = replace(local_inputs, cores={"box1": cores, "box2": cores})
    threads = [threads_of(given_cores, box) for box in ("box1", "box2")]
    assert min(threads) >= 1
    assert threads[0] == threads[1]
    assert threads[0] * 3 <= max(cores, 3)


def fingerprints(inputs: RenderInputs) -> dict[str, str]:
    return {
        f"{box}/{program.name}": program.fingerprint
        for box in inputs.site_file.site.boxes
        for program in render(inputs, box).programs
    }


def with_text(inputs: RenderInputs, old: str, new: str) -> RenderInputs:
    """The inputs with another inventory text."""
    file = inputs.site_file.file
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new))
    site_file = load_site(file)
    file.write_text(text)
    return replace(inputs, site_file=site_file, bundle=replace(inputs.bundle, site_file=site_file))


def test_programs_restart_for_what_concerns_them_and_for_nothing_else(inputs: RenderInputs) -> None:
    before = fingerprints(inputs)

    def changed(other: RenderInputs) -> set[str]:
        after = fingerprints(other)
        return {name for name in after if after[name] != before[name]}

    stages = {"box1/stage", "box2/stage", "box3/stage"}
    guards = {f"{box}/guards" for box in inputs.site_file.site.boxes}
    assert changed(inputs) == set()
    assert changed(replace(inputs, api_keys=b"other")) == {"control/gateway"}
    specs = make_specs(inputs.site_file, layers=7)  # another split follows from it: the coordinator's business alone
    assert changed(replace(inputs, specs=specs)) == {"control/coordinator"}
    moved = with_text(inputs, "10.77.0.12", "10.77.0.99")
    assert changed(moved) == {"control/coordinator"}
    explicit = with_text(inputs, "boxes: [box1, box2, box3],", "boxes: [box1, box3, box2],")
    assert changed(replace(explicit, specs=make_specs(explicit.site_file))) == {"control/coordinator"}
    assert changed(with_text(inputs, "10.77.0.14", "10.77.0.99")) == {
        *(*stages, "control/gateway"),
        *(guards - {"control/guards"}),  # whom they ask for leases
    }
    assert changed(replace(inputs, cores={"box1": 7, "box2": 4})) == {"box1/stage"}
    cooler = with_text(inputs, "models:\n", "guards: {thermal: {high_celsius: 75}}\nmodels:\n")
    assert changed(cooler) == guards  # and no stage
    assert changed(replace(inputs, ca_sha256="d" * 64)) == set(before)
    library = replace(inputs.library, digest="e" * 64)
    assert changed(replace(inputs, library=library)) == set(before)


def test_a_spare_box_gets_a_stage_and_a_box_of_no_pipeline_none(tmp_path: Path) -> None:
    site_file = write_site(tmp_path)
    text = site_file.file.read_text().replace("boxes: [box1, box2, box3]", "boxes: [box1, box2]")
    site_file.file.write_text(text)
    shorter = load_site(site_file.file)
    inputs = make_inputs(shorter, write_bundle(shorter))
    assert [program.name for program in render(inputs, "box2").programs] == ["stage", "guards"]
    assert [program.name for program in render(inputs, "box3").programs] == ["guards"]
    assert [tree.path for tree in render(inputs, "box3").trees if "/models/" in tree.path] == []


def test_an_external_engine_is_not_ours_to_run(tmp_path: Path) -> None:
    site_file = write_site(tmp_path)
    engine = "{kind: external, command: /bin/server, health_url: 'http://127.0.0.1:1/'}"
    pipeline = f"  other: {{model: small, boxes: [box3], engine: {engine}}}\n"
    text = site_file.file.read_text().replace("boxes: [box1, box2, box3]", "boxes: [box1, box2]")
    site_file.file.write_text(text + pipeline)
    site_file = load_site(site_file.file)
    inputs = make_inputs(site_file, write_bundle(site_file))
    assert external_pipelines(site_file) == ("other",)
    assert [program.name for program in render(inputs, "box3").programs] == ["guards"]


def test_of_ours_a_site_of_external_engines_runs_guards_alone(tmp_path: Path) -> None:
    site_file = write_site(tmp_path)
    engine = "boxes: [box1], engine: {kind: external, command: /bin/server, health_url: 'http://127.0.0.1:1/'}"
    text = site_file.file.read_text().replace("boxes: [box1, box2, box3]", engine)
    site_file.file.write_text(text.replace("[coordinator, gateway]", "[gateway]"))
    site_file = load_site(site_file.file)
    inputs = make_inputs(site_file, write_bundle(site_file))
    programs = [program.name for box in site_file.site.boxes for program in render(inputs, box).programs]
    assert programs == ["guards"] * 4


def test_alternative_names() -> None:
    assert alternative_names("lab", "box1", "10.0.0.1") == (
        "DNS:box1.lab.fleet.internal",
        "IP:10.0.0.1",
        "DNS:localhost",
        "IP:127.0.0.1",
    )
    assert alternative_names("lab", "box1", "pi.example")[1] == "DNS:pi.example"
    assert alternative_names("lab", "box1", "127.0.0.1").count("IP:127.0.0.1") == 1
    assert alternative_names("lab", "box1", "fd00::1")[1] == "IP:fd00::1"


def test_a_bundle_of_another_inventory_is_refused(tmp_path: Path) -> None:
    site_file = write_site(tmp_path)
    bundle = write_bundle(site_file)
    bundle.check()
    with pytest.raises(FleetError, match="site other"):
        replace(bundle, manifest=replace(bundle.manifest, site="other")).check()
    with pytest.raises(FleetError, match=r"box1: .*no wheels for linux_x86_64-cp311"):
        replace(bundle, manifest=replace(bundle.manifest, targets={})).check()
    with pytest.raises(FleetError, match="lacks the model small") as caught:
        replace(bundle, manifest=replace(bundle.manifest, models={})).check()
    assert caught.value.hint == f"fleet bundle {site_file.file}"
    bundle.wheel_path.write_bytes(b"cut")
    with pytest.raises(FleetError, match="has 3 bytes, expected"):
        bundle.check()


@pytest.mark.parametrize("box", ["box1", "control"])
def test_the_whole_state_of_a_box_is_the_golden_one(inputs: RenderInputs, box: str) -> None:
    """Paths, modes, owners and generated texts; digests of directories' names are left out, they follow from these."""
    state = render(inputs, box)
    names = {state.links[0].target: "RELEASE", state.environments[0].path: "/opt/fleet/envs/LOCK"}
    lines = [f"{spec.path} {spec.mode:04o} {spec.owner}:{spec.group}" for spec in state.directories]
    for file in (*state.files, *(file for tree in state.trees for file in tree.files)):
        lines.append(f"{file.path} {file.mode:04o} {file.owner}:{file.group}")
    texts = [file for file in state.files if file.path.endswith(".service")]
    for file in (*texts, release_file(state, "supervisord.conf")):
        lines += [f"== {file.path}", (file.content.data or b"").decode()]
    text = "\n".join(lines)
    for name, stands_for in names.items():
        text = text.replace(name, stands_for)
    golden = Path(__file__).parent / "golden" / f"{box}.txt"
    assert text == golden.read_text(), f"if this change is meant, write {golden} anew from the text above"
