"""Small decisions of a run: ports, keys, gate, what a box must have before it is written to."""

from __future__ import annotations

import hashlib
import json
import socket
import stat
import zipfile
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleet.errors import ExitCode, FleetError
from fleet.provision.diff import Change
from fleet.provision.facts import Facts, SystemFact
from fleet.provision.pki import ensure_authority
from fleet.provision.ports import BoxPorts, choose_ports, is_free, site_ports
from fleet.provision.release import digest_of, read_library
from fleet.provision.render import render
from fleet.provision.render_layout import check_local_prefix
from fleet.provision.rollout import gate_skipped
from fleet.provision.rollout_checks import check_box
from fleet.provision.rollout_down import require_local
from fleet.provision.rollout_state import (
    api_keys_file,
    client_key,
    endpoints,
    known_cores,
    last_failures,
    remember_failures,
)
from fleet.provision.state_directory import read_json, site_lock, write_private
from fleet.ssh.results import BoxError, HostResult, HostStatus
from tests.provision.sites import make_inputs, write_bundle, write_site

NO_PORTS = asdict(BoxPorts())


def test_local_ports_are_apart_and_a_second_run_keeps_them(tmp_path: Path) -> None:
    names = ("ring", "metrics", "gateway", "gateway_loopback", "coordinator", "coordinator_http", "guards")
    wanted = ", ".join(f"{name}: {21401 + 100 * index}" for index, name in enumerate(names))  # used by no one else
    numbers = f"ports: {{{wanted}}}\n"
    site_file = write_site(tmp_path, connection="local", more=numbers)
    first = site_ports(site_file, keep=True)
    used = [port for ports in first.values() for port in asdict(ports).values() if port]
    assert len(used) == 2 * 3 + 4 + 4  # guards are on every box
    assert len(set(used)) == len(used)
    with socket.socket() as busy:  # what it took is busy while the site runs, and stays its own
        busy.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        busy.bind(("127.0.0.1", first["box1"].ring))
        busy.listen()
        assert not is_free(first["box1"].ring)
        assert site_ports(site_file, keep=True) == first


def test_a_box_that_gets_another_role_gets_its_ports(tmp_path: Path) -> None:
    site_file = write_site(tmp_path, connection="local")
    first = choose_ports(site_file, {}, lambda port: True)
    known = {name: replace(ports, ring=0) if name == "box2" else ports for name, ports in first.items()}
    second = choose_ports(site_file, known, lambda port: True)
    assert second["box2"].ring not in {0, first["box1"].ring, first["box2"].metrics}
    assert {name: second[name] for name in ("box1", "box3", "control")} == {
        name: first[name] for name in ("box1", "box3", "control")
    }


def test_ports_of_an_older_version_are_kept_and_the_new_ones_added(tmp_path: Path) -> None:
    site_file = write_site(tmp_path, connection="local")
    old = {"ring": 0, "metrics": 0, "gateway": 28443, "gateway_loopback": 28080}
    stages = {f"box{number}": {**old, "ring": 27000 + number, "metrics": 27010 + number} for number in (1, 2, 3)}
    known = {"schema": 1, "boxes": {**{name: {**p, "gateway": 0} for name, p in stages.items()}, "control": old}}
    write_private(site_file.state_directory / "ports.json", json.dumps(known).encode())
    ports = site_ports(site_file, keep=True)
    assert (ports["box2"].ring, ports["box2"].metrics, ports["control"].gateway) == (27002, 27012, 28443)
    assert ports["control"].coordinator
    assert len({ports[name].guards for name in ports} - {0}) == len(ports)
    assert ports["control"].coordinator_http not in {0, ports["control"].coordinator}
    assert site_ports(site_file, keep=False) == ports


def test_a_busy_port_is_passed_over(tmp_path: Path) -> None:
    site_file = write_site(tmp_path, connection="local")
    ports = choose_ports(site_file, {}, lambda port: port != 7401)
    assert [ports[box].ring for box in ("box1", "box2")] == [7402, 7405]
    assert (ports["box1"].metrics, ports["box1"].guards, ports["control"].coordinator) == (7403, 7404, 7411)


def test_no_free_port_is_an_error_with_numbers(tmp_path: Path) -> None:
    site_file = write_site(tmp_path, connection="local")
    with pytest.raises(FleetError, match="no free port from 7401 to 8400"):
        choose_ports(site_file, {}, lambda port: False)


def test_looking_keeps_no_ports(tmp_path: Path) -> None:
    site_file = write_site(tmp_path, connection="local")
    site_ports(site_file, keep=False)
    assert not site_file.state_directory.exists()


def test_ssh_boxes_take_the_inventorys_ports(tmp_path: Path) -> None:
    site_file = write_site(tmp_path, more="ports: {ring: 9000}\n")
    ports = site_ports(site_file, keep=True)
    assert [asdict(ports[box]) for box in ("box1", "control")] == [
        {**NO_PORTS, "ring": 9000, "metrics": 7403, "guards": 7404},
        {
            **NO_PORTS,
            **{
                "gateway": 8443,
                "gateway_loopback": 8080,
                "coordinator": 7402,
                "coordinator_http": 7405,
                "guards": 7404,
            },
        },
    ]
    assert not (site_file.state_directory / "ports.json").exists()


def test_a_key_is_generated_once_and_only_its_digest_travels(tmp_path: Path) -> None:
    site_file = write_site(tmp_path)
    assert client_key(site_file, create=False) is None
    key = client_key(site_file, create=True)
    assert key == client_key(site_file, create=True)
    assert key is not None
    assert stat.S_IMODE((site_file.state_directory / "api_key").stat().st_mode) == 0o600
    data = api_keys_file(site_file, key)
    assert key.encode() not in data
    assert [entry["name"] for entry in json.loads(data)["keys"]] == ["default"]


def test_the_inventorys_keys_are_used_when_there_are_any(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_KEY", "sesame")
    site_file = write_site(tmp_path, more="gateway: {api_keys: [{name: app, key: !env SOME_KEY}]}\n")
    assert client_key(site_file, create=True) == "sesame"
    assert not (site_file.state_directory / "api_key").exists()
    keys = json.loads(api_keys_file(site_file, "sesame"))["keys"]
    assert keys == [{"name": "app", "sha256": hashlib.sha256(b"sesame").hexdigest()}]


def test_endpoints(tmp_path: Path) -> None:
    remote = write_site(tmp_path)
    found = endpoints(remote, site_ports(remote, keep=False))
    assert found["gateway"] == {"host": "10.77.0.14", "port": 8443, "server_name": "control.small.fleet.internal"}
    assert found["gateway_loopback"] is None
    assert found["coordinator"] == {"host": "10.77.0.14", "port": 7405, "server_name": "control.small.fleet.internal"}
    assert found["stages"]["box1"] == {"host": "10.77.0.11", "port": 7403, "server_name": "box1.small.fleet.internal"}
    assert list(found["guards"]) == ["box1", "box2", "box3", "control"]
    assert found["guards"]["box2"] == {"host": "10.77.0.12", "port": 7404, "server_name": "box2.small.fleet.internal"}
    local = write_site(tmp_path, connection="local")
    ports = choose_ports(local, {}, lambda port: True)
    loopback = endpoints(local, ports)["gateway_loopback"]
    assert loopback == {"host": "127.0.0.1", "port": ports["control"].gateway_loopback}


BOXES = ("box1", "box2", "box3", "control")


@pytest.mark.parametrize(
    ("boxes", "bad", "check", "message"),
    [
        (BOXES, None, False, ""),
        (BOXES, None, True, "--check changes nothing"),
        (BOXES[:2], None, False, "left out box3, control"),
        (BOXES, HostStatus.UNREACHABLE, False, "box2 unreachable"),
        (BOXES, HostStatus.FAILED, False, "box2 failed"),
    ],
)
def test_when_the_gate_is_skipped(
    tmp_path: Path, boxes: tuple[str, ...], bad: HostStatus | None, check: bool, message: str
) -> None:
    results = [HostResult(box, HostStatus.OK if bad is None or box != "box2" else bad) for box in boxes]
    said = gate_skipped(write_site(tmp_path), boxes, results, check=check)
    assert message in said
    assert bool(said) == bool(message)


def system(**changes: object) -> SystemFact:
    good: dict[str, object] = {"architecture": "x86_64", "python": "3.11.2", "python_path": "/usr/bin/python3"}
    return SystemFact(**{**good, "cores": 4, "disk_free_bytes": 10_000_000_000, **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("facts", "changes", "message", "hint"),
    [
        (Facts(system=system()), (), "", ""),
        (Facts(system=system(architecture="aarch64")), (), "is a aarch64 machine, its profile says x86_64", "profile"),
        (Facts(system=system(python="3.9.2")), (), "runs Python 3.9.2 .* its profile says 3.11", "install python3.11"),
        (Facts(system=system(), packages_missing=("openssl", "sudo")), (), "missing: openssl sudo", "apt-get install"),
        (
            Facts(system=system(disk_free_bytes=500_000_000)),
            (Change("tree", "/opt/fleet/models/x", "missing", bytes_to_send=1_000_000_000),),
            "needs 1067 MB of disk below /opt/fleet, 500 MB are free",
            "du -xh",
        ),
        (
            Facts(system=system(disk_free_bytes=500_000_000)),
            (Change("environment", "/opt/fleet/envs/x", "missing", bytes_to_send=200_000_000),),
            "of disk below /opt/fleet",
            "du -xh",
        ),
        (Facts(system=system(disk_free_bytes=1)), (Change("link", "/opt/fleet/current", "missing"),), "", ""),
    ],
)
def test_what_a_box_must_have(
    tmp_path: Path, facts: Facts, changes: tuple[Change, ...], message: str, hint: str
) -> None:
    site_file = write_site(tmp_path)
    state = render(make_inputs(site_file, write_bundle(site_file)), "box1")
    profile = site_file.site.device_profiles["pc"]
    if not message:
        check_box("box1", profile, state, facts, changes)
        return
    with pytest.raises(BoxError, match=message) as caught:
        check_box("box1", profile, state, facts, changes)
    assert "box1: check before writing" in caught.value.message
    assert hint in caught.value.hint


def test_the_lock_names_its_holder_and_ends_with_it(tmp_path: Path) -> None:
    held = pytest.raises(FleetError, match=r"process \d+ on .*, since 2")
    with site_lock(tmp_path / "state"), held as caught, site_lock(tmp_path / "state"):
        pass
    assert caught.value.exit_code == ExitCode.LOCKED
    with site_lock(tmp_path / "state"):
        assert (tmp_path / "state").stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("text", ["", "[]", "{", '{"schema": 2}'])
def test_a_damaged_state_file_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "x.json").write_text(text)
    with pytest.raises(FleetError, match=r"x\.json: expected"):
        read_json(tmp_path / "x.json")


@pytest.mark.parametrize("text", ["{}", '{"boxes": 7}'])
@pytest.mark.parametrize("file", ["boxes.json", "failed.json", "ports.json"])
def test_a_state_file_that_says_something_else_is_named(tmp_path: Path, file: str, text: str) -> None:
    site_file = write_site(tmp_path, connection="local")
    state = site_file.state_directory
    write_private(state / file, json.dumps({"schema": 1, **json.loads(text)}).encode())
    readers: dict[str, Callable[[], object]] = {
        "boxes.json": lambda: known_cores(state),
        "failed.json": lambda: last_failures(state),
        "ports.json": lambda: site_ports(site_file, keep=False),
    }
    with pytest.raises(FleetError, match=rf"{file}: not what fleet wrote") as caught:
        readers[file]()
    assert caught.value.hint


def test_a_damaged_api_key_and_a_damaged_half_made_ca_are_named(tmp_path: Path) -> None:
    site_file = write_site(tmp_path, connection="local")
    state = site_file.state_directory
    write_private(state / "api_key", b"\xff\xfe")
    with pytest.raises(FleetError, match="api_key: not a key"):
        client_key(site_file, create=True)
    write_private(state / "ca" / "ca.key", b"not a key")
    with pytest.raises(FleetError, match=r"ca\.key: not readable as a private key"):
        ensure_authority(state, "tiny")


@pytest.mark.parametrize("character", [":", '"', "\t"])
def test_a_prefix_that_no_program_could_start_from_is_refused(tmp_path: Path, character: str) -> None:
    directory = tmp_path / f"a{character}b"
    directory.mkdir()
    with pytest.raises(FleetError, match="which no program's environment can hold") as caught:
        check_local_prefix(write_site(directory, connection="local"))
    assert caught.value.exit_code is ExitCode.INVALID_INVENTORY
    check_local_prefix(write_site(directory, connection="ssh"))


def test_failures_are_remembered_for_the_next_limit(tmp_path: Path) -> None:
    assert last_failures(tmp_path) == ()
    remember_failures(tmp_path, ["b", "a"])
    assert last_failures(tmp_path) == ("a", "b")


def test_down_is_for_local_sites(tmp_path: Path) -> None:
    with pytest.raises(FleetError, match="box1, box2, box3, control"):
        require_local(write_site(tmp_path))
    require_local(write_site(tmp_path, connection="local"))


def test_a_wheel_that_leads_out_of_its_directory_is_refused(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "bad.whl", "w") as archive:
        archive.writestr("../evil.py", "")
    with pytest.raises(FleetError, match="leads out"):
        read_library(tmp_path / "bad.whl")
    (tmp_path / "cut.whl").write_bytes(b"PK")
    with pytest.raises(FleetError, match=r"cut\.whl"):
        read_library(tmp_path / "cut.whl")


def test_a_librarys_digest_is_of_its_files_and_not_of_the_zip(tmp_path: Path) -> None:
    for name, year, order in (("a", 2001, ("x", "y")), ("b", 2002, ("y", "x"))):
        with zipfile.ZipFile(tmp_path / f"{name}.whl", "w") as archive:
            for file in order:
                archive.writestr(zipfile.ZipInfo(file, (year, 1, 1, 0, 0, 0)), file)
    assert read_library(tmp_path / "a.whl") == read_library(tmp_path / "b.whl")


@given(
    first=st.dictionaries(st.text("ab", max_size=3), st.binary(max_size=4), max_size=3),
    second=st.dictionaries(st.text("ab", max_size=3), st.binary(max_size=4), max_size=3),
)
def test_digests_tell_sets_of_files_apart(first: dict[str, bytes], second: dict[str, bytes]) -> None:
    assert (digest_of(first) == digest_of(second)) == (first == second)


def test_a_release_is_named_by_its_content(tmp_path: Path) -> None:
    site_file = write_site(tmp_path)
    inputs = make_inputs(site_file, write_bundle(site_file))
    paths = {
        render(inputs, "box1").links[0].target,
        render(replace(inputs, cores={"box1": 7}), "box1").links[0].target,
        render(inputs, "box1").links[0].target,
    }
    assert len(paths) == 2
