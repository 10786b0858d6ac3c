"""`fleet bundle` as a whole: targets of a site, our own wheel, and one run over a small site."""

from __future__ import annotations

import fcntl
import os
import zipfile
from pathlib import Path

import pytest
from click.testing import CliRunner

from fleet.bundle.build import build_bundle, check_sources, targets_of
from fleet.bundle.manifest import load_manifest
from fleet.bundle.own_wheel import build_own_wheel
from fleet.bundle.pip import Pip
from fleet.bundle.target import Target
from fleet.bundle.wheel_metadata import read_wheel_metadata
from fleet.cli.bundle import bundle
from fleet.errors import ExitCode, FleetError
from fleet.inventory.loader import load_site
from tests.bundle.tiny import save_huggingface, tiny_model

SITE = """\
site: small
bundle_dir: bundle
device_profiles:
  here: {{architecture: auto, python: auto{torch}}}
box_defaults: {{address: 127.0.0.1, connection: local, profile: here}}
boxes:
  one: {{}}
  control: {{roles: [coordinator, gateway]}}
models:
  tiny: {{source: {{path: tiny}}, licence: none}}
pipelines:
  main: {{model: tiny, boxes: [one]{engine}}}
"""
EXTERNAL = ", engine: {kind: external, command: serve, health_url: 'http://127.0.0.1:1/'}"
TORCH = ', torch: {version: "2.13.0", source: index}'


def write_site(directory: Path, *, torch: str = "", engine: str = EXTERNAL) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / "site.yaml"
    path.write_text(SITE.format(torch=torch, engine=engine))
    return path


def test_everything_that_is_not_there_is_named_with_its_line_before_any_download(tmp_path: Path) -> None:
    torch = ', torch: {version: "2.13.0", source: find-links, location: arm}'
    path = write_site(tmp_path, torch=torch, engine="")
    with pytest.raises(FleetError) as caught:
        build_bundle(load_site(path), tmp_path / "bundle", lambda _line: None)
    assert caught.value.message.splitlines() == [
        f"{path}:4: device_profiles.here.torch.location: {tmp_path / 'arm'} does not exist",
        f"{path}:10: models.tiny.source.path: {tmp_path / 'tiny'} does not exist",
    ]
    assert f"fleet bundle {path}" in caught.value.hint
    (tmp_path / "tiny").mkdir()
    check_sources(load_site(path), override=str(tmp_path))  # the override takes the place of every location


def test_targets_follow_the_boxes_and_the_override_wins(tmp_path: Path, python: str) -> None:
    site_file = load_site(write_site(tmp_path, torch=TORCH, engine=""))
    target = Target(os.uname().machine, python)
    (found,) = targets_of(site_file, None).items()
    assert found[0] == target
    assert found[1] is not None
    assert (found[1].version, found[1].source, found[1].said_by) == ("2.13.0", "index", "device profile here")
    overridden = targets_of(site_file, str(tmp_path))[target]
    assert overridden is not None
    assert (overridden.source, overridden.location) == ("find-links", tmp_path)


def test_two_profiles_of_one_target_must_pin_the_same_torch(tmp_path: Path) -> None:
    path = write_site(tmp_path, torch=TORCH, engine="")
    text = path.read_text()
    other = TORCH.replace("2.13.0", "2.12.0")
    text = text.replace("box_defaults", f"  other: {{architecture: auto, python: auto{other}}}\nbox_defaults")
    path.write_text(text.replace("  one: {}", "  one: {}\n  two: {profile: other}"))
    with pytest.raises(FleetError, match=r"profile here and device profile other share .* 2\.13\.0 .* 2\.12"):
        targets_of(load_site(path), None)


def test_our_own_wheel_is_reproducible_and_pure(tmp_path: Path, modern_pip: Pip) -> None:
    first = build_own_wheel(tmp_path / "a", tmp_path / "a.json", modern_pip)
    second = build_own_wheel(tmp_path / "b", tmp_path / "b.json", modern_pip)
    assert first.name.endswith("-py3-none-any.whl")
    assert first.read_bytes() == second.read_bytes()
    stamp = first.stat().st_mtime_ns
    assert build_own_wheel(tmp_path / "a", tmp_path / "a.json", modern_pip).stat().st_mtime_ns == stamp
    names = zipfile.ZipFile(first).namelist()
    assert "fleet/cli/main.py" in names
    assert "stage_runtime/link/messages.py" in names
    assert not [name for name in names if name.endswith(".pyc") or name.startswith(("tests", "build"))]
    assert any('extra == "guards"' in line for line in read_wheel_metadata(first).requires)


def test_a_site_is_bundled_and_a_second_run_changes_nothing(tmp_path: Path) -> None:
    """Real wheels from pip's configured places; a control box and an external engine, so no torch."""
    path = write_site(tmp_path)
    save_huggingface(tiny_model(tied=False), tmp_path / "tiny")
    done = CliRunner().invoke(bundle, [str(path)], catch_exceptions=False)
    assert done.exit_code == 0
    directory = tmp_path / "bundle" / "small"
    manifest = load_manifest(directory)
    manifest.verify()
    (target,) = manifest.targets
    assert list(manifest.targets[target].locks) == ["control"]
    names = {wheel.name for wheel in manifest.lock(target, "control").requirements}
    assert {"aiohttp", "supervisor", "tokenizers", "psutil", "nvidia-ml-py"} <= names
    assert not names & {"torch", "uv", "fabric"}
    on_disk = {file.relative_to(directory).as_posix() for file in directory.rglob("*") if file.is_file()}
    visible = {name for name in on_disk if "/." not in f"/{name}"}
    assert visible == {*manifest.files, "manifest.json"}

    stray = directory / "wheels" / target / "stale-1.0-py3-none-any.whl"
    stray.write_bytes(b"left by an earlier run")
    before = {name: (directory / name).stat().st_mtime_ns for name in (*manifest.files, "manifest.json")}
    again = build_bundle(load_site(path), directory, lambda _line: None)
    assert not again.changed
    assert {name: (directory / name).stat().st_mtime_ns for name in before} == before
    assert not stray.exists()


def test_a_bundle_that_is_being_built_is_locked(tmp_path: Path) -> None:
    site_file = load_site(write_site(tmp_path))
    state = tmp_path / "out" / ".state"
    state.mkdir(parents=True)
    with (state / "lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(FleetError, match="being built by another") as caught:
            build_bundle(site_file, tmp_path / "out", lambda _line: None)
    assert caught.value.exit_code == ExitCode.LOCKED
