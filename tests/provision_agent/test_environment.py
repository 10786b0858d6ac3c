"""Virtual environments made by the real uv from wheels, and mended file by file."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from fleet.errors import FleetError
from fleet.provision.desired import Content
from fleet.provision.sending import chunks
from fleet.ssh.results import BoxError

from .conftest import LocalBox, Snapshot, content


def test_environment_is_built_kept_and_mended(
    box: LocalBox, uv_wheel: Path, tmp_path: Path, snapshot: Callable[[Path], Snapshot]
) -> None:
    desired = box.with_environment(box.desired(), uv_wheel, tmp_path)
    box.provision(desired)
    environment = Path(desired.environments[0].path)
    code = "import tinybox.other; print(tinybox.other.double(tinybox.ANSWER))"
    run = subprocess.run([environment / "bin/python", "-I", "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout == "84\n"
    assert box.provision(desired)[0] == ()

    before = snapshot(box.prefix)
    victim = next(environment.glob("lib/*/site-packages/tinybox/other.py"))
    victim.write_bytes(victim.read_bytes().replace(b"2", b"3"))  # in place: the shared cache is damaged with it
    changes, _ = box.provision(desired)
    assert [(one.kind, one.path, one.why) for one in changes] == [("environment-file", str(victim), "content")]
    after = snapshot(box.prefix)
    assert {path for path in before if before[path] != after[path]} == {str(victim), str(victim.parent)}
    assert after[str(victim)][3] == before[str(victim)][3]

    stranger = victim.with_name("stranger.py")
    stranger.write_text("")
    victim.chmod(0o600)
    victim.with_name("__init__.py").unlink()
    changes, _ = box.provision(desired)
    assert {(Path(one.path).name, one.why) for one in changes} == {
        ("stranger.py", "extra"),
        ("other.py", "mode"),
        ("__init__.py", "missing"),
    }
    assert box.provision(desired)[0] == ()


def test_what_no_wheel_holds_is_built_anew(box: LocalBox, uv_wheel: Path, tmp_path: Path) -> None:
    desired = box.with_environment(box.desired(), uv_wheel, tmp_path)
    box.provision(desired)
    settings = Path(desired.environments[0].path) / "pyvenv.cfg"
    text = settings.read_text()
    settings.write_text(text.replace("home", "hame"))
    box.provision(desired)
    assert "home = " in settings.read_text()
    assert box.provision(desired)[0] == ()


def test_damaged_shared_cache_is_refused(box: LocalBox, uv_wheel: Path, tmp_path: Path) -> None:
    desired = box.with_environment(box.desired(), uv_wheel, tmp_path)
    box.provision(desired)
    environment = Path(desired.environments[0].path)
    victim = next(environment.glob("lib/*/site-packages/tinybox/other.py"))
    victim.write_bytes(victim.read_bytes().replace(b"2", b"3"))
    (environment / "pyvenv.cfg").unlink()  # forces a new build, which links from the damaged cache
    with pytest.raises(BoxError, match=r"other\.py is not what the wheel of tinybox-1\.0 holds"):
        box.provision(desired)


def test_wheels_of_another_python_are_refused(box: LocalBox, uv_wheel: Path, tmp_path: Path) -> None:
    desired = box.with_environment(box.desired(), uv_wheel, tmp_path)
    other = replace(desired, environments=(replace(desired.environments[0], python="3.9"),))
    with pytest.raises(BoxError, match=r"the wheels are for 3\.9") as caught:
        box.provision(other)
    assert "device profile" in caught.value.hint


def test_damaged_bundle_file_is_refused_by_name(box: LocalBox, uv_wheel: Path, tmp_path: Path) -> None:
    desired = box.with_environment(box.desired(), uv_wheel, tmp_path)
    name, wheel = desired.environments[0].wheels[0]
    data = bytearray((tmp_path / name).read_bytes())
    data[20] ^= 1
    (tmp_path / name).write_bytes(data)
    assert wheel.file == tmp_path / name
    with pytest.raises(BoxError, match=f"{name}: SHA-256") as caught:
        box.provision(desired)
    assert "fleet bundle" in caught.value.hint


def test_interrupted_apply_resumes(box: LocalBox) -> None:
    desired = box.desired(model=b"0123456789abcdef" * 100_000)
    model = desired.trees[0]
    # the second file's bytes are not what was announced: the transfer breaks after the first file is whole
    wrong = replace(model.files[1], content=replace(model.files[1].content, data=content(b"short").data))
    broken = replace(desired, trees=(replace(model, files=(model.files[0], wrong)), *desired.trees[1:]))
    with pytest.raises(BoxError, match="SHA-256"):
        box.provision(broken)
    partial = Path(f"{model.path}.partial")
    kept = partial / "model.json"
    assert not Path(model.path).exists()
    inode = kept.stat().st_ino
    (partial / "leftover").write_text("of an older version")
    changes, result = box.provision(desired)
    assert result is not None
    assert any(one.kind == "tree" and one.path == model.path for one in changes)
    assert (Path(model.path) / "model.json").stat().st_ino == inode
    assert not partial.exists()
    assert not (Path(model.path) / "leftover").exists()
    assert box.provision(desired)[0] == ()


def test_damaged_record_counts_as_empty_and_heals(box: LocalBox) -> None:
    desired = box.desired()
    box.provision(desired)
    record = box.prefix / "provision.json"
    assert json.loads(record.read_text())["supervisor"] == "one"
    record.write_text("{")
    changes, _ = box.provision(desired)
    assert {one.kind for one in changes} == {"identity", "supervisor", "program"}
    assert box.provision(desired)[0] == ()


@pytest.mark.skipif(os.geteuid() != 0, reason="owners can be set by root only")
def test_as_root_owners_and_bytecode_are_kept(box: LocalBox, uv_wheel: Path, tmp_path: Path) -> None:
    desired = replace(box.with_environment(box.desired(), uv_wheel, tmp_path), privileged=True)
    box.provision(desired)
    environment = Path(desired.environments[0].path)
    bytecode = next(environment.glob("lib/*/site-packages/tinybox/__pycache__/other.*.pyc"))
    data = bytearray(bytecode.read_bytes())
    data[-3] ^= 1
    bytecode.write_bytes(data)
    os.chown(desired.trees[0].files[0].path, 12345, 12345)
    assert {(Path(one.path).name, one.why) for one in box.provision(desired)[0]} == {
        (bytecode.name, "content"),
        ("model.json", "owner"),
    }
    assert box.provision(desired)[0] == ()
    for left in ("wheels", "cache", "partial"):
        assert not Path(f"{environment}.{left}").exists()


def test_bundle_file_that_is_gone_is_the_operators_error(tmp_path: Path) -> None:
    missing = Content("0" * 64, 10, file=tmp_path / "layer-000.safetensors")
    with pytest.raises(FleetError, match=r"layer-000\.safetensors: No such file") as caught:
        list(chunks(missing))
    assert caught.value.hint == "fleet bundle"
    grown = tmp_path / "grown"
    grown.write_bytes(b"x" * 2_000_000)
    sent = list(chunks(Content("0" * 64, 10, file=grown)))
    assert [message["last"] for message, _ in sent] == [True]
