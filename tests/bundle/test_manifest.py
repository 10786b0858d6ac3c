"""manifest.json: written, read back, verified, refused when damaged."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from fleet.bundle.files import sha256_bytes
from fleet.bundle.manifest import (
    BundledModel,
    FileEntry,
    LockedWheel,
    Manifest,
    TargetWheels,
    load_manifest,
    make_lock,
)
from fleet.errors import FleetError

CONTENT = b"some wheel"


@pytest.fixture
def manifest(tmp_path: Path) -> Manifest:
    files = ("fleet/own.whl", "wheels/t/uv.whl", "wheels/t/a.whl")
    for name in files:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(CONTENT)
    lock = make_lock([LockedWheel("a", "1.0", "wheels/t/a.whl", sha256_bytes(CONTENT))])
    made = Manifest(
        directory=tmp_path,
        site="lab",
        fleet_version="0.1.0",
        files={name: FileEntry(sha256_bytes(CONTENT), len(CONTENT)) for name in files},
        fleet_wheel="fleet/own.whl",
        targets={"t": TargetWheels("wheels/t/uv.whl", {"control": lock})},
        models={"m": BundledModel("ab" * 32, "models/abababababababab", "apache-2.0")},
    )
    assert made.write()
    return made


def test_reading_gives_back_what_was_written(manifest: Manifest) -> None:
    assert load_manifest(manifest.directory) == manifest
    assert not manifest.write()


def test_files_are_verified_on_demand(manifest: Manifest) -> None:
    manifest.verify()
    (manifest.directory / "wheels/t/a.whl").write_bytes(b"same sizeX")
    manifest.verify(["wheels/t/uv.whl"])
    with pytest.raises(FleetError, match=r"a\.whl has SHA-256"):
        manifest.verify()
    (manifest.directory / "wheels/t/a.whl").write_bytes(b"short")
    with pytest.raises(FleetError, match=r"a\.whl has 5 bytes, the manifest says 10"):
        manifest.verify()
    (manifest.directory / "wheels/t/a.whl").unlink()
    with pytest.raises(FleetError, match=r"a\.whl is missing"):
        manifest.verify()


def test_what_the_bundle_lacks_is_named_with_what_it_has(manifest: Manifest) -> None:
    assert manifest.lock("t", "control").requirements[0].name == "a"
    assert manifest.model_directory("m") == manifest.directory / "models/abababababababab"
    with pytest.raises(FleetError, match=r"no wheels for linux_aarch64-cp311 \(it has t\)"):
        manifest.lock("linux_aarch64-cp311", "stage")
    with pytest.raises(FleetError, match="no lock 'stage' for t"):
        manifest.lock("t", "stage")
    with pytest.raises(FleetError, match=r"no model 'x' \(it has m\)"):
        manifest.model_directory("x")


def test_an_unfinished_bundle_says_so(tmp_path: Path) -> None:
    with pytest.raises(FleetError, match="not a finished bundle") as caught:
        load_manifest(tmp_path)
    assert "fleet bundle" in caught.value.hint


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("schema", 2),
        ("files", None),
        ("files", {"../outside": {"sha256": "00", "bytes": 1}}),
        ("files", {"/etc/passwd": {"sha256": "00", "bytes": 1}}),
        ("files", {}),
        ("targets", {"t": {"uv": "wheels/t/uv.whl", "locks": {"control": {"digest": "00"}}}}),
        ("models", []),
    ],
)
def test_a_damaged_manifest_is_refused(manifest: Manifest, key: str, value: object) -> None:
    path = manifest.directory / "manifest.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), key: value}))
    with pytest.raises(FleetError, match=r"manifest\.json"):
        load_manifest(manifest.directory)


def test_a_locks_digest_does_not_depend_on_the_order() -> None:
    wheels = [LockedWheel(name, "1", f"{name}.whl", "00") for name in "cab"]
    assert make_lock(wheels) == make_lock(reversed(wheels))
    assert make_lock(wheels).digest != make_lock(wheels[:2]).digest


def test_readers_of_a_bundle_load_no_heavy_library() -> None:
    code = (
        "import sys, fleet.bundle.manifest, fleet.bundle.model_info\n"
        "print(sorted({'gguf', 'numpy', 'torch', 'safetensors', 'tokenizers'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
